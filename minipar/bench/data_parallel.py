"""Training steps of data parallelism, weak scaling: every rank has a batch of 8, so the best is one rank's time.

All sides run in turn, in an order that changes from round to round: DataParallel; the same with one bucket, which has
nothing left to overlap with; the limit, the same ranks unconnected; one rank while the others wait; PyTorch's
DistributedDataParallel over gloo.
"""

import time

import numpy as np
from threadpoolctl import threadpool_limits

from minipar import rng
from minipar.bench.collectives import everyone, gloo_all_reduce
from minipar.bench.step import BATCH
from minipar.comm import NullCommunicator
from minipar.launch import keep_memory
from minipar.nn import GPT, GPTConfig
from minipar.optim import AdamW
from minipar.parallel import DataParallel


def step_of(model, part):
    """A function that does one training step."""
    optimizer = AdamW(model.parameters())

    def run():
        model.zero_grad()
        model.loss(*part).backward()
        optimizer.step()

    return run


def unconnected(config, world):
    """DataParallel whose ranks move nothing, each with the weights that rank 0 would have sent."""
    model = DataParallel(GPT(config), {"dp": NullCommunicator(world.rank, world.size)})
    for p, q in zip(model.parameters(), GPT(config).parameters(), strict=True):
        p.data[...] = q.data
        p.changed()
    return model


def bench_data_parallel(world, against=None, rounds=11, config=None, advance=lambda text: None):
    """Median times of one training step of a GPT (by default that of `bench step`), the slowest rank's, in ms.

    Returns a dict: SIDE_ms for "dp", "one_bucket", "limit", "one_rank" and against="torch" "torch"; over_limit, the
    median over the rounds of dp over limit; exposed, what of the step is not in the limit; efficiency, one_rank over
    dp; against a peer ratio, dp over its time.
    """
    config = config or GPTConfig()
    pieces = rng.integers(config.vocab_size, BATCH * (config.context + 1), world.rank, "bench").reshape(BATCH, -1)
    part = pieces[:, :-1], pieces[:, 1:]
    keep_memory()
    with threadpool_limits(1):
        sides = {
            "dp": step_of(DataParallel(GPT(config), {"dp": world}), part),
            "one_bucket": step_of(DataParallel(GPT(config), {"dp": world}, bucket_bytes=1 << 40), part),
            "limit": step_of(unconnected(config, world), part),
            "one_rank": step_of(GPT(config), part) if world.rank == 0 else lambda: None,
        }
        if against == "torch":
            gloo_all_reduce(world)  # sets gloo up, or says why not
            from minipar.bench.torch_step import torch_step

            sides["torch"] = torch_step(config, *part, parallel=True)
        times = {name: [] for name in sides}
        for round_ in range(rounds + 2):  # the first two warm up
            for name in np.random.default_rng(round_).permutation(list(sides)).tolist():
                world.barrier("barrier between measurements")
                start = time.perf_counter()
                sides[name]()
                times[name].append(time.perf_counter() - start)
            advance(f"round {round_ + 1} of {rounds + 2}")
    slowest = {name: everyone(world, values).max(axis=0)[2:] for name, values in times.items()}
    result = {f"{name}_ms": float(np.median(values)) * 1e3 for name, values in slowest.items()}
    over = float(np.median(slowest["dp"] / slowest["limit"]))
    result |= {
        "rounds": rounds,
        "over_limit": over,
        "exposed": 1 - 1 / over,
        "exposed_one_bucket": 1 - float(np.median(slowest["limit"] / slowest["one_bucket"])),
        "efficiency": float(np.median(slowest["one_rank"] / slowest["dp"])),
        "tokens_per_second": world.size * part[0].size / result["dp_ms"] * 1e3,
    }
    if against:
        result |= {"peer": against, "ratio": float(np.median(slowest["dp"] / slowest[against]))}
    return result
