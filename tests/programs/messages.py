"""Messages between MPI ranks, whatever their dtype, size and order; prints ok on every rank."""

import multiprocessing
import os
import threading

import numpy as np

import minipar
from minipar.comm import Traffic


def check_dtypes(world):
    for dtype in ("float16", "float32", "int64", "bool", "complex128", "V2", "M8[s]"):
        for shape in ((), (0,), (3,), (2, 0), (2, 3)):
            exchange(world, (np.arange(np.prod(shape)).reshape(shape) + world.rank).astype(dtype))


def exchange(world, array):
    """Round the ring once: everyone's array reaches the right neighbour."""
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    arrival = np.empty(array.shape, array.dtype)
    requests = [world.irecv(arrival, left, "x"), world.isend(array, right, "x")]
    for request in requests:
        request.wait()
        assert request.done()
    world.barrier()
    assert array.dtype.kind in "bVM" or (arrival - array == left - world.rank).all()


def check_order(world):
    """Messages of one tag arrive in order; those of another tag can be taken first."""
    if world.rank == 0 and world.size > 1:
        for i in range(10):
            world.send(np.array([i]), world.size - 1, "count", tag=i % 2)
    elif world.rank == world.size - 1 > 0:
        got = np.empty(1, np.int64)
        for i in (1, 3, 5, 7, 9, 0, 2, 4, 6, 8):
            world.recv(got, 0, "count", tag=i % 2)
            assert got[0] == i


def check_groups_do_not_mix(world):
    """The same ranks exchange at the same time in two groups, and receive in the other order."""
    first, second = world.split(0), world.split(0, key=-world.rank)
    assert second.ranks == first.ranks[::-1] and second.sent is world.sent
    if world.size > 1:
        if world.rank == 0:
            sends = [
                first.isend(np.array([1]), first.ranks.index(1), "x"),
                second.isend(np.array([2]), second.ranks.index(1), "x"),
            ]
            for request in sends:
                request.wait()
        if world.rank == 1:
            got = np.empty(1, np.int64)
            for expected, group in ((2, second), (1, first)):
                group.recv(got, group.ranks.index(0), "x")
                assert got[0] == expected
    assert world.split(None if world.rank else 0) is None or world.rank == 0


def check_traffic(world):
    before = Traffic(world.sent.messages, world.sent.bytes)
    exchange(world, np.full(100, world.rank, float))
    rounds = (world.size - 1).bit_length()  # of the barrier, whose messages are empty
    assert (world.sent.messages - before.messages, world.sent.bytes - before.bytes) == (1 + rounds, 800)


def check_workers_and_threads(world):
    """Worker processes do not start MPI again, and a thread may end itself without ending the job."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
    thread = threading.Thread(target=exit_quietly)
    thread.start()
    thread.join()
    exchange(world, np.full(1, world.rank))


def exit_quietly():
    raise SystemExit(1)


def main(world):
    check_dtypes(world)
    check_order(world)
    check_groups_do_not_mix(world)
    check_traffic(world)
    check_workers_and_threads(world)
    os.write(1, b"ok\n")


if __name__ == "__main__":
    minipar.run(main)
