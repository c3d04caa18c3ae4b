"""The training step of one rank: how long it takes, beside its matrix products alone and beside PyTorch's.

All sides run in turn in one process, each on one thread, so that the ratio holds on a machine whose speed drifts.
"""

import time
from statistics import median

import numpy as np
from threadpoolctl import threadpool_limits

from minipar import rng
from minipar.errors import LaunchError
from minipar.launch import keep_memory
from minipar.nn import GPT, GPTConfig
from minipar.optim import AdamW

BATCH = 8


def products(config, batch):
    """A function that computes the matrix products of one training step, with every result in a buffer of its own.

    Each weight's product takes part three times (forward, gradient of its input, of itself), attention's two likewise.
    """
    tokens, width, time_, heads = batch * config.context, config.width, config.context, config.heads
    linear = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)] * config.layers
    linear.append((width, config.vocab_size))
    normal = np.random.default_rng(0).standard_normal

    def operands(lead, n, k, m):
        x, w, y = (normal((*lead, *shape), np.float32) for shape in ((n, k), (k, m), (n, m)))
        return x, w, y, np.empty_like(y), np.empty_like(x), np.empty_like(w)

    sets = [operands((), tokens, k, m) for k, m in linear]
    depth = width // heads
    attention = operands((batch, heads), time_, depth, time_), operands((batch, heads), time_, time_, depth)
    sets += attention * config.layers

    def run():
        for x, w, dy, y, dx, dw in sets:
            np.matmul(x, w, out=y)
            np.matmul(dy, w.swapaxes(-1, -2), out=dx)
            np.matmul(x.swapaxes(-1, -2), dy, out=dw)

    return run


def minipar_step(config, tokens, targets):
    """A function that does one training step of nn.GPT with AdamW."""
    model = GPT(config)
    optimizer = AdamW(model.parameters())

    def run():
        model.zero_grad()
        model.loss(tokens, targets).backward()
        optimizer.step()

    return run


def bench_step(against=None, rounds=11, advance=lambda text: None):
    """Median times of one training step (GPTConfig's defaults, batch 8, AdamW, float32, one thread), in ms.

    against: "torch" to measure PyTorch's eager step too. advance: called with a text after each round. Returns a dict
    with minipar_ms, limit_ms (the matrix products alone), tokens_per_second and, against a peer, peer, peer_ms, ratio
    (median over the rounds of minipar's time over the peer's; below 1 minipar is faster).
    """
    config = GPTConfig()
    pieces = rng.integers(config.vocab_size, BATCH * (config.context + 1), 0, "bench").reshape(BATCH, -1)
    tokens, targets = pieces[:, :-1], pieces[:, 1:]
    keep_memory()
    with threadpool_limits(1):
        sides = {"minipar": minipar_step(config, tokens, targets), "limit": products(config, BATCH)}
        if against == "torch":
            try:
                from minipar.bench.torch_step import torch_step
            except ImportError as error:
                raise LaunchError("PyTorch is not installed, so there is nothing to compare with.") from error
            sides["torch"] = torch_step(config, tokens, targets)
        times = {name: [] for name in sides}
        for round_ in range(rounds + 2):  # the first two warm up
            for name, run in sides.items():
                start = time.perf_counter()
                run()
                if round_ >= 2:
                    times[name].append(time.perf_counter() - start)
            advance(f"round {round_ + 1} of {rounds + 2}")
    ms = {name: median(values) * 1e3 for name, values in times.items()}
    result = {
        "minipar_ms": ms["minipar"],
        "one_rank_ms": ms["minipar"],
        "limit_ms": ms["limit"],
        "tokens_per_second": tokens.size / ms["minipar"] * 1e3,
        "ranks": 1,
        "threads": 1,
        "rounds": rounds,
    }
    if against:
        pairs = [a / b for a, b in zip(times["minipar"], times[against], strict=True)]
        result |= {"peer": against, "peer_ms": ms[against], "ratio": median(pairs)}
    return result
