"""Time, bandwidth and correctness of collectives over message sizes, all algorithms in turn in one run.

The columns are those of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): algbw is bytes / time, busbw is
algbw times what the operation must move at least over the slowest link, so that it can be compared with the hardware
whatever the number of ranks. Bytes are those of the whole array: in reduce_scatter and all_gather, all ranks' pieces.
"""

import math
import os
import tempfile
import time

import numpy as np

from minipar import collectives
from minipar.arrays import split_bounds, split_sizes
from minipar.collectives import ALGORITHMS, choice, shared
from minipar.comm import SymmetricBuffer
from minipar.errors import LaunchError, ShapeError

BUS_FACTOR = {"all_reduce": lambda n: 2 * (n - 1) / n, "broadcast": lambda n: 1, "reduce": lambda n: 1}
SECONDS = 0.05  # what one side may take in one round, with as many calls as fit


def bus_factor(operation, ranks):
    """busbw / algbw."""
    return BUS_FACTOR.get(operation, lambda n: (n - 1) / n)(ranks)


def sizes_between(begin, end, factor):
    """begin, begin x factor, ... up to end, in bytes; ShapeError for what never ends."""
    if begin < 1 or factor <= 1 or end < begin:
        raise ShapeError(f"sizes from {begin} to {end} bytes by {factor}: from 1 on, not falling, the factor above 1.")
    return [round(begin * factor**i) for i in range(int(math.log(end / begin) / math.log(factor) + 1e-9) + 1)]


def pattern(rank, elements, dtype):
    """Rank's numbers: small integers, so that every order of adding gives the same."""
    return ((np.arange(elements) * 7 + 3 * rank) % 11 - 5).astype(dtype)


