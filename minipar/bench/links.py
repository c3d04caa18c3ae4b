"""What the machine can do: copying memory, and messages between two ranks."""

import time

import numpy as np

from minipar.bench.collectives import everyone
from minipar.collectives import ring, tree


def bench_copy(world, sizes, rounds=11, advance=lambda rows: None):
    """Every rank copies arrays of its own at the same time: rows of bytes, time_us, gbps (bytes copied / time)."""
    rows = []
    for nbytes in sizes:
        source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        calls = max(1, min(1000, int(20e6 / nbytes)))
        seconds = _median(world, rounds, calls, lambda t=target, s=source: np.copyto(t, s))
        rows.append({"op": "copy", "ranks": world.size, "bytes": nbytes, "time_us": seconds * 1e6,
                     "gbps": nbytes / seconds / 1e9})  # fmt: skip
        advance(rows[-1:])
    return rows


def bench_p2p(world, sizes, rounds=11, advance=lambda rows: None, pair=(0, 1)):
    """Messages between two ranks: rows of bytes, time_us (half a round trip), gbps, both_gbps (two at once, summed)."""
    rows, (a, b) = [], pair
    for nbytes in sizes:
        out, back = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        calls = max(1, min(200, int(5e6 / nbytes)))

        def ping_pong(out=out, back=back):
            if world.rank == a:
                world.send(out, b, "ping")
                world.recv(back, b, "pong")
            elif world.rank == b:
                world.recv(back, a, "ping")
                world.send(out, a, "pong")

        def both(out=out, back=back):
            if world.rank in pair:
                peer = b if world.rank == a else a
                request = world.isend(out, peer, "both ways")
                world.recv(back, peer, "both ways")
                request.wait()

        one = _median(world, rounds, calls, ping_pong) / 2
        two = _median(world, rounds, calls, both)
        rows.append({"op": "p2p", "ranks": list(pair), "bytes": nbytes, "time_us": one * 1e6,
                     "gbps": nbytes / one / 1e9, "both_gbps": 2 * nbytes / two / 1e9})  # fmt: skip
        advance(rows[-1:])
    return rows


def bench_round(world, sizes, rounds=11):
    """One round of a ring, all ranks at once: send to the right, receive from the left and add: bytes, time_us."""
    rows = []
    for nbytes in sizes:
        out, own, total = (np.zeros(max(1, nbytes // 4), np.float32) for _ in range(3))
        calls = max(1, min(200, int(5e6 / nbytes)))
        seconds = _median(
            world, rounds, calls, lambda o=out, t=total, a=own: ring.shift(o, t, world, "round", np.add, a)
        )
        rows.append({"op": "round", "ranks": world.size, "bytes": out.nbytes, "time_us": seconds * 1e6})
    return rows


def bench_hop(world, sizes, rounds=11):
    """One hop of a tree: rank 0 sends, rank 1 receives and adds; half of there and back: bytes, time_us."""
    rows, peer = [], 1 - world.rank
    for nbytes in sizes:
        out, own, total = (np.zeros(max(1, nbytes // 4), np.float32) for _ in range(3))

        def there_and_back(out=out, own=own, total=total):
            if world.rank == 0:
                tree.send(out, peer, world, "hop")
            if world.rank < 2:
                ring.receive(total, peer, world, "hop", np.add, own)
            if world.rank == 1:
                tree.send(out, peer, world, "hop")

        seconds = _median(world, rounds, max(1, min(200, int(5e6 / nbytes))), there_and_back) / 2
        rows.append({"op": "hop", "ranks": [0, 1], "bytes": out.nbytes, "time_us": seconds * 1e6})
    return rows


def matrix(world, nbytes, rounds=5):
    """Half round trips between all pairs of ranks in us, one pair at a time: a symmetric (ranks, ranks) array."""
    times = np.zeros((world.size, world.size))
    for a in range(world.size):
        for b in range(a + 1, world.size):
            times[a, b] = times[b, a] = bench_p2p(world, [nbytes], rounds, pair=(a, b))[0]["time_us"]
    return times


def alpha_beta(rows):
    """(alpha, beta) of time = alpha + beta x bytes, in seconds and seconds a byte, fitted to the relative errors."""
    nbytes = np.array([row["bytes"] for row in rows], float)
    seconds = np.array([row["time_us"] for row in rows]) * 1e-6
    columns = np.stack([np.ones_like(nbytes), nbytes], axis=1) / seconds[:, None]
    alpha, beta = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)[0]
    return max(alpha, 0.0), max(beta, 0.0)


def _median(world, rounds, calls, run):
    """The median over the rounds of the slowest rank's seconds a call, after one round to warm up."""
    times = []
    for _ in range(rounds + 1):
        world.barrier("barrier of bench")
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - start) / calls)
    return float(np.median(everyone(world, times).max(axis=0)[1:]))
