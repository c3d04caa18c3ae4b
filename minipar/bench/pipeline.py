"""Training steps of a 1F1B pipeline, a batch of 8 in 8 micro-batches on as many stages as ranks.

All sides run in turn, in an order that changes from round to round: Pipeline; its limit, the same stages unconnected
times what the schedule's bubble adds to that; one rank with the whole batch, and in micro-batches, while the others
wait; PyTorch's torch.distributed.pipelining with its Schedule1F1B over gloo.
"""

import time

import numpy as np
from threadpoolctl import threadpool_limits

from minipar import rng
from minipar.bench.collectives import everyone, gloo_all_reduce
from minipar.bench.data_parallel import step_of
from minipar.bench.step import BATCH
from minipar.comm import NullCommunicator
from minipar.launch import keep_memory
from minipar.nn import GPT, GPTConfig
from minipar.optim import AdamW
from minipar.parallel.pipeline import SCHEDULES, Costs, Pipeline, simulate


def pipeline_step(pipeline, batch):
    """A function that does one training step."""
    optimizer = AdamW(pipeline.parameters())

    def run():
        pipeline.zero_grad()
        pipeline.forward_backward(*batch)
        optimizer.step()

    return run


def unconnected(pipeline, batch):
    """The pipeline after one step that told everybody what the micro-batches are, with nothing moved from then on."""
    pipeline.forward_backward(*batch)
    plan = pipeline._plan(*batch)
    pipeline.comm = pipeline.mail.comm = NullCommunicator(pipeline.comm.rank, pipeline.comm.size)
    pipeline._plan = lambda x, targets: plan
    return pipeline


def bench_pipeline(world, against=None, rounds=11, config=None, advance=lambda text: None):
    """Median times of one training step of a GPT (by default that of `bench step`), the slowest rank's, in ms.

    Returns a dict: SIDE_ms for "pipeline", "limit", "unconnected", "one_rank", "one_rank_micro" and with
    against="torch" "torch"; of_limit, the median over the rounds of limit over pipeline; bubble, by which the limit
    exceeds the unconnected stages; against a peer ratio, pipeline over its time.
    """
    config = config or GPTConfig()
    pieces = rng.integers(config.vocab_size, BATCH * (config.context + 1), 0, "bench").reshape(BATCH, -1)
    batch = pieces[:, :-1], pieces[:, 1:]
    schedule = SCHEDULES["1f1b"](world.size, BATCH)
    mesh, alone = {"pp": world, "dp": NullCommunicator(0, 1)}, {axis: NullCommunicator(0, 1) for axis in ("pp", "dp")}
    keep_memory()
    with threadpool_limits(1):
        micro = Pipeline(GPT(config), alone, SCHEDULES["1f1b"](1, BATCH))
        sides = {
            "pipeline": pipeline_step(Pipeline(GPT(config), mesh, schedule), batch),
            "unconnected": pipeline_step(unconnected(Pipeline(GPT(config), mesh, schedule), batch), batch),
            "one_rank": step_of(GPT(config), batch) if world.rank == 0 else lambda: None,
            "one_rank_micro": pipeline_step(micro, batch) if world.rank == 0 else lambda: None,
        }
        if against == "torch":
            gloo_all_reduce(world)  # sets gloo up, or says why not
            from minipar.bench.torch_step import torch_pipeline_step

            sides["torch"] = torch_pipeline_step(config, *batch, BATCH)
        times = {name: [] for name in sides}
        for round_ in range(rounds + 2):  # the first two warm up
            for name in np.random.default_rng(round_).permutation(list(sides)).tolist():
                world.barrier("barrier between measurements")
                start = time.perf_counter()
                sides[name]()
                times[name].append(time.perf_counter() - start)
            advance(f"round {round_ + 1} of {rounds + 2}")
    slowest = {name: everyone(world, values).max(axis=0)[2:] for name, values in times.items()}
    bubble = simulate(schedule, Costs(w=1)).bubble.ratio_to_ideal
    slowest["limit"] = slowest["unconnected"] * (1 + bubble)
    result = {f"{name}_ms": float(np.median(values)) * 1e3 for name, values in slowest.items()}
    result |= {
        "rounds": rounds,
        "bubble": bubble,
        "of_limit": float(np.median(slowest["limit"] / slowest["pipeline"])),
        "speedup": float(np.median(slowest["one_rank"] / slowest["pipeline"])),
    }
    if against:
        result |= {"peer": against, "ratio": float(np.median(slowest["pipeline"] / slowest[against]))}
    return result