class Case:
    """One operation at one size on this rank: what to call, and what must come out.

    sides: name -> function without arguments, which returns the result; expected: that of this rank, None if it has
    none. `library` is the bare call of mpi4py's Allreduce, `symmetric` is algorithm shared on arrays in a
    SymmetricBuffer, `limit` the least that the ranks must read and write for an all-reduce, all at once and without
    waiting for each other, so its numbers are wrong.
    """

    def __init__(self, operation, world, nbytes, dtype, redop, names, buffer=None, gloo=None):
        self.operation, self.world, self.redop = operation, world, redop
        self.count = max(1, nbytes // np.dtype(dtype).itemsize)
        n, rank = world.size, world.rank
        self.sizes = split_sizes(self.count, n)
        start, stop = split_bounds(self.count, n, rank)
        self.x = pattern(rank, self.count, dtype)
        out, piece = np.zeros_like(self.x), self.x[start:stop].copy()
        calls = {
            "all_reduce": lambda a: collectives.all_reduce(self.x, world, redop, out, algorithm=a),
            "reduce_scatter": lambda a: collectives.reduce_scatter(self.x, world, redop, algorithm=a),
            "all_gather": lambda a: collectives.all_gather(piece, world, sizes=self.sizes, algorithm=a),
            "broadcast": lambda a: collectives.broadcast(self.x, world, out=out, algorithm=a),
            "reduce": lambda a: collectives.reduce(self.x, world, redop, algorithm=a),
            "all_to_all": lambda a: collectives.all_to_all(self.x, world, algorithm=a),
            "gather": lambda a: collectives.gather(piece, world, sizes=self.sizes, algorithm=a),
            "scatter": lambda a: collectives.scatter(
                self.x if rank == 0 else None, out[start:stop], world, algorithm=a
            ),
        }
        self.sides = {}
        for name in names:
            if name in ("symmetric", "limit"):
                self.sides[name] = self._in_memory(buffer, name)
            elif name == "library":
                self.sides[name] = lambda: world.native().Allreduce(self.x, out) or out
            elif name == "gloo":
                self.sides[name] = lambda: gloo(self.x)
            else:
                self.sides[name] = lambda a=name: calls[operation](a)
        self.expected = self._expected(start, stop, dtype)

    def _in_memory(self, buffer, name):
        world = self.world
        mine = buffer.array(self.count, self.x.dtype)
        parts = buffer.peers(mine, world.ranks)
        reduction = collectives.reduction_of(np, self.redop, self.x.dtype)

        def symmetric():
            return collectives.all_reduce(mine, world, self.redop, out=mine, algorithm="shared")

        blocks = list(shared.blocks(parts, parts, world))

        def limit():
            shared.reduce_blocks(blocks, world, reduction)
            return mine

        self.place = mine
        return symmetric if name == "symmetric" else limit

    def _expected(self, start, stop, dtype):
        n, rank = self.world.size, self.world.rank
        everybody = (pattern(r, self.count, dtype) for r in range(n))
        if self.operation in ("all_reduce", "reduce", "reduce_scatter"):
            total = next(everybody).copy()
            for x in everybody:
                getattr(np, collectives.COMBINE[self.redop])(total, x, out=total)
            if self.redop == "mean":
                total = (total / n).astype(dtype)
            if self.operation == "reduce_scatter":
                return total[start:stop]
            return total if self.operation == "all_reduce" or rank == 0 else None
        if self.operation == "broadcast":
            return pattern(0, self.count, dtype)
        if self.operation == "scatter":
            return pattern(0, self.count, dtype)[start:stop]
        if self.operation == "all_to_all":
            return np.concatenate([x[start:stop] for x in everybody])
        bounds = (split_bounds(self.count, n, r) for r in range(n))
        whole = np.concatenate([x[a:b] for x, (a, b) in zip(everybody, bounds, strict=True)])
        return whole if self.operation == "all_gather" or rank == 0 else None

    def wrong(self, name):
        """How many elements of a call's result are wrong on this rank; the limit's are not looked at."""
        if name == "limit":
            return 0
        if name == "symmetric":
            self.place[...] = self.x
            self.world.barrier()
        result = self.sides[name]()
        if self.expected is None:
            return 0
        tolerance = 4 * np.finfo(result.dtype).eps if self.redop == "mean" else 0
        return int((~np.isclose(result, self.expected, rtol=tolerance, atol=0)).sum())


def bench(world, operation, sizes, names, dtype="float32", redop="sum", rounds=11, advance=lambda rows: None):
    """Measure `operation` at `sizes` (bytes) by the algorithms `names`; a list of rows, the same on every rank.

    A row has op, algorithm, ranks, bytes, count, dtype, redop, time_us (median over the rounds of the slowest rank's
    mean time a call), spread_us (half the distance of the quartiles), algbw_gbps, busbw_gbps (10^9 bytes a second),
    wrong. advance: called with the rows of each size.
    """
    others = {"library", "symmetric", "limit", "gloo"} & set(names)
    if others and operation != "all_reduce":
        raise ShapeError(f"{', '.join(sorted(others))}: only for all_reduce, not for {operation}.")
    for name in set(names) - others:
        choice.choose(operation, 0, world, name)  # an unknown name ends here
    if "native" in names or "library" in names:
        world.native()
    if "library" in names and redop != "sum":
        raise ShapeError("library: only for sums.")
    buffer = SymmetricBuffer(world, max(sizes) + 64) if others & {"symmetric", "limit"} else None
    gloo = gloo_all_reduce(world) if "gloo" in names else None
    rows = []
    for nbytes in sizes:
        case = Case(operation, world, nbytes, dtype, redop, names, buffer, gloo)
        wrong = [case.wrong(name) for name in names]
        calls, times = {}, {name: [] for name in names}
        for name in names:
            once = min(_time(case, name, 1, world) for _ in range(3))
            calls[name] = max(1, min(1000, round(SECONDS / 5 / max(once, 1e-7))))
        for i in range(rounds):
            for name in np.random.default_rng(i).permutation(names).tolist():  # nobody always follows the same one
                times[name].append(_time(case, name, calls[name], world))
        wrong = everyone(world, wrong).sum(axis=0)
        new = []
        for name, bad in zip(names, wrong, strict=True):
            low, middle, high = np.percentile(times[name], [25, 50, 75])
            moved = case.count * np.dtype(dtype).itemsize
            new.append({
                "op": operation, "algorithm": name, "ranks": world.size, "bytes": moved, "count": case.count,
                "dtype": dtype, "redop": redop if "reduce" in operation else "none", "time_us": middle * 1e6,
                "spread_us": (high - low) / 2 * 1e6, "algbw_gbps": moved / middle / 1e9,
                "busbw_gbps": moved / middle / 1e9 * bus_factor(operation, world.size), "wrong": int(bad),
            })  # fmt: skip
        rows += new
        advance(new)
    return rows


def _time(case, name, calls, world):
    """Seconds a call of the slowest rank; the same on every rank."""
    run = case.sides[name]
    if name in ("symmetric", "limit"):
        case.place[...] = 0  # other numbers would grow from call to call
    world.barrier("barrier of bench")
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return float(everyone(world, (time.perf_counter() - start) / calls).max())


def everyone(world, values):
    """Every rank's `values`, a row each."""
    values = np.array(values)
    return collectives.all_gather(values[None], world, sizes=[1] * world.size, operation="figures of bench")


def gloo_all_reduce(world):
    """A function that reduces an array in place by PyTorch's gloo; LaunchError where there is none."""
    try:
        import torch
        from torch import distributed
    except ImportError as error:
        raise LaunchError("PyTorch is not installed, so there is no gloo to compare with.") from error
    if world.transport != "MPI":
        raise LaunchError("gloo needs a process for each rank: start with mpirun.")
    name = np.frombuffer(
        os.path.join(tempfile.gettempdir(), f"minipar-gloo-{os.getpid()}").ljust(200).encode(), np.uint8
    )
    path = collectives.broadcast(name.copy(), world).tobytes().decode().strip()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=world.rank, world_size=world.size)
    torch.set_num_threads(1)

    def reduce(x):
        result = x.copy()
        distributed.all_reduce(torch.from_numpy(result))
        return result

    return reduce


TUNED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")  # those in which all know the size


def tune(world, advance=lambda rows: None):
    """A table for `choice`: {operation: [[up to so many bytes, algorithm], ...]}, measured on this world."""
    table = {}
    for operation in TUNED:
        names = [a for a in ALGORITHMS[operation] if a != "native" or world.transport == "MPI"]
        if len(names) > 1:
            rows = bench(world, operation, sizes_between(64, 16 << 20, 4), names, rounds=7, advance=advance)
            table[operation] = limits_of(rows)
    return table


def limits_of(rows):
    """[[up to so many bytes, algorithm], ...] from the rows of `bench`: the last bytes None, for all above."""
    limits = []
    for nbytes in sorted({row["bytes"] for row in rows}):
        times = {row["algorithm"]: row["time_us"] for row in rows if row["bytes"] == nbytes}
        best = min(times, key=times.get)
        if limits and times[limits[-1][1]] < 1.1 * times[best]:
            best = limits[-1][1]  # what a tenth decides may be noise
        if not limits or limits[-1][1] != best:
            limits.append([0, best])
        limits[-1][0] = 2 * nbytes  # half way, by factors, to the next size
    limits[-1][0] = None
    return limits
