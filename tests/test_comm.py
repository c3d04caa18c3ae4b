"""Messages between ranks: the same checks on threads and over MPI, and what a communicator refuses."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import messages

import minipar
from minipar.comm import thread
from minipar.context import current
from minipar.errors import ShapeError
from minipar.trace import Recorder

CHECKS = [messages.check_dtypes, messages.check_order, messages.check_groups_do_not_mix, messages.check_traffic]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_messages_between_threads(check, ranks):
    minipar.run(check, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_messages_over_mpi(mpi, programs, ranks):
    result = mpi([programs / "messages.py"], ranks)
    assert (result.returncode, result.stdout) == (0, "ok\n" * ranks), result.stderr


RANKS = st.integers(0, 3)


@given(st.lists(st.tuples(RANKS, RANKS, st.integers(0, 1), st.integers(0, 40_000)), max_size=20))
def test_any_set_of_messages_arrives(plan):
    """plan: (source, dest, tag, length); every rank posts its sends, then receives, in the order of the plan."""

    def main(world):
        sends = [
            world.isend(np.full(length, i), dest, "x", tag)
            for i, (source, dest, tag, length) in enumerate(plan)
            if source == world.rank
        ]
        for i, (source, dest, tag, length) in enumerate(plan):
            if dest == world.rank:
                got = np.empty(length, np.int64)
                world.recv(got, source, "x", tag)
                assert (got == i).all()
        for request in sends:
            request.wait()
        return world.world

    shared = minipar.run(main, ranks=4)[0]
    assert not shared.sends and not shared.receives and not shared.waiting


@pytest.mark.parametrize("nbytes", [0, 8, 64 * 1024, 64 * 1024 + 8, 1 << 20])
def test_messages_arrive_in_order_and_whole(nbytes):
    def main(world):
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        arrays = [np.full(nbytes // 8, 10.0 * world.rank + i) for i in range(3)]
        buffers = [np.empty(nbytes // 8) for _ in range(3)]
        requests = [world.isend(a, right, "pass on") for a in arrays]
        requests += [world.irecv(b, left, "pass on") for b in buffers]
        for request in reversed(requests):
            request.wait()
        assert all(request.done() for request in requests)
        for i, b in enumerate(buffers):
            assert (b == 10.0 * left + i).all()

    minipar.run(main, ranks=3)


def test_a_small_send_is_buffered_and_a_large_one_waits():
    def main(world):
        if world.rank == 0:
            small, large = np.ones(8), np.ones(thread.EAGER_BYTES // 8 + 1)
            requests = [world.isend(small, 1, "small", tag=1), world.isend(large, 1, "large", tag=2)]
            assert [request.done() for request in requests] == [True, False]
            small[:] = 2  # its message has left
            world.barrier()
            requests[1].wait()
        else:
            small, large = np.empty(8), np.empty(thread.EAGER_BYTES // 8 + 1)
            world.barrier()
            world.recv(small, 0, "small", tag=1)
            world.recv(large, 0, "large", tag=2)
            assert small.tolist() == [1] * 8 and (large == 1).all()

    minipar.run(main, ranks=2)


def test_barrier_waits_for_the_last():
    arrived = []

    def main(world):
        time.sleep(0.02 * world.rank)
        arrived.append(world.rank)
        world.barrier()
        assert len(arrived) == world.size

    minipar.run(main, ranks=5)


def test_what_a_communicator_refuses():
    frozen = np.zeros(3)
    frozen.flags.writeable = False

    def main(world):
        for peer in (-1, 2):
            with pytest.raises(ShapeError, match=f"rank {peer} is not in this group of 2 ranks"):
                world.isend(np.zeros(3), peer)
        with pytest.raises(ShapeError, match="contiguous"):
            world.isend(np.zeros((3, 3)).T[:2], 0)
        with pytest.raises(ShapeError, match="read-only"):
            world.irecv(frozen, 0)
        with pytest.raises(ShapeError, match="tag 64"):
            world.isend(np.zeros(3), 0, tag=64)
        with pytest.raises(ShapeError, match="color -1"):
            world.split(-1)
        assert world.sent.messages == 0

    minipar.run(main, ranks=2)


def test_a_recorded_wait_is_told_from_the_transfer():
    """Rank 1 comes late with its message: rank 0's wait lasts until then, and the message has both ends on record."""

    def main(world):
        recorder = current().recorder = Recorder(world.rank)
        x = np.zeros(1 << 20)
        if world.rank == 1:
            time.sleep(0.1)
            world.send(x, 0, "late")
        else:
            world.recv(x, 1, "late")
        return recorder

    recorders = minipar.run(main, ranks=2)
    waits = [span for span in recorders[0].spans if span.kind == "wait"]
    assert sum(span.end - span.start for span in waits) > 0.05 and {span.name for span in waits} == {"late"}
    (message,) = recorders[0].messages + recorders[1].messages
    assert (message.source, message.dest, message.nbytes, message.operation) == (1, 0, 8 << 20, "late")
    assert message.sent < message.received


def test_threads_that_are_no_ranks_keep_their_own_context():
    seen = []

    def main(world):
        current().seed = 7
        helper = threading.Thread(target=lambda: seen.append(current().seed))
        helper.start()
        helper.join()

    minipar.run(main, ranks=1)
    assert seen == [0] and current().world is None
