"""Tensor parallelism: what is gained, and what is paid, when every layer is split over several ranks?

    mpirun -n 4 python -m minipar.lessons.tp          four processes
    python -m minipar.lessons.tp                      four threads of one process, no MPI needed

A small GPT reads the Python standard library's own sources. The lesson predicts the bytes that the split model must
send, proves that it computes the whole model's numbers, trains it, and sets its speedup beside the timeline of a step.
"""

import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import numpy as np

from minipar import arrays
from minipar.autograd import no_grad, saved_bytes
from minipar.collectives import all_gather
from minipar.collectives.ring import all_reduce_bytes
from minipar.comm import NullCommunicator
from minipar.comm.launch import available_cores, blas_threads
from minipar.context import current
from minipar.data import ByteCorpus
from minipar.lessons.report import COUNTED, MEASURED, PREDICTED, Report, parser, start
from minipar.nn import GPT, GPTConfig
from minipar.optim import AdamW
from minipar.parallel import DeviceMesh, equivalent, replicas_equal, tensor_parallel
from minipar.trace import Recorder, Timeline

SIZES = {  # name: (model, samples a batch)
    "tiny": (GPTConfig(context=16, width=32, layers=2, heads=4), 4),
    "small": (GPTConfig(), 8),
    "medium": (GPTConfig(context=256, width=512, layers=6, heads=8), 8),
}


def predicted_bytes(config, batch, time, comm):
    """Bytes that this rank sends in one training step, by where. Each all-reduce of S bytes: see all_reduce_bytes.

    Shoeybi et al. 2019: a layer costs two all-reduces forward and two backward, of batch x time x width elements.
    """
    activations = (batch * time * config.width, np.dtype(config.dtype).itemsize)
    rows = batch * time
    once = all_reduce_bytes(*activations, comm.size, comm.rank)
    loss = sum(all_reduce_bytes(n, activations[1], comm.size, comm.rank) for n in (rows, 2 * rows))
    return {
        "one layer, forward": 2 * once,
        "one layer, backward": 2 * once,
        "all layers": 4 * config.layers * once,
        "embedding, forward": once,
        "head, backward": once,
        "loss: 3 numbers a token": loss,
        "one step": (4 * config.layers + 2) * once + loss,
    }


def train_step(model, optimizer, batch, recorder=None):
    """One step; returns the loss (a float) and the bytes of activations that the forward pass kept."""
    region = recorder.region if recorder else _unrecorded
    model.zero_grad()
    with region("forward", "forward"):
        loss = model.loss(*batch)
    kept = saved_bytes(loss)
    with region("backward", "backward"):
        loss.backward()
    with region("optimizer", "AdamW"):
        optimizer.step()
    return loss.item(), kept
