"""Collectives against NumPy: any size, shape, strides, dtype and number of ranks."""

import gc
import json
import os
import random
import threading
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import matrix

import minipar
from minipar.arrays import split_bounds, split_sizes
from minipar.collectives import (
    ALGORITHMS,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    choice,
    direct,
    gather,
    halving_doubling,
    hierarchical,
    reduce,
    reduce_scatter,
    ring,
    scatter,
    shared,
    start,
    tree,
)
from minipar.collectives.ring import SEGMENT_BYTES
from minipar.comm import NullCommunicator, SymmetricBuffer, ThreadCommunicator, Traffic, thread
from minipar.errors import DeadlockError, DTypeError, LaunchError, MessageMismatch, ShapeError

BY_MESSAGES = ["ring", "tree", "halving_doubling"]


@settings(max_examples=300)
@given(st.data())
def test_every_collective_by_every_algorithm_equals_numpy(data):
    ranks = data.draw(st.integers(1, 8))
    minipar.run(matrix.check, ranks, data.draw(matrix.cases(ranks, native=False)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_collective_by_every_algorithm_under_mpi(mpi, programs, ranks):
    result = mpi([programs / "matrix.py", 400], ranks)
    assert (result.returncode, result.stdout.split()) == (0, ["ok"] * ranks), result.stderr


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
    n=st.integers(0, 300),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    op=st.sampled_from(["sum", "mean"]),
    algorithm=st.sampled_from([*BY_MESSAGES, "hierarchical", "shared"]),
)
def test_rounding_stays_within_the_dtype(ranks, n, dtype, op, algorithm):
    rng = np.random.default_rng(n)
    xs = [rng.uniform(0.5, 1, n).astype(dtype) for _ in range(ranks)]
    exact = sum(x.astype(np.float64) for x in xs) / (ranks if op == "mean" else 1)

    def main(world):
        world.nodes = [r // 3 for r in range(ranks)]
        if algorithm == "shared":
            world.nodes = [0] * ranks
        total = all_reduce(xs[world.rank], world, op=op, algorithm=algorithm)
        if algorithm == "ring":
            first, stop = split_bounds(n, ranks, world.rank)  # the same sums in the same order
            np.testing.assert_array_equal(reduce_scatter(xs[world.rank], world, op=op), total[first:stop])
        return total

    results = minipar.run(main, ranks=ranks)
    steps = 0.6 if dtype == "float16" else ranks  # summed in float32 and rounded once
    np.testing.assert_allclose(results[0], exact, rtol=steps * np.finfo(dtype).eps)
    assert len({result.tobytes() for result in results}) == 1


@pytest.mark.parametrize("algorithm", [*BY_MESSAGES, "hierarchical", "shared"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_rc2_same_bits_on_every_rank_and_every_time(ranks, algorithm):
    rng = np.random.default_rng(1)
    xs = [rng.standard_normal(10_007).astype(np.float32) for _ in range(ranks)]
    exact = np.sum(np.array(xs, np.float64), axis=0)

    def main(world):
        x = xs[world.rank].copy()
        results = [all_reduce(x, world, algorithm=algorithm).tobytes() for _ in range(5)]
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
            for algorithm in BY_MESSAGES:
                np.testing.assert_array_equal(all_reduce(x, world, algorithm=algorithm), total)
            gc.collect(0)
            np.testing.assert_array_equal(reduce_scatter(x, world), total[start:stop])
            all_reduce(x, world, out=x, algorithm="ring")
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
        for algorithm in [*BY_MESSAGES, "hierarchical", "shared"]:
            assert (all_reduce(x, world, algorithm=algorithm) == ranks * (ranks + 1) / 2).all()
        assert (reduce_scatter(x, world) == ranks * (ranks + 1) / 2).all()
        assert (broadcast(x, world, root=ranks - 1) == ranks).all()
        assert all_gather(x, world).sum() == nbytes // 8 * ranks * (ranks + 1) / 2

    minipar.run(main, ranks=ranks)


@pytest.mark.parametrize(
    ("call", "pieces"),
    [
        (lambda x, world: all_reduce(x, world, out=x, algorithm="ring"), 0),
        (lambda x, world: all_reduce(x, world, out=x, algorithm="tree"), 0),
        (lambda x, world: all_reduce(x, world, out=x, algorithm="halving_doubling"), 0),
        (lambda x, world: all_reduce(x, world, out=x, algorithm="shared"), 0),
        (lambda x, world: all_reduce(x, world, algorithm="ring"), 4),  # the result
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
        all_reduce(x, world, out=x, algorithm="ring")
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
def test_rounds_messages_and_bytes_are_those_of_the_formulas(ranks, n):
    nodes = [r // 3 for r in range(ranks)]

    def main(world):
        rank, x, sizes, root = world.rank, np.zeros(n, np.float32), split_sizes(n, ranks), ranks - 1
        numbers = {}

        def count(name, call):
            before = replace(world.sent)
            call()
            numbers[name] = world.sent.since(before)

        for algorithm in [*BY_MESSAGES, "shared", "hierarchical"]:
            world.nodes = nodes if algorithm == "hierarchical" else [0] * ranks
            count(algorithm, lambda a=algorithm: all_reduce(x, world, algorithm=a))
        count("reduce_scatter", lambda: reduce_scatter(x, world))
        count("all_gather", lambda: all_gather(x[: sizes[rank]], world, sizes=sizes))
        count("broadcast", lambda: broadcast(x, world, root=root))
        count("reduce", lambda: reduce(x, world, root=root))
        if ranks > 1:
            assert numbers == {
                "ring": ring.all_reduce_traffic(n, 4, ranks, rank),
                "tree": tree.all_reduce_traffic(n, 4, ranks, rank),
                "halving_doubling": halving_doubling.all_reduce_traffic(n, 4, ranks, rank),
                "shared": shared.all_reduce_traffic(n, 4, ranks, rank),
                "hierarchical": hierarchical.all_reduce_traffic(n, 4, nodes, rank),
                "reduce_scatter": ring.reduce_scatter_traffic(sizes, 4, rank),
                "all_gather": ring.all_gather_traffic(sizes, 4, rank),
                "broadcast": tree.broadcast_traffic(n, 4, ranks, rank, root),
                "reduce": tree.reduce_traffic(n, 4, ranks, rank, root),
            }
        else:
            assert all(traffic == Traffic() for traffic in numbers.values())
        return numbers

    numbers = minipar.run(main, ranks=ranks)
    for name, times in {"ring": 2, "reduce_scatter": 1, "all_gather": 1, "shared": 2, "tree": 2, "reduce": 1}.items():
        assert sum(rank[name].bytes for rank in numbers) == times * (ranks - 1) * n * 4
    for rank in numbers:
        assert rank["ring"].rounds == 2 * (ranks - 1)
        assert rank["tree"].rounds == 2 * (ranks - 1).bit_length()
        if ranks in (2, 4, 8):
            assert rank["halving_doubling"].rounds == 2 * (ranks.bit_length() - 1)
            if n % ranks == 0:
                assert rank["halving_doubling"].bytes == rank["ring"].bytes == 2 * (ranks - 1) * n // ranks * 4
        if n >= ranks and n * 4 <= SEGMENT_BYTES:
            assert rank["ring"].messages == 2 * (ranks - 1)


def test_rows_that_stay_are_not_sent():
    def main(world):
        sizes = [2, 0, 5]
        before = replace(world.sent)
        all_to_all(np.zeros((7, 3)), world, sizes=sizes)
        counted = world.sent.since(before)
        exchanged = ring.all_gather_traffic([3, 3, 3], 8, world.rank)  # how many come
        assert counted == exchanged + direct.all_to_all_traffic([3 * size for size in sizes], 8, world.rank)

    minipar.run(main, ranks=3)


def test_one_mib_on_four_ranks_sends_one_and_a_half():
    assert ring.all_reduce_traffic(1 << 18, 4, ranks=4, rank=0) == Traffic(messages=6, bytes=3 << 19, rounds=6)


def test_between_nodes_a_hierarchy_sends_less_than_a_ring():
    """Two nodes of four ranks: a ring passes 2 x 7/8 of the array over the link, a hierarchy 1/4 a rank."""
    traffic = hierarchical.all_reduce_traffic(1 << 20, 4, [0] * 4 + [1] * 4, rank=0)
    inside = 2 * 3 / 4 * (4 << 20)
    assert traffic.bytes - inside == (4 << 20) / 4
    assert ring.all_reduce_traffic(1 << 20, 4, 8, 0).bytes == 2 * 7 / 8 * (4 << 20)


@pytest.mark.parametrize("algorithm", [*BY_MESSAGES, "hierarchical", "shared"])
def test_rc7_half_precision_is_summed_in_single(algorithm):
    cases = [
        ("float16", "mean", [30000] * 4, 30000),  # the sum overflows, the mean does not
        ("float16", "mean", [5.96e-8] * 4, 5.96e-8),  # a quarter of it would be 0
        ("float16", "sum", [2048, 1, 1, 1], 2052),  # 2051 rounded once; float16 steps would lose every 1
        ("bfloat16", "sum", [256, 1, 1, 1], 260),  # 259 rounded once, to even
        ("bfloat16", "mean", [3e38] * 4, 3e38),
    ]

    def main(world):
        for dtype, op, values, expected in cases:
            x = np.full(5, values[world.rank], matrix.dtype_of(dtype))
            with np.errstate(over="ignore"):
                result = all_reduce(x, world, op=op, algorithm=algorithm)
            if dtype == "bfloat16" and op == "mean":
                continue  # float32 has bfloat16's range, so this sum overflows: the mean is inf, as documented
            assert (result == np.asarray(expected, x.dtype)).all(), (dtype, op, result)
        if algorithm == "ring":
            assert (reduce(np.full(2, 30000, np.float16), world, op="mean", root=0) is None) == (world.rank > 0)
            assert (reduce_scatter(np.full(4, 30000, np.float16), world, op="mean") == 30000).all()
        assert (all_reduce(np.full(3, 100, np.int8), world, algorithm=algorithm) == -112).all()  # 400 wraps around
        assert (all_reduce(np.full(3, 100, np.uint8), world, algorithm=algorithm) == 144).all()
        assert (all_reduce(np.array([world.rank == 2, False]), world, algorithm=algorithm) == [True, False]).all()

    minipar.run(main, ranks=4)


def test_started_collectives_are_done_in_order_beside_others():
    """Several under way, and meanwhile the rank itself communicates on the same group."""

    def main(world):
        xs = [np.full(n, world.rank + 1.0) for n in (1, 1000, 300_000, 0)]
        handles = [start(all_reduce, x, world, out=x) for x in xs]
        handles.append(start(broadcast, np.full(3, world.rank), world, root=2))
        assert all_reduce(np.array(10**world.rank), world) == 111
        assert [handle.wait().sum() for handle in reversed(handles)] == [6, 0, 1_800_000, 6000, 6]
        assert all(handle.done() for handle in handles) and (xs[2] == 6).all()

    minipar.run(main, ranks=3)


def test_a_started_collective_overlaps_with_the_rank():
    def main(world):
        x = np.ones(10)
        if world.rank == 1:
            time.sleep(0.2)
        handle = start(all_reduce, x, world)
        began = time.monotonic()
        done = handle.done()
        result = handle.wait()
        assert (result == 2).all()
        return done, time.monotonic() - began

    (done, waited), _ = minipar.run(main, ranks=2)
    assert not done and waited > 0.1


def test_an_error_on_the_stream_ends_every_rank():
    def main(world):
        handle = start(all_reduce, np.ones(3), world, op="sum" if world.rank else "average")
        world.recv(np.empty(1), 1 - world.rank, "never")
        handle.wait()

    with pytest.raises(ValueError, match="op 'average' is unknown"):
        minipar.run(main, ranks=2)


def test_a_program_may_end_without_waiting_for_what_it_has_started():
    x = [np.full(200_000, r + 1.0) for r in range(3)]
    minipar.run(lambda world: start(all_reduce, x[world.rank], world, out=x[world.rank]) and None, ranks=3)
    assert all((array == 6).all() for array in x)


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([lambda x, w: all_reduce(x, w), lambda x, w: all_reduce(x[:2], w)], ["(sum, float64, (3,)", "float64, (2,)"]),
        ([lambda x, w: all_reduce(x, w), lambda x, w: all_reduce(x, w, op="max")], ["(sum, ", "(max, "]),
        ([lambda x, w: all_reduce(x, w), lambda x, w: broadcast(x, w)], ["all_reduce (", "broadcast from 0 ("]),
        ([lambda x, w: broadcast(x, w), lambda x, w: broadcast(x, w, root=1)], ["from 0", "from 1"]),
        ([lambda x, w: all_reduce(x, w), lambda x, w: all_reduce(x.astype("f4"), w)], ["float64", "float32"]),
        ([lambda x, w: all_gather(x, w), lambda x, w: reduce_scatter(x, w)], ["all_gather", "reduce_scatter"]),
        ([lambda x, w: reduce(x, w), lambda x, w: reduce(x, w, root=1)], ["reduce from 0", "reduce from 1"]),
        ([lambda x, w: gather(x, w), lambda x, w: all_to_all(x, w)], ["gather from 0", "all_to_all"]),
        (
            [lambda x, w: scatter(np.ones(w.size), np.empty(1), w), lambda x, w: scatter(x, np.empty((1, 1)), w)],
            ["scatter from 0 (rows, float64, (), ", "scatter from 0 (rows, float64, (1,), "],
        ),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_call_different_collectives_are_told_on_every_rank(calls, said, ranks):
    errors = []

    def main(world):
        try:
            calls[world.rank == 1](np.ones(3), world)
            world.barrier()
        except MessageMismatch as error:
            errors.append(str(error))
            raise

    began = time.monotonic()
    with pytest.raises(MessageMismatch):
        minipar.run(main, ranks=ranks)
    assert len(errors) == ranks and time.monotonic() - began < 5
    assert any(all(text in error for text in said) and "rank 1 called" in error for error in errors), errors


@pytest.mark.slow
def test_a_circle_of_waiting_ranks_is_found_while_others_go_on():
    """Ranks 0 and 1 wait for each other; ranks 2 and 3 are busy, and wait for nobody."""
    stop = threading.Event()

    def main(world):
        if world.rank < 2:
            world.recv(np.empty(3), 1 - world.rank, "something")
        stop.wait(20)

    began = time.monotonic()
    with pytest.raises(DeadlockError) as caught:
        minipar.run(main, ranks=4)
    stop.set()
    assert "rank 0 waits in recv (something, 24 bytes) from rank 1" in str(caught.value)
    assert "rank 1 waits in recv (something, 24 bytes) from rank 0" in str(caught.value)
    assert "rank 2" not in str(caught.value) and time.monotonic() - began < 10


def test_a_rank_that_never_comes_to_a_meeting_is_named():
    with pytest.raises(DeadlockError, match=r"rank 0 waits in all_reduce for rank 1.*rank 1 has finished"):
        minipar.run(lambda world: world.rank or all_reduce(np.ones(3), world, algorithm="shared"), ranks=2)


def test_auto_takes_what_the_table_says(tmp_path, monkeypatch):
    world = ThreadCommunicator(thread.ThreadWorld(3), 0)
    assert choice.name_of("all_reduce", 8, world) == "shared"
    assert choice.name_of("broadcast", 8, world) == "tree"
    world.nodes = (0, 0, 1)
    assert choice.name_of("all_reduce", 8, world) == "halving_doubling"
    assert choice.name_of("all_reduce", 1 << 20, world) == "hierarchical"
    world.nodes = (0, 1, 2)
    assert choice.name_of("all_reduce", 1 << 20, world) == "ring"
    world.nodes = (0, 0, 0)
    table = {"threads": {"all_reduce": {"2": [[100, "tree"], [None, "ring"]], "8": [[None, "shared"]]}}}
    (tmp_path / "table.json").write_text(json.dumps({"algorithms": table}))
    monkeypatch.setenv("MINIPAR_TUNING", str(tmp_path / "table.json"))
    assert choice.name_of("all_reduce", 100, world) == "tree" and choice.name_of("all_reduce", 101, world) == "ring"
    world.preferred["all_reduce"] = "halving_doubling"
    assert choice.name_of("all_reduce", 100, world) == "halving_doubling"
    for text in ("", "{}", '{"algorithms": {"MPI": {"all_reduce": {"2": [[1, "magic"]]}}}}'):
        (tmp_path / "broken.json").write_text(text)
        monkeypatch.setenv("MINIPAR_TUNING", str(tmp_path / "broken.json"))
        choice.row.cache_clear()
        with pytest.raises(LaunchError, match=r"broken.json is no table that `minipar bench --tune` wrote"):
            choice.name_of("all_reduce", 1, ThreadCommunicator(thread.ThreadWorld(3), 0))


def test_the_null_communicator_moves_nothing():
    comm = NullCommunicator(1, 4)
    x = np.arange(4.0)
    assert (all_reduce(x, comm) == x).all() and all_reduce(x, comm, op="mean", out=x) is x
    assert reduce_scatter(x, comm).tolist() == [1.0] and all_gather(x, comm).shape == (16,)
    assert broadcast(x, comm).shape == (4,) and all_to_all(x, comm).shape == (4,)
    for algorithm in ALGORITHMS["all_reduce"]:
        if algorithm != "native":
            assert (all_reduce(x, comm, algorithm=algorithm) == x).all()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rc6_more_than_two_to_the_31_bytes():
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 12e9:
        pytest.skip("needs 12 GB of free memory")
    n = 2**31 + 16

    def main(world):
        x = np.ones(n, np.int8)
        all_reduce(x, world, out=x, algorithm=["shared", "ring"][0])
        assert x[0] == 2 and x[2**31 - 1] == 2 and (x[-16:] == 2).all() and (x[:: 1 << 20] == 2).all()
        all_reduce(x, world, out=x, algorithm="ring")
        assert x[0] == 4 and x[2**31 - 1] == 4 and (x[-16:] == 4).all() and (x[:: 1 << 20] == 4).all()

    minipar.run(main, ranks=2)


def test_rc6_many_segments(monkeypatch):
    """The same code path as beyond 2^31 bytes, with a limit of 1000 bytes a message."""
    monkeypatch.setattr(ring, "SEGMENT_BYTES", 1000)

    def main(world):
        x = np.arange(10_001.0)
        for algorithm in [*BY_MESSAGES, "hierarchical"]:
            np.testing.assert_array_equal(all_reduce(x, world, algorithm=algorithm), 3 * x)
        np.testing.assert_array_equal(broadcast(x * world.rank, world, root=1), x)

    minipar.run(main, ranks=3)


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
        for call in (all_gather, gather):
            with pytest.raises(ShapeError, match="0-d"):
                call(np.array(1.0), world)
        with pytest.raises(ShapeError, match="0-d"):
            scatter(np.ones(2), np.array(1.0), world)
        with pytest.raises(ShapeError, match=r"sizes \[2, 2\] do not cut"):
            all_to_all(np.ones(5), world, sizes=[2, 2])
        with pytest.raises(ValueError, match="all_reduce has no algorithm 'magic': choose auto, ring, tree"):
            all_reduce(np.ones(2), world, algorithm="magic")
        with pytest.raises(LaunchError, match="algorithm 'native' is the MPI library's own: start with mpirun"):
            all_reduce(np.ones(2), world, algorithm="native")
        with pytest.raises(ShapeError, match="sizes"):
            reduce_scatter(np.ones(5), world, sizes=[2, 2])

        for call in (
            lambda: broadcast([1.0], world),
            lambda: broadcast(np.ones(1), world, out=[0.0]),
            lambda: scatter(np.ones((2, 1)), [[0.0]], world),
        ):
            with pytest.raises(DTypeError, match="needed here, not a list"):
                call()
        for op in (["sum"], None, np.add):
            with pytest.raises(ValueError, match="is unknown: choose one of sum, mean"):
                all_reduce(np.ones(3), world, op=op)
        for array in (np.array(["a", "b"]), np.array([None, 1])):
            with pytest.raises(DTypeError, match="cannot be added up: only numbers can"):
                all_reduce(array, world)
        with pytest.raises(DTypeError, match="object arrays hold addresses"):
            world.isend(np.array([None]), 0)
        for root in (-1, 2, 0.5, "0", None):
            with pytest.raises(ShapeError, match=r"root .* is not in this group of 2 ranks"):
                broadcast(np.ones(2), world, root=root)
        with pytest.raises(ShapeError, match="SymmetricBuffer of -8 bytes is not possible"):
            SymmetricBuffer(world, -8)

    minipar.run(main, ranks=2)


def test_scatter_into_part_of_an_array_is_refused_not_lost():
    def main(world):
        with pytest.raises(ShapeError, match="out must be contiguous"):
            scatter(np.ones((4, 2)), np.zeros((2, 4))[:, ::2], world)

    minipar.run(main, ranks=2)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (lambda w: w.barrier(), lambda w: w.split(0), "barrier.*split|split.*barrier"),
        (lambda w: w.barrier(), lambda w: all_reduce(np.ones(1), w), "barrier"),
        (lambda w: SymmetricBuffer(w, 64), lambda w: SymmetricBuffer(w, 128), "SymmetricBuffer of (64|128) bytes"),
    ],
)
def test_what_all_ranks_set_up_together_is_compared_too(one, other, said):
    with pytest.raises(MessageMismatch, match=said):
        minipar.run(lambda world: (other if world.rank == 1 else one)(world), ranks=3)


def test_split_sizes():
    assert split_sizes(10, 4) == [3, 3, 2, 2]
    assert split_sizes(2, 4) == [1, 1, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_under_mpi(mpi, programs, ranks):
    result = mpi([programs / "collectives.py"], ranks=ranks)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["ok"] * ranks
