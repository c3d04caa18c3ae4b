"""The lesson about data parallelism: its predictions by hand, and that it runs everywhere."""

import json
import subprocess
import sys

import numpy as np
import pytest

from minipar.lessons import dp as lesson


def check(figures, ranks, transport):
    assert figures["ranks"] == ranks and figures["transport"] == transport and figures["lesson"] == "dp"
    assert figures["training"]["replicas_equal"] and figures["equality"]["replicated_equal"]
    assert figures["equality"]["gradient_relative_error"] < 1e-5
    sent = figures["bytes_sent_per_step"]
    assert sent["predicted"] <= sent["counted"] <= sent["predicted"] + 2000 * (ranks > 1)
    starved, fed = figures["starving"]["rows"]
    assert starved["measured_ms"] >= 0.9 * starved["predicted_ms"] and fed["workers"] == 4
    if ranks > 1:
        assert figures["overlap"]["rows"][0]["buckets"] == 1
        straggler = figures["straggler"]
        assert sum(straggler["shares"]) == 4 * ranks and straggler["shares"][-1] == min(straggler["shares"])
        assert straggler["predicted_ratio"] < 1


@pytest.mark.parametrize(
    ("sends", "expected"),
    [
        ([1.2], 1 + 2 + 1.2 + 0.1),  # nothing to hide behind
        ([0.6, 0.6], 1 + 2 + 0.6 + 0.1),  # the last half is sent after the end
        ([3.0, 3.0], 1 + 1 + 6 + 0.1),  # the link is busy from the moment the first half is there
        ([0.0001] * 4, 3.1001),
    ],
)
def test_the_length_of_a_step(sends, expected):
    assert lesson.step_length(1.0, 2.0, 0.1, sends) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("samples", "seconds", "expected"),
    [
        (32, [1, 1, 1, 4], [10, 10, 10, 2]),
        (8, [1, 1], [4, 4]),
        (3, [1, 1], [2, 1]),
        (1, [5, 1, 1], [0, 1, 0]),
        (0, [1, 2], [0, 0]),
        (7, [3], [7]),
    ],
)
def test_samples_by_speed(samples, seconds, expected):
    assert lesson.balanced(samples, seconds) == expected


def test_samples_by_speed_are_never_lost():
    for seed in range(50):
        drawn = np.random.default_rng(seed)
        samples, seconds = int(drawn.integers(100)), drawn.uniform(0.1, 9, drawn.integers(1, 9))
        shares = lesson.balanced(samples, seconds)
        ideal = samples / seconds / (1 / seconds).sum()
        assert sum(shares) == samples and np.abs(np.subtract(shares, ideal)).max() < 1


def test_uneven_shares():
    assert lesson.uneven(8, 1) == [8] and lesson.uneven(8, 2) == [1, 15] and lesson.uneven(4, 4) == [1, 4, 4, 7]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_on_threads(ranks, tmp_path):
    options = ["--ranks", str(ranks), "--size", "tiny", "--steps", "5", "--json", "a"]
    command = [sys.executable, "-m", "minipar.lessons.dp", *options]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    check(json.loads((tmp_path / "a").read_text()), ranks, "threads")
    assert (tmp_path / "figures" / "dp.png").stat().st_size > 10_000


@pytest.mark.slow
def test_under_mpi(mpi, tmp_path):
    result = mpi(["-m", "minipar.lessons.dp", "--size", "tiny", "--steps", "3", "--json", "a"], 4)
    assert result.returncode == 0, result.stderr
    check(json.loads((tmp_path / "a").read_text()), 4, "MPI")
    assert result.stdout.count("1  Is it the same model?") == 1


@pytest.mark.slow
def test_no_steps(tmp_path):
    options = ["--ranks", "2", "--size", "tiny", "--steps", "0", "--no-figure"]
    command = [sys.executable, "-m", "minipar.lessons.dp", *options]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
