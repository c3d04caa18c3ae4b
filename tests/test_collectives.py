"""Collectives against NumPy: any size, shape, strides, dtype and number of ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.arrays import split_bounds, split_sizes
from minipar.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from minipar.collectives.ring import SEGMENT_BYTES, all_reduce_bytes
from minipar.errors import DTypeError, ShapeError

DTYPES = ["float64", "float32", "int64", "int8"]
NUMPY = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def inputs(ranks, shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(-3, 4, size=shape).astype(dtype) for _ in range(ranks)]  # small integers: sums are exact


def strided(array, how):
    """The same values in another memory layout."""
    if how == "transposed":
        return np.ascontiguousarray(array.T).T
    if how == "reversed":
        return np.ascontiguousarray(array[::-1])[::-1] if array.ndim else array
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
    layout=st.sampled_from(["plain", "transposed", "reversed", "every other"]),
    place=st.sampled_from(["new", "in place", "other"]),
)
def test_all_reduce_equals_numpy(ranks, shape, dtype, op, layout, place):
    xs = inputs(ranks, shape, dtype)
    expected = xs[0].copy()
    for x in xs[1:]:
        expected = NUMPY[op](expected, x)

    def main(world):
        x = strided(xs[world.rank].copy(), layout)
        before = x.copy()
        out = {"new": None, "in place": x, "other": strided(np.zeros(shape, dtype), layout)}[place]
        result = all_reduce(x, world, op=op, out=out)
        assert out is None or result is out
        if place != "in place":
            np.testing.assert_array_equal(x, before)
        assert result.dtype == dtype
        return result

    for result in minipar.run(main, ranks=ranks):
        np.testing.assert_array_equal(result, expected)


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


def test_rc2_overlapping_out_holds_the_right_sum():
    def main(world):
        memory = np.arange(10.0) * (world.rank + 1)
        expected = 3 * np.arange(8.0)
        np.testing.assert_array_equal(all_reduce(memory[:8], world, out=memory[2:]), expected)

    minipar.run(main, ranks=2)


@pytest.mark.parametrize("nbytes", [8, 1024, 4097, 64 * 1024 + 8, 1 << 20, 3 * SEGMENT_BYTES + 24])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rc5_no_size_hangs(ranks, nbytes):
    def main(world):
        total = all_reduce(np.full(nbytes // 8, world.rank + 1.0), world)
        assert (total == ranks * (ranks + 1) / 2).all()

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


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("n", [0, 1, 5, 16, 1000, 200_003])
def test_bytes_sent_are_those_of_the_formula(ranks, n):
    def main(world):
        before = world.sent.bytes
        all_reduce(np.zeros(n, np.float32), world)
        return world.sent.bytes - before

    sent = minipar.run(main, ranks=ranks)
    assert sent == [all_reduce_bytes(n, 4, ranks, rank) for rank in range(ranks)]
    assert sum(sent) == 2 * (ranks - 1) * n * 4
    if n % ranks == 0:
        assert set(sent) == {2 * (ranks - 1) * n // ranks * 4}


def test_what_cannot_be_done_is_said():
    def main(world):
        with pytest.raises(DTypeError, match="mean of int64"):
            all_reduce(np.arange(3), world, op="mean")
        with pytest.raises(ValueError, match="op 'average' is unknown: choose one of sum, mean"):
            all_reduce(np.ones(3), world, op="average")
        with pytest.raises(ShapeError, match=r"out is float64 \(2,\), but x is float64 \(3,\)"):
            all_reduce(np.ones(3), world, out=np.ones(2))
        with pytest.raises(ShapeError, match="0-d"):
            all_gather(np.array(1.0), world)
        with pytest.raises(ShapeError, match="sizes"):
            reduce_scatter(np.ones(5), world, sizes=[2, 2])
        assert all_reduce(np.array([1.0, 3.0]), world, op="mean").tolist() == [1, 3]

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
