"""The lesson about pipelines: that it runs everywhere, and that what it says is what its figures say."""

import json
import subprocess
import sys

import pytest

from minipar.lessons import pp as lesson
from minipar.parallel.pipeline import make, simulate

MINE = """
def schedule(p, m):
    return [[f"{r}F{k}" for k in range(m)] + [f"{r}B{k}" for k in reversed(range(m))] for r in range(p)]
"""


def check(figures, ranks, transport, schedules):
    assert figures["ranks"] == ranks and figures["transport"] == transport and figures["lesson"] == "pp"
    assert set(figures["runs"]) == set(schedules) and figures["gpipe_equals_1f1b"]
    for name, run in figures["runs"].items():
        assert run["equal"] and run["in_order"], name
        predicted = figures["predicted"][name]
        assert run["held_by_stage"] == list(predicted["peak_by_stage"].values())
        if predicted["formula"] is not None:
            assert predicted["bubble"]["ratio_to_ideal"] == pytest.approx(predicted["formula"])


def run(options, where):
    command = [sys.executable, "-m", "minipar.lessons.pp", "--size", "tiny", *options]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 7), (4, 8), (8, 16)])
def test_formulas_are_what_the_simulation_gives(p, m):
    for name in lesson.SYNCHRONOUS:
        known = lesson.formula(name, p, m)
        if known is not None:
            assert simulate(make(name, p, m)).bubble.ratio_to_ideal == pytest.approx(known), name


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "m"), [(1, 1), (3, 2)])
def test_on_threads(ranks, m, tmp_path):
    result = run(
        ["--ranks", str(ranks), "-m", str(m), "--dropout", "0.1", "--dtype", "float64", "--json", "a"], tmp_path
    )
    assert result.returncode == 0, result.stderr
    names = [name for name in lesson.SYNCHRONOUS if name != "dualpipe-v" or m >= 2 * ranks]
    check(json.loads((tmp_path / "a").read_text()), ranks, "threads", names)
    assert (tmp_path / "figures" / "pp.png").stat().st_size > 10_000
    assert (tmp_path / "figures" / "pp_sweep.png").stat().st_size > 10_000


@pytest.mark.slow
def test_under_mpi(mpi, tmp_path):
    result = mpi(["-m", "minipar.lessons.pp", "--size", "tiny", "--json", "a"], 4)
    assert result.returncode == 0, result.stderr
    figures = json.loads((tmp_path / "a").read_text())
    check(figures, 4, "MPI", lesson.SYNCHRONOUS)
    assert result.stdout.count("1  What must come out") == 1
    in_order, stale = figures["pipedream"]["in_order"], figures["pipedream"]["stale"]
    assert in_order[0] == pytest.approx(stale[0]) and in_order != stale  # the first micro-batch sees the first weights


@pytest.mark.slow
def test_a_schedule_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    result = run(["--ranks", "2", "-m", "3", "--schedule", "mine.py", "--json", "a"], tmp_path)
    assert result.returncode == 0, result.stderr
    check(json.loads((tmp_path / "a").read_text()), 2, "threads", ["gpipe", "1f1b", "mine.py"])
    (tmp_path / "mine.py").write_text(MINE.replace("B{k}", "B0"))
    result = run(["--ranks", "2", "-m", "3", "--schedule", "mine.py"], tmp_path)
    assert result.returncode == 1 and "rank 0 does 0B0 3 times" in result.stderr and "Traceback" not in result.stderr
