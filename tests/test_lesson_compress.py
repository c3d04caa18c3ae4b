"""The lesson about compression: that it runs everywhere, and that what it says is what its figures say."""

import json
import subprocess
import sys

import numpy as np
import pytest

from minipar.lessons import compress as lesson
from minipar.parallel import OneBitSign, PowerSGD, TopK


def check(figures, ranks, transport):
    assert figures["ranks"] == ranks and figures["transport"] == transport and figures["lesson"] == "compress"
    for row in figures["bytes_per_step"].values():
        assert row["bytes"] == row["predicted"] and (row["bytes"] > 0) == (ranks > 1)
    for name, run in figures["training"].items():
        assert run["replicas_equal"] and np.isfinite(run["losses"]).all(), name
    assert figures["error_feedback"]["without"] == [5.0, 0.0] and figures["error_feedback"]["sum"] == [5.0, 2.0]


def test_the_ratios_of_the_literature():
    """Rank 1 of ResNet18's shapes saves 243x (Vogels et al. 2019); a bit of 32 is 1/32 but for the scales."""
    shapes = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for width, blocks in ((64, 2), (128, 2), (256, 2), (512, 2)):
        for block in range(blocks):
            shapes += [(width, before, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if block == 0 and before != width:
                shapes += [(width, before, 1, 1), (width,), (width,)]
            before = width
    shapes[0] = (64, 3, 3, 3)  # CIFAR-10
    shapes += [(10, 512), (10,)]
    assert sum(int(np.prod(s)) for s in shapes) == 11_173_962
    exchange, matrices = PowerSGD(1), [s for s in shapes if len(s) > 1]
    sent = sum(sum(exchange.sizes(s)[:2]) if exchange.sizes(s) else int(np.prod(s)) for s in shapes)
    vectors = sum(int(np.prod(s)) for s in shapes if len(s) == 1)
    assert (11_173_962 - vectors) / (sent - vectors) > 243 > len(matrices)
    assert OneBitSign().length(1 << 20) * 8 / (1 << 20) == 1 + 32 / 512


def test_feedback_by_hand():
    gradients = [np.array([2.0, 1.0])] * 3
    largest = lambda g: np.where(np.abs(g) == np.abs(g).max(), g, 0.0)  # noqa: E731
    came, left = lesson.feedback_walk(gradients, largest)
    assert (came + left).tolist() == [6.0, 3.0]


def test_even_ranks():
    shapes, dtype = [(100, 1000)], np.dtype(np.float32)
    even = lesson.even_ranks(0.01)
    sent = lambda exchange, n: lesson.predicted_bytes(exchange, shapes, dtype, n, 0)  # noqa: E731
    assert sent(TopK(0.01), even - 5) < sent(None, even - 5) and sent(TopK(0.01), even + 5) > sent(None, even + 5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 5])
def test_on_threads(ranks, tmp_path):
    options = ["--ranks", str(ranks), "--size", "tiny", "--steps", "12", "--json", "a"]
    command = [sys.executable, "-m", "minipar.lessons.compress", *options]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    check(json.loads((tmp_path / "a").read_text()), ranks, "threads")
    assert (tmp_path / "figures" / "compress.png").stat().st_size > 10_000


@pytest.mark.slow
def test_under_mpi(mpi, tmp_path):
    result = mpi(["-m", "minipar.lessons.compress", "--size", "tiny", "--steps", "8", "--json", "a"], 4)
    assert result.returncode == 0, result.stderr
    check(json.loads((tmp_path / "a").read_text()), 4, "MPI")
    assert result.stdout.count("1  Four ways") == 1


@pytest.mark.slow
def test_no_steps(tmp_path):
    options = ["--ranks", "1", "--size", "tiny", "--steps", "0", "--no-figure"]
    command = [sys.executable, "-m", "minipar.lessons.compress", *options]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "No steps, no answer" in result.stdout, result.stderr
