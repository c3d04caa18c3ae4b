"""minipar bench: figures that are right, options that are checked. No test looks at how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import minipar
from minipar import nn
from minipar.bench import collectives, links
from minipar.bench.data_parallel import bench_data_parallel
from minipar.bench.pipeline import bench_pipeline
from minipar.collectives import ALGORITHMS, choice, ring
from minipar.errors import ShapeError

ROOT = Path(__file__).parents[1]
KEYS = {"op", "algorithm", "ranks", "bytes", "count", "dtype", "redop", "time_us", "spread_us", "algbw_gbps",
        "busbw_gbps", "wrong"}  # fmt: skip


def run(*arguments, cwd=ROOT):
    command = [sys.executable, "-m", "minipar", "bench", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("operation", list(ALGORITHMS))
def test_rows_of_every_operation(operation, ranks):
    names = [name for name in ALGORITHMS[operation] if name != "native"]
    names += ["auto", "symmetric", "limit"] if operation == "all_reduce" else ["auto"]

    def main(world):
        return collectives.bench(world, operation, [4, 1000], names, rounds=1)

    for rows in minipar.run(main, ranks=ranks):
        assert [row["algorithm"] for row in rows] == 2 * names
        for row in rows:
            assert set(row) == KEYS and row["wrong"] == 0 and row["ranks"] == ranks
            assert row["bytes"] == 4 * row["count"] and row["time_us"] > 0
            factor = collectives.bus_factor(operation, ranks)
            assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"] * factor)
            assert row["algbw_gbps"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3)


def test_bus_factors_are_those_of_nccl_tests():
    assert collectives.bus_factor("all_reduce", 4) == 1.5
    assert collectives.bus_factor("all_gather", 4) == collectives.bus_factor("all_to_all", 4) == 0.75
    assert collectives.bus_factor("broadcast", 4) == collectives.bus_factor("reduce", 4) == 1


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32"])
@pytest.mark.parametrize("redop", ["sum", "max", "prod"])
def test_other_dtypes_and_operations(dtype, redop):
    rows = minipar.run(
        lambda world: collectives.bench(world, "all_reduce", [64], ["ring", "shared"], dtype, redop, rounds=1), ranks=3
    )[0]
    assert [row["wrong"] for row in rows] == [0, 0]


def test_wrong_numbers_are_counted_on_all_ranks(monkeypatch):
    def broken(source, target, comm, combine, operation):
        ring.all_reduce(source, target, comm, combine, operation)
        target[comm.rank] += 1

    monkeypatch.setitem(ALGORITHMS["all_reduce"], "ring", broken)
    rows = minipar.run(lambda world: collectives.bench(world, "all_reduce", [64], ["ring"], rounds=1), ranks=3)[0]
    assert rows[0]["wrong"] == 3


@pytest.mark.slow
def test_float16_rows_under_mpi_leave_out_what_mpi_cannot_do(mpi):
    arguments = ["-m", "minipar", "bench", "broadcast", "--dtype", "float16", "-b", 64, "-e", 64, "--rounds", 1]
    result = mpi(arguments, ranks=2)
    assert result.returncode == 0 and "native" not in result.stdout, result.stdout + result.stderr


@pytest.mark.slow
def test_a_wrong_option_is_told_once_under_mpi(mpi):
    result = mpi(["-m", "minipar", "bench"], ranks=3)
    assert result.returncode and result.stderr.count("name either what to measure") == 1


def test_sizes():
    assert collectives.sizes_between(8, 64, 2) == [8, 16, 32, 64]
    assert collectives.sizes_between(1000, 1000, 2) == [1000]
    for begin, end, factor in [(0, 8, 2), (8, 4, 2), (8, 16, 1)]:
        with pytest.raises(ShapeError, match=f"sizes from {begin} to {end} bytes by {factor}"):
            collectives.sizes_between(begin, end, factor)


def test_messages_and_copies():
    def main(world):
        p2p = links.bench_p2p(world, [1, 100_000], rounds=1)
        copy = links.bench_copy(world, [1, 1000], rounds=1)
        times = links.matrix(world, 8, rounds=1)
        assert (times == times.T).all() and (np.diag(times) == 0).all() and (times > 0).sum() == 6
        return p2p, copy

    p2p, copy = minipar.run(main, ranks=3)[0]
    assert [row["bytes"] for row in p2p] == [1, 100_000] and all(row["both_gbps"] > 0 for row in p2p)
    assert [row["bytes"] for row in copy] == [1, 1000] and all(row["gbps"] > 0 for row in copy)


def test_alpha_and_beta_are_found_again():
    rows = [{"bytes": n, "time_us": 5 + n / 2000} for n in (1, 1000, 100_000, 10_000_000)]
    alpha, beta = links.alpha_beta(rows)
    assert (alpha, beta) == (pytest.approx(5e-6), pytest.approx(0.5e-9))


def test_a_table_takes_the_best_and_ignores_noise():
    times = {64: {"ring": 9, "tree": 5}, 256: {"ring": 9, "tree": 6}, 1024: {"ring": 6, "tree": 6.5}}
    times |= {4096: {"ring": 5, "tree": 9}}
    rows = [{"bytes": n, "algorithm": a, "time_us": t} for n, by in times.items() for a, t in by.items()]
    assert collectives.limits_of(rows) == [[2048, "tree"], [None, "ring"]]


def test_tune_writes_a_table_that_auto_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(collectives, "sizes_between", lambda *_: [64, 4096])
    table = minipar.run(lambda world: collectives.tune(world), ranks=2)[0]
    assert set(table) == {"all_reduce"} and table["all_reduce"][-1][0] is None
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"algorithms": {"threads": {"all_reduce": {"2": [[None, "tree"]]}}}}))
    monkeypatch.setenv("MINIPAR_TUNING", str(path))
    names = minipar.run(lambda world: choice.name_of("all_reduce", 8, world), ranks=2)
    assert names == ["tree", "tree"]


@pytest.mark.slow
def test_command_line(tmp_path):
    result = run("all_reduce", "-b", 64, "-e", 1024, "--rounds", 1, "--ranks", 3, "--json", "a.json", "--plot", "plot",
                 cwd=tmp_path)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert all(
        word in result.stdout for word in ("#wrong", "busbw", "halving_doubling", "symmetric", "limit", "3 ranks")
    )
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["ranks"] == 3 and {row["op"] for row in figures["rows"]} == {"all_reduce"}
    assert (tmp_path / "plot.png").stat().st_size > 10_000 and (tmp_path / "plot.svg").exists()
    result = run("p2p", "-b", 8, "-e", 64, "--rounds", 1, "--json", "-", cwd=tmp_path)
    assert json.loads(result.stdout)["alpha_us"] > 0 and "rank by rank" in result.stderr
    assert "copied" in run("copy", "-e", 4096, "--rounds", 1, cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name either what to measure, or a table to --tune"),
        (["all_reduce", "--algorithms", "magic"], "all_reduce has no algorithm 'magic': choose auto, ring"),
        (["broadcast", "--algorithms", "limit"], "limit: only for all_reduce, not for broadcast"),
        (["all_reduce", "-b", "0"], "'0' is no size"),
        (["all_reduce", "-b", "1Q"], "'1Q' is no size"),
        (["all_reduce", "-f", "1"], "the factor above 1"),
        (["all_reduce", "-b", "2M", "-e", "1M"], "sizes from 2097152 to 1048576 bytes by 4"),
        (["all_reduce", "--ranks", "0"], "whole number from 1 on"),
        (["all_reduce", "--redop", "mean", "--dtype", "int32", "-e", "1K"], "mean of int32"),
        (["all_reduce", "--algorithms", "native", "-e", "1K"], "start with mpirun"),
        (["all_reduce", "--against", "torch"], "--against torch is not for all_reduce"),
        (["step", "--plot", "x"], "--plot is for collectives"),
        (["p2p", "--ranks", "1"], "at least 2 ranks"),
        (["all_reduce", "--json", "/dev/null/x.json"], "nothing can be written"),
    ],
)
def test_what_a_user_gets_wrong_is_a_sentence(arguments, said, tmp_path):
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode != 0 and said in result.stderr and "Traceback" not in result.stderr, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["all_reduce", "all_to_all"])
def test_under_mpi(mpi, operation, tmp_path):
    arguments = [
        "-m",
        "minipar",
        "bench",
        operation,
        "-b",
        64,
        "-e",
        "64K",
        "-f",
        32,
        "--rounds",
        1,
        "--json",
        "a.json",
    ]
    result = mpi(arguments, ranks=3)
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    names = set(ALGORITHMS[operation]) | ({"symmetric", "limit", "library"} if operation == "all_reduce" else set())
    assert {row["algorithm"] for row in rows} == names and sum(row["wrong"] for row in rows) == 0
    result = mpi([*arguments[:4], "--algorithms", "magic"], ranks=2)
    assert result.returncode != 0 and "has no algorithm 'magic'" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("ranks", [1, 3])
def test_steps_of_data_parallel_ranks(ranks):
    config = nn.GPTConfig(context=8, width=16, layers=2, heads=2)
    results = minipar.run(lambda world: bench_data_parallel(world, rounds=3, config=config), ranks)
    for result in results:
        times = {name: result[f"{name}_ms"] for name in ("dp", "one_bucket", "limit", "one_rank")}
        assert min(times.values()) > 0 and result["over_limit"] > 0 and result["rounds"] == 3
        assert result["exposed"] == pytest.approx(1 - 1 / result["over_limit"])
        assert result["tokens_per_second"] == pytest.approx(ranks * 64 / times["dp"] * 1e3)
        assert result == results[0]  # what the slowest rank took, on all alike


@pytest.mark.slow
def test_dp_on_the_command_line(tmp_path):
    result = run("dp", "--rounds", 1, "--json", tmp_path / "a", "--ranks", 2)
    assert result.returncode == 0 and "exposed communication" in result.stdout, result.stderr
    assert json.loads((tmp_path / "a").read_text())["ranks"] == 2
    result = run("dp", "--against", "gloo")
    assert result.returncode and "--against gloo is not for dp" in result.stderr


@pytest.mark.parametrize("ranks", [1, 3])
def test_steps_of_a_pipeline(ranks):
    config = nn.GPTConfig(context=8, width=16, layers=2, heads=2)
    results = minipar.run(lambda world: bench_pipeline(world, rounds=3, config=config), ranks)
    for result in results:
        times = [result[f"{name}_ms"] for name in ("pipeline", "limit", "unconnected", "one_rank", "one_rank_micro")]
        assert min(times) > 0 and result["rounds"] == 3 and result["of_limit"] > 0
        assert result["bubble"] == pytest.approx((ranks - 1) / 8)
        assert result["limit_ms"] == pytest.approx(result["unconnected_ms"] * (1 + result["bubble"]))
        assert result == results[0]


def test_more_stages_than_layers_to_measure():
    result = run("pp", "--ranks", 7)
    assert result.returncode and "6 layers: not enough for 7 ranks" in result.stderr
