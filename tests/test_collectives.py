"""Collectives against NumPy: any size, shape, strides, dtype and number of ranks."""

import gc
import random
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.arrays import split_bounds, split_sizes
from minipar.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from minipar.collectives.ring import (
    SEGMENT_BYTES,
    all_gather_traffic,
    all_reduce_bytes,
    all_reduce_rounds,
    all_reduce_traffic,
    reduce_scatter_traffic,
)
from minipar.comm import ThreadCommunicator, Traffic, thread
from minipar.errors import DTypeError, ShapeError

DTYPES = ["float64", "float32", "float16", "int64", "int8"]
NUMPY = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def inputs(ranks, shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(-3, 4, size=shape).astype(dtype) for _ in range(ranks)]  # small integers: sums are exact


def strided(array, how):
    """The same values in another memory layout."""
    if how == "transposed":
        return array.T.copy().T
    if how == "reversed":
        backwards = (slice(None, None, -1),) * array.ndim
        return array[backwards].copy()[backwards] if array.ndim else array
    if how == "every other":
        spread = np.zeros((*array.shape, 2), array.dtype)
        spread[..., 0] = array
        return spread[..., 0]
    return array


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 7, 8, 13])
def test_rc1_sizes_that_do_not_divide(ranks, n):
    def main(world):
        for dtype in (np.float64, np.float32, np.int64):
            x = (world.rank + 1) * np.arange(n, dtype=dtype)
            total = all_reduce(x, world)
            expected = ranks * (ranks + 1) // 2 * np.arange(n, dtype=dtype)
            assert total.dtype == dtype and total is not x
            np.testing.assert_array_equal(total, expected)
            start, stop = split_bounds(n, ranks, world.rank)
            np.testing.assert_array_equal(reduce_scatter(x, world), expected[start:stop])
            np.testing.assert_array_equal(all_gather(expected[start:stop], world), expected)
        assert all_reduce(np.array(2.0), world).shape == ()
        if ranks == 1:
            assert world.sent.messages == 0

    minipar.run(main, ranks=ranks)


@given(
    ranks=st.integers(1, 8),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(list(NUMPY)),
    layouts=st.tuples(*[st.sampled_from(["plain", "transposed", "reversed", "every other"])] * 2),
    place=st.sampled_from(["new", "in place", "other"]),
)
def test_all_reduce_equals_numpy(ranks, shape, dtype, op, layouts, place):
    xs = inputs(ranks, shape, dtype)
    expected = xs[0].copy()
    for x in xs[1:]:
        expected = NUMPY[op](expected, x)

    def main(world):
        x = strided(xs[world.rank].copy(), layouts[world.rank % 2])  # each rank may lay it out in its own way
        out = {"new": None, "in place": x, "other": strided(np.zeros(shape, dtype), layouts[0])}[place]
        x.flags.writeable = place == "in place"
        result = all_reduce(x, world, op=op, out=out)
        assert out is None or result is out
        assert result.shape == shape and result.dtype == dtype
        return result

    for result in minipar.run(main, ranks=ranks):
        np.testing.assert_array_equal(result, expected)


@given(
    ranks=st.integers(1, 8),
    n=st.integers(0, 300),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    op=st.sampled_from(["sum", "mean"]),
)
def test_rounding_stays_within_the_dtype(ranks, n, dtype, op):
    rng = np.random.default_rng(n)
    xs = [rng.uniform(0.5, 1, n).astype(dtype) for _ in range(ranks)]
    exact = sum(x.astype(np.float64) for x in xs) / (ranks if op == "mean" else 1)

    def main(world):
        own = reduce_scatter(xs[world.rank], world, op=op)
        total = all_reduce(xs[world.rank], world, op=op)
        start, stop = split_bounds(n, ranks, world.rank)
        np.testing.assert_array_equal(own, total[start:stop])  # the same sums in the same order
        return total

    results = minipar.run(main, ranks=ranks)
    np.testing.assert_allclose(results[0], exact, rtol=ranks * np.finfo(dtype).eps)
    assert len({result.tobytes() for result in results}) == 1


@given(st.data())
def test_uneven_shards(data):
    ranks = data.draw(st.integers(1, 6))
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))
    axis = data.draw(st.sampled_from([0, 1, -1]))
    known = data.draw(st.booleans())
    dtype = data.draw(st.sampled_from(DTYPES))
    pieces = [np.full((size, 3) if axis == 0 else (3, size), r, dtype) for r, size in enumerate(sizes)]
    whole = np.concatenate(pieces, axis=axis)
    rows = inputs(ranks, (sum(sizes), 2), dtype)

    def main(world):
        gathered = all_gather(pieces[world.rank], world, axis=axis, sizes=sizes if known else None)
        np.testing.assert_array_equal(gathered, whole)
        rows[world.rank].flags.writeable = False
        own = reduce_scatter(rows[world.rank], world, sizes=sizes)
        start = sum(sizes[: world.rank])
        np.testing.assert_array_equal(own, sum(rows)[start : start + sizes[world.rank]].astype(dtype))

    minipar.run(main, ranks=ranks)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_broadcast_from_every_root(ranks):
    def main(world):
        for root in range(ranks):
            x = np.full((2, 3), world.rank, np.int32)
            np.testing.assert_array_equal(broadcast(x, world, root), np.full((2, 3), root))
            assert (x == world.rank).all()

    minipar.run(main, ranks=ranks)


