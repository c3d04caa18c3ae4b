"""The collectives over MPI against NumPy; prints ok on every rank."""

import os

import numpy as np
from mpi4py import MPI

import minipar
from minipar.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from minipar.collectives.ring import SEGMENT_BYTES, all_reduce_traffic
from minipar.comm.mpi import MPICommunicator
from minipar.errors import MessageMismatch
from minipar.parallel import DeviceMesh

SIZES = (0, 1, 2, 3, 7, 1000, 16_385, 131_072, SEGMENT_BYTES // 4 + 5)


class Synchronous(MPI.Intracomm):
    """Sends that wait for their receiver at every size, as beyond MPI's eager limit."""

    def Isend(self, *arguments):
        return self.Issend(*arguments)


def check_values(world):
    for size in SIZES:
        for dtype in (np.float64, np.float32, np.int64, np.float16):
            values = [((np.arange(size) * (r + 3)) % 5).astype(dtype) for r in range(world.size)]
            total = sum(values[1:], values[0]).astype(dtype)
            x = values[world.rank]
            x.flags.writeable = False
            for algorithm in ("auto", "ring", "tree", "halving_doubling"):
                np.testing.assert_array_equal(all_reduce(x, world, algorithm=algorithm), total)
            np.testing.assert_array_equal(all_gather(reduce_scatter(x, world), world), total)
            np.testing.assert_array_equal(broadcast(x, world, world.size - 1), values[-1])
            np.testing.assert_array_equal(all_reduce(x[::-1], world), total[::-1])


def check_bits(world):
    x = np.random.default_rng(world.rank).standard_normal(10_007).astype(np.float32)
    totals = [all_reduce(x, world) for _ in range(5)]
    assert len({total.tobytes() for total in totals}) == 1
    np.testing.assert_array_equal(totals[0].view(np.uint32), broadcast(totals[0], world).view(np.uint32))


def check_traffic(world):
    for size in SIZES:
        messages, nbytes = world.sent.messages, world.sent.bytes
        all_reduce(np.zeros(size, np.float32), world, algorithm="ring")
        expected = all_reduce_traffic(size, 4, world.size, world.rank)
        assert (world.sent.messages - messages, world.sent.bytes - nbytes) == (expected.messages, expected.bytes)


def check_groups(world):
    group = world.split(world.rank % 2, key=-world.rank)
    members = [r for r in reversed(range(world.size)) if r % 2 == world.rank % 2]
    x = np.array(10**world.rank)
    assert all_reduce(x, group) == sum(10**r for r in members)
    assert broadcast(x, group, root=0) == 10 ** members[0]
    mesh = DeviceMesh(world, tp=2 if world.size % 2 == 0 else 1)
    assert all_reduce(all_reduce(x, mesh["tp"]), mesh["dp"]) == int("1" * world.size)


def check_mismatch(world):
    try:
        if world.rank == 0:
            world.send(np.zeros(3), 1, "one thing")
        elif world.rank == 1:
            world.recv(np.zeros(3), 0, "another")
            raise AssertionError("a mismatch was not noticed")
    except MessageMismatch as error:
        assert "rank 0 sent 'one thing'" in str(error) and "rank 1 expected 'another'" in str(error)


def main(world):
    synchronous = MPICommunicator(Synchronous(MPI.COMM_WORLD.Dup()))
    for comm in (world, synchronous, MPICommunicator(MPI.COMM_WORLD.Dup(), check_headers=False)):
        check_values(comm)
        check_groups(comm)
    check_bits(world)
    check_traffic(world)
    if world.size == 2:
        large = np.full(8 << 20, world.rank + 1.0)  # 64 MiB
        all_reduce(large, synchronous, out=large, algorithm="ring")
        assert large.min() == large.max() == 3
    world.barrier()
    if world.size > 1:
        check_mismatch(world)
    os.write(1, b"ok\n")


minipar.run(main)
