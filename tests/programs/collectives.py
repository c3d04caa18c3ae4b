"""The collectives over MPI against NumPy; prints ok on every rank."""

import os

import numpy as np

import minipar
from minipar.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from minipar.errors import MessageMismatch


def main(world):
    n = world.size
    for size in (0, 1, 2, 3, 7, 1000, 16_385, 131_072, 300_001):
        for dtype in (np.float64, np.float32, np.int64, np.float16):
            values = [((np.arange(size) * (r + 3)) % 5).astype(dtype) for r in range(n)]
            total = sum(values[1:], values[0]).astype(dtype)
            x = values[world.rank]
            np.testing.assert_array_equal(all_reduce(x, world), total)
            np.testing.assert_array_equal(all_gather(reduce_scatter(x, world), world), total)
            np.testing.assert_array_equal(broadcast(x, world, n - 1), values[n - 1])
            np.testing.assert_array_equal(all_reduce(x[::-1], world), total[::-1])
    group = world.split(world.rank % 2, key=-world.rank)
    members = [r for r in range(n) if r % 2 == world.rank % 2]
    assert all_reduce(np.array(10**world.rank), group) == sum(10**r for r in members)
    world.barrier()
    if n > 1:
        try:
            if world.rank == 0:
                world.send(np.zeros(3), 1, "one thing")
            elif world.rank == 1:
                world.recv(np.zeros(3), 0, "another")
                raise AssertionError("a mismatch was not noticed")
        except MessageMismatch as error:
            assert "rank 0 sent 'one thing'" in str(error) and "rank 1 expected 'another'" in str(error)
    os.write(1, b"ok\n")


minipar.run(main)