@pytest.mark.parametrize("ranks", [3, 4])
def test_rc2_same_bits_on_every_rank_and_every_time(ranks):
    rng = np.random.default_rng(1)
    xs = [rng.standard_normal(10_007).astype(np.float32) for _ in range(ranks)]
    exact = np.sum(np.array(xs, np.float64), axis=0)

    def main(world):
        x = xs[world.rank].copy()
        results = [all_reduce(x, world).tobytes() for _ in range(5)]
        assert len(set(results)) == 1 and (x == xs[world.rank]).all()
        return results[0]

    results = minipar.run(main, ranks=ranks)
    assert len(set(results)) == 1
    error = np.abs(np.frombuffer(results[0], np.float32) - exact).max() / np.abs(exact).max()
    assert error < 1e-6


@pytest.mark.parametrize("shift", [-2, 0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rc2_overlapping_out_holds_the_right_sum(ranks, shift):
    def main(world):
        memory = np.arange(12.0) * (world.rank + 1)
        expected = ranks * (ranks + 1) / 2 * np.arange(2.0, 10.0)
        np.testing.assert_array_equal(all_reduce(memory[2:10], world, out=memory[2 + shift : 10 + shift]), expected)
        square = np.arange(9.0).reshape(3, 3)
        np.testing.assert_array_equal(all_reduce(square, world, out=square.T), ranks * np.arange(9.0).reshape(3, 3))

    minipar.run(main, ranks=ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_rc2_buffers_keep_until_ranks_that_are_late_have_read_them(ranks, monkeypatch):
    """Every send waits for its receiver, receivers come late at random, and garbage is collected all the time."""
    irecv = ThreadCommunicator.irecv

    def late(comm, *arguments):
        time.sleep(random.choice([0, 0, 0.001]))
        return irecv(comm, *arguments)

    monkeypatch.setattr(thread, "EAGER_BYTES", -1)
    monkeypatch.setattr(ThreadCommunicator, "irecv", late)

    def main(world):
        for i in range(10):
            x = np.arange(103.0) * (world.rank + i)
            total = np.arange(103.0) * (ranks * (ranks - 1) // 2 + ranks * i)
            start, stop = split_bounds(103, ranks, world.rank)
            np.testing.assert_array_equal(all_reduce(x, world), total)
            gc.collect(0)
            np.testing.assert_array_equal(reduce_scatter(x, world), total[start:stop])
            all_reduce(x, world, out=x)
            np.testing.assert_array_equal(x, total)
            x[:] = -1  # nobody may still be reading it

    minipar.run(main, ranks=ranks)


@pytest.mark.parametrize("eager", [thread.EAGER_BYTES, -1])
@pytest.mark.parametrize("nbytes", [8, 1024, 4104, 64 * 1024 + 8, 1 << 20, 3 * SEGMENT_BYTES + 24])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rc5_no_size_hangs(ranks, nbytes, eager, monkeypatch):
    monkeypatch.setattr(thread, "EAGER_BYTES", eager)  # -1: every send waits for its receiver

    def main(world):
        x = np.full(nbytes // 8, world.rank + 1.0)
        assert (all_reduce(x, world) == ranks * (ranks + 1) / 2).all()
        assert (reduce_scatter(x, world) == ranks * (ranks + 1) / 2).all()
        assert (broadcast(x, world, root=ranks - 1) == ranks).all()
        assert all_gather(x, world).sum() == nbytes // 8 * ranks * (ranks + 1) / 2

    minipar.run(main, ranks=ranks)


@pytest.mark.parametrize(
    ("call", "pieces"),
    [
        (lambda x, world: all_reduce(x, world, out=x), 0),
        (lambda x, world: all_reduce(x, world), 4),  # the result
        (reduce_scatter, 1 + 2),  # the result, and two pieces that pass through
        (lambda x, world: broadcast(x, world, out=x), 0),
    ],
)
def test_no_temporary_of_the_whole_array(call, pieces):
    """What a rank allocates beyond its result: two segments, and whole pieces (quarters of the array) where said."""
    xs = [np.ones(8 << 20, np.float32) for _ in range(4)]
    tracemalloc.start()
    try:
        minipar.run(lambda world: call(xs[world.rank], world), ranks=4)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * (pieces * xs[0].nbytes // 4 + 2 * SEGMENT_BYTES + 64 * 1024)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rc5_64_mib(ranks):
    def main(world):
        x = np.full(8 << 20, world.rank + 1.0)
        all_reduce(x, world, out=x)
        assert x.min() == x.max() == ranks * (ranks + 1) / 2

    minipar.run(main, ranks=ranks)


def test_rc8_groups_with_ranks_that_are_not_neighbours():
    def main(world):
        x = np.array([10.0**world.rank])
        columns = world.split(world.rank % 2)
        rows = world.split(world.rank // 2)
        assert all_reduce(x, columns)[0] == (101 if world.rank % 2 == 0 else 1010)
        assert all_reduce(x, rows)[0] == (11 if world.rank < 2 else 1100)
        backwards = world.split(0 if world.rank in (0, 2) else None, key=-world.rank)
        if world.rank in (0, 2):
            assert backwards.ranks == (2, 0)
            assert broadcast(x, backwards, root=0)[0] == 100  # root counts inside the group
            with pytest.raises(ShapeError, match="root 2 is not in this group of 2"):
                broadcast(x, backwards, root=2)
        else:
            assert backwards is None
        pairs = world.split([0, 1, 1, 0][world.rank])
        assert all_reduce(x, pairs)[0] == (1001 if world.rank in (0, 3) else 110)

    minipar.run(main, ranks=4)


def test_rc8_pairs_across_six_ranks():
    def main(world):
        pair = world.split([0, 1, 1, 2, 2, 0][world.rank], key=[0, 1, 0, 1, 0, 1][world.rank])  # (0,5) (2,1) (4,3)
        assert pair.ranks == [(0, 5), (2, 1), (4, 3)][[0, 1, 1, 2, 2, 0][world.rank]]
        expected = sum(10**r for r in pair.ranks)
        for n in (1, 100_000):  # buffered, and waiting for the receiver
            x = np.full(n, 10**world.rank)
            assert (all_reduce(x, pair) == expected).all()
            assert (broadcast(x, pair, root=0) == 10 ** pair.ranks[0]).all()
            assert (all_reduce(x, world) == 111_111).all()

    minipar.run(main, ranks=6)


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("n", [0, 1, 5, 16, 1000, 200_003, 1 << 20])
def test_messages_and_bytes_are_those_of_the_formulas(ranks, n):
    def main(world):
        x, sizes = np.zeros(n, np.float32), split_sizes(n, ranks)
        calls = [
            lambda: all_reduce(x, world),
            lambda: reduce_scatter(x, world),
            lambda: all_gather(x[: sizes[world.rank]], world, sizes=sizes),
        ]
        counts = []
        for call in calls:
            before = Traffic(world.sent.messages, world.sent.bytes)
            call()
            counts.append(Traffic(world.sent.messages - before.messages, world.sent.bytes - before.bytes))
        assert counts[0] == all_reduce_traffic(n, 4, ranks, world.rank)
        assert counts[1] == reduce_scatter_traffic(sizes, 4, world.rank)
        assert counts[2] == all_gather_traffic(sizes, 4, world.rank)
        assert counts[0].bytes == all_reduce_bytes(n, 4, ranks, world.rank)
        return counts[0]

    sent = minipar.run(main, ranks=ranks)
    assert sum(traffic.bytes for traffic in sent) == 2 * (ranks - 1) * n * 4
    if n % ranks == 0:
        assert {traffic.bytes for traffic in sent} == {2 * (ranks - 1) * n // ranks * 4}
    if n >= ranks and n * 4 <= SEGMENT_BYTES:
        assert {traffic.messages for traffic in sent} == {all_reduce_rounds(ranks)}


def test_one_mib_on_four_ranks_sends_one_and_a_half():
    assert all_reduce_traffic(1 << 18, 4, ranks=4, rank=0) == Traffic(messages=6, bytes=3 << 19)
    assert all_reduce_rounds(4) == 6


def test_what_cannot_be_done_is_said():
    def main(world):
        with pytest.raises(DTypeError, match="needed here, not a list"):
            all_reduce([1, 2], world)
        with pytest.raises(DTypeError, match="mean of int64"):
            all_reduce(np.arange(3), world, op="mean")
        with pytest.raises(ValueError, match="op 'average' is unknown: choose one of sum, mean"):
            all_reduce(np.ones(3), world, op="average")
        with pytest.raises(ShapeError, match=r"out is float64 \(2,\), but x is float64 \(3,\)"):
            all_reduce(np.ones(3), world, out=np.ones(2))
        with pytest.raises(ShapeError, match=r"out is float32 \(3,\), but x is float64 \(3,\)"):
            broadcast(np.ones(3), world, out=np.ones(3, np.float32))
        with pytest.raises(ShapeError, match="0-d"):
            all_gather(np.array(1.0), world)
        with pytest.raises(ShapeError, match="sizes"):
            reduce_scatter(np.ones(5), world, sizes=[2, 2])

    minipar.run(main, ranks=2)


def test_split_sizes():
    assert split_sizes(10, 4) == [3, 3, 2, 2]
    assert split_sizes(2, 4) == [1, 1, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_under_mpi(mpi, programs, ranks):
    result = mpi([programs / "collectives.py"], ranks=ranks)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["ok"] * ranks
