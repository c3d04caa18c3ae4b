"""The lesson about collectives: what it claims, checked; and that it runs everywhere."""

import json
import subprocess
import sys

import numpy as np
import pytest

import minipar
from minipar.collectives import all_reduce, halving_doubling, ring, tree
from minipar.comm import ThreadCommunicator
from minipar.lessons import collectives as lesson

COSTS = {"call": 0.0, "hop": (1e-6, 1e-9), "round": (1e-6, 1e-9), "add": 0.0, "copy": 0.0, "meet": 0.0, "cores": 2,
         "slots": True}  # fmt: skip


@pytest.mark.parametrize("n", range(1, 9))
def test_the_drawing_is_what_the_ring_does(n, monkeypatch):
    """A real ring adds one bit a rank; after each round, who holds what is what the drawing shows."""
    states = lesson.ring_states(n)
    assert len(states) == 2 * (n - 1) + 1 and states[-1] == [[n] * n] * n
    sums = [[[] for _ in range(n)] for _ in range(n)]  # rank, chunk: how many ranks' numbers came, in order
    shift = ring.shift

    def watched(outgoing, target, comm, operation, combine=None, addend=None):
        shift(outgoing, target, comm, operation, combine, addend)
        chunk = (target.__array_interface__["data"][0] - base[comm.rank]) // 8
        sums[comm.rank][chunk].append((comm.sent.rounds, bin(int(target[0])).count("1")))

    monkeypatch.setattr(ring, "shift", watched)
    base = {}

    def main(world):
        x = np.full(n, 1 << world.rank)
        base[world.rank] = x.__array_interface__["data"][0]
        all_reduce(x, world, out=x, algorithm="ring")

    minipar.run(main, ranks=n)
    for rank in range(n):
        for chunk in range(n):
            drawn = [(i, states[i][rank][chunk]) for i in range(1, len(states))
                     if states[i][rank][chunk] != states[i - 1][rank][chunk]]  # fmt: skip
            assert drawn == sums[rank][chunk]


@pytest.mark.parametrize("n", range(2, 9))
def test_the_formulas_are_those_that_are_counted(n):
    for name, module in {"ring": ring, "tree": tree, "halving_doubling": halving_doubling}.items():
        rounds, sent = lesson.formulas(name, n)
        traffic = [module.all_reduce_traffic(840, 1, n, rank) for rank in range(n)]
        assert {t.rounds for t in traffic} == {rounds}
        if name == "ring" or (name == "halving_doubling" and n in (2, 4, 8)):
            assert {t.bytes for t in traffic} == {sent * 840}


def test_predictions_are_made_of_the_costs():
    assert lesson.predict("ring", 4, 1000, COSTS) == pytest.approx(6e-6 + 1.5e-6)
    assert lesson.predict("tree", 2, 1000, COSTS) == pytest.approx(2 * 2e-6)
    assert lesson.predict("tree", 4, 1000, COSTS) == pytest.approx(2 * 2 * 2e-6 + 2 * 2e-6)  # four ranks on two cores
    assert lesson.predict("halving_doubling", 8, 0, COSTS) == pytest.approx(6e-6)
    assert lesson.predict("shared", 2, 8, COSTS | {"meet": 1e-6}) == pytest.approx(1e-6)
    assert lesson.predict("native", 2, 8, COSTS) is None


def test_crossing():
    assert lesson.crossing({1: "tree", 2: "tree", 4: "ring", 8: "tree"}, "tree") == 2
    assert lesson.crossing({1: "ring"}, "tree") == 0


def check(figures, ranks, transport):
    assert figures["ranks"] == ranks and figures["transport"] == transport and figures["lesson"] == "collectives"
    if ranks > 1:
        assert sum(row["wrong"] for row in figures["measured"]) == 0
        assert figures["prediction"]["median_factor"] >= 1
        assert figures["counted"]["ring"]["rounds"] == 2 * (ranks - 1)
        assert figures["answers"]["ring_64_over_8_1GiB"] < figures["answers"]["ring_64_over_8_1KiB"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_on_threads(ranks, tmp_path):
    command = [
        sys.executable,
        "-m",
        "minipar.lessons.collectives",
        "--ranks",
        str(ranks),
        "--size",
        "tiny",
        "--json",
        "a",
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    check(json.loads((tmp_path / "a").read_text()), ranks, "threads")
    if ranks > 1:
        assert "within a factor of" in result.stdout and "0 wrong numbers" in result.stdout
        assert (tmp_path / "figures" / "collectives.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_under_mpi(mpi, ranks, tmp_path):
    result = mpi(["-m", "minipar.lessons.collectives", "--size", "tiny", "--json", "a"], ranks)
    assert result.returncode == 0, result.stderr
    check(json.loads((tmp_path / "a").read_text()), ranks, "MPI")
    assert result.stdout.count("1  The ring") == 1


def test_it_says_that_it_is_about_host_memory(tmp_path):
    command = [sys.executable, "-m", "minipar.lessons.collectives", "--device", "cuda"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0 and "Traceback" not in result.stderr and "cuda" in result.stderr


def test_no_thread_of_a_stream_is_left_behind():
    import threading

    before = threading.active_count()

    def main(world):
        from minipar.collectives import start

        start(all_reduce, np.ones(3), world).wait()
        assert isinstance(world, ThreadCommunicator)

    minipar.run(main, ranks=2)
    assert threading.active_count() == before
