"""The tensor-parallel lesson as a learner runs it."""

import json
import os
import re
import subprocess
import sys

import pretend_cupy
import pytest

import minipar
from minipar import arrays
from minipar.lessons import report, tp
from minipar.parallel.tensor import CopyToTensorParallelRegion
from minipar.trace import perfetto

TINY = ["-m", "minipar.lessons.tp", "--size", "tiny", "--steps", "12", "--json", "out/tp.json"]
RUN = {"capture_output": True, "text": True, "timeout": 100}


def plain(arguments, cwd, **environment):
    """The lesson on thread ranks, started without a launcher."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI"))} | environment
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=clean, **RUN)


def check(folder, ranks, transport, dtype="float32"):
    """The figures of a run hold what the issue of the lesson promises."""
    figures = json.loads((folder / "out/tp.json").read_text())
    assert (figures["lesson"], figures["ranks"], figures["transport"]) == ("tp", ranks, transport)
    loss, gradient = (1e-6, 1e-5) if dtype == "float32" else (1e-10, 1e-10)
    assert figures["equality"]["loss_relative_error"] < loss
    assert figures["equality"]["gradient_relative_error"] < gradient
    assert figures["equality"]["replicated_equal"] and figures["training"]["replicated_equal"]
    assert figures["counted"]["bytes_sent_per_step"] == figures["predicted"]["bytes_sent_per_step"]
    assert len(figures["ranks_detail"]) == ranks
    assert [row["ranks"] for row in figures["measured"]][-1] == ranks
    losses = figures["training"]["losses"]
    assert len(losses) == 12 and losses[-1] < losses[0]
    assert figures["training"]["held_out_after"] < figures["training"]["held_out_before"]
    return figures


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3, 4))])
def test_on_threads(tmp_path, ranks):
    result = plain([*TINY, "--ranks", str(ranks)], tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    figures = check(tmp_path, ranks, "threads")
    assert figures["figures"] == ["figures/tp.png", "figures/tp.svg", "traces/tp.json"]
    assert all((tmp_path / path).stat().st_size > 300 for path in figures["figures"])
    assert perfetto.validate(json.loads((tmp_path / "traces/tp.json").read_text())) == []
    for heading in range(1, 8):
        assert re.search(rf"^{heading}  ", result.stdout, re.MULTILINE)
    assert all(word in result.stdout for word in ("measured", "counted", "predicted"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_under_mpirun(mpi, tmp_path, ranks):
    result = mpi([*TINY, "--no-figure"], ranks=ranks, timeout=100)
    assert result.returncode == 0, result.stderr
    check(tmp_path, ranks, "MPI")
    assert result.stdout.count("What is split, and why") == 1  # rank 0 alone speaks
    assert not (tmp_path / "figures").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_float64_with_dropout_under_mpirun(mpi, tmp_path, ranks):
    result = mpi([*TINY, "--no-figure", "--dtype", "float64", "--dropout", "0.1"], ranks=ranks, timeout=100)
    assert result.returncode == 0, result.stderr
    check(tmp_path, ranks, "MPI", "float64")


def test_no_steps_and_live_bar(tmp_path):
    arguments = ["-m", "minipar.lessons.tp", "--size", "tiny", "--steps", "0", "--ranks", "2", "--no-figure", "--live"]
    result = plain(arguments, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "After 0 steps" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "5"], "4 heads cannot be split over 5 tensor-parallel ranks: allowed are 1 to 4 ranks"),
        (["--ranks", "0"], "0 ranks cannot be started"),
        (["--text", "missing.txt"], "the text 'missing.txt' cannot be read"),
        (["--text", "short.txt"], "is too short for a context of 16"),
        (["--json", "short.txt/tp.json"], "nothing can be written to 'short.txt/tp.json'"),
        (["--json", "."], "is no regular file"),
        (["--json", "/dev/full"], "is no regular file"),
        (["--json", ""], "--json needs a file"),
        (["--steps", "-1"], "--steps must be 0 or more"),
        (["--dropout", "1.5"], "dropout is a probability"),
        (["--size", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(tmp_path, arguments, message):
    (tmp_path / "short.txt").write_bytes(b"hello")
    result = plain([*TINY, *arguments], tmp_path)
    assert result.returncode != 0
    assert message in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == "" and not list(tmp_path.glob("out/*"))


@pytest.mark.slow
def test_wrong_number_of_ranks_under_mpirun_is_said_once(mpi):
    result = mpi(TINY, ranks=5)
    assert result.returncode != 0
    assert result.stderr.count("4 heads cannot be split over 5") == 1 and "Traceback" not in result.stderr
    result = mpi([*TINY, "--ranks", "3"], ranks=2)
    assert result.returncode != 0 and result.stderr.count("3 ranks were asked for, but mpirun started 2") == 1


def test_json_on_standard_output_is_only_json(tmp_path):
    arguments = ["-m", "minipar.lessons.tp", "--size", "tiny", "--steps", "1", "--ranks", "2", "--no-figure"]
    result = plain([*arguments, "--json", "-"], tmp_path)
    assert json.loads(result.stdout)["lesson"] == "tp"


@pytest.mark.slow
def test_works_without_mpi4py(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('no mpi4py here')")
    result = plain([*TINY, "--no-figure"], tmp_path, PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    check(tmp_path, 4, "threads")


@pytest.mark.slow
def test_on_the_stand_in_for_cupy(tmp_path, monkeypatch):
    """The whole lesson on arrays that refuse what CuPy's refuse."""
    monkeypatch.setattr(arrays, "device", lambda name: pretend_cupy)
    monkeypatch.chdir(tmp_path)
    args = report.parser("", tp.SIZES, 12).parse_args(["--size", "tiny", "--json", "out/tp.json"])
    minipar.run(tp.lesson, 3, args)
    check(tmp_path, 3, "threads")


def test_cuda_without_a_gpu_is_a_sentence(tmp_path):
    result = plain([*TINY, "--device", "cuda", "--ranks", "2"], tmp_path)
    if result.returncode:
        assert result.stderr.startswith('minipar: device "cuda" needs') and "Traceback" not in result.stderr


def test_a_wrong_model_ends_the_lesson(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CopyToTensorParallelRegion, "backward", lambda ctx, grad: grad)
    args = report.parser("", tp.SIZES, 1).parse_args(["--size", "tiny", "--no-figure"])
    with pytest.raises(SystemExit, match="NOT the whole one"):
        minipar.run(tp.lesson, 2, args)


def test_json_follows_links_and_odd_environments_are_survived(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    arguments = ["-m", "minipar.lessons.tp", "--size", "tiny", "--steps", "0", "--ranks", "2", "--no-figure"]
    result = plain([*arguments, "--json", "link.json"], tmp_path, COLUMNS="abc")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "link.json").is_symlink() and json.loads((tmp_path / "real.json").read_text())["steps"] == 0
    result = plain(arguments, tmp_path, MINIPAR_BLAS_THREADS="x")
    assert (
        result.returncode
        and result.stderr == "minipar: MINIPAR_BLAS_THREADS must be a whole number from 1 on, not 'x'.\n"
    )
