"""The lesson about ZeRO, and the bytes that it counts: against the formula, and against the allocator's own books."""

import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

import minipar
from minipar import nn
from minipar.lessons import zero as lesson
from minipar.optim import AdamW
from minipar.parallel import DataParallel, DeviceMesh, ZeRO
from minipar.training import held_bytes


def check(figures, ranks, transport):
    assert figures["ranks"] == ranks and figures["transport"] == transport and figures["lesson"] == "zero"
    for row in figures["memory"]["stages"]:
        for kind in lesson.KINDS:
            assert abs(row[kind] - row["predicted"][kind]) < 0.05 * row["predicted"][kind]
    for row, times in zip(figures["volume"], (1, 1, 1, 1.5), strict=True):
        assert row["bytes"] == row["predicted"]
        assert row["times"] == pytest.approx(times if ranks > 1 else 1, abs=0.02)
    for row in figures["training"]:
        assert row["replicas_equal"] and row["parameter_relative_error"] < 1e-4


def test_the_papers_table():
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 ranks."""
    found = [sum(lesson.formula(stage, 64).values()) * 7.5 for stage in range(4)]
    np.testing.assert_allclose(found, [120, 31.40625, 16.640625, 1.875])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("widths", [(64, 48, 32), (7, 3, 1), (400,)])
def test_held_bytes_are_those_of_the_formula(ranks, widths):
    """Within 1 % and the padding: a rank's piece of each unit is at most one element longer than an n-th."""
    from programs.data_parallel import Layers

    def main(world):
        for stage in range(4):
            layers = Layers((*widths, 2))
            for p in layers.parameters():
                p.data = p.data.astype(np.float16)
            count = sum(p.size for p in layers.parameters())
            model = ZeRO(layers, DeviceMesh(world), stage, master_dtype=np.float32)
            optimizer = AdamW(model.parameters())
            for _ in range(2):
                model.zero_grad()
                model.loss(np.ones((2, widths[0]), np.float16), np.ones(2, np.float16)).backward()
                optimizer.step()
            held = held_bytes(model, optimizer)
            assert held["gathered"] == 0
            for kind, of in lesson.formula(stage, ranks).items():
                cut = 12 if kind == "optimizer" else 2
                # A rank may own less, down to nothing, where elements are few.
                assert held[kind] <= 1.01 * of * count + cut * len(model.units), (stage, kind)
                share = -(-count // ranks) * ranks - count
                if world.rank == 0:
                    assert held[kind] >= 0.99 * of * count - cut * share, (stage, kind)

    minipar.run(main, ranks)


def test_held_bytes_of_data_parallel_and_of_a_plain_model():
    config = nn.GPTConfig(context=8, width=32, layers=2, heads=2)

    def main(world):
        for model in (nn.GPT(config), DataParallel(nn.GPT(config), DeviceMesh(world))):
            optimizer = AdamW(model.parameters())
            tokens = np.arange(9).reshape(1, 9)
            model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            held, count = held_bytes(model, optimizer), sum(p.size for p in model.parameters())
            padding = 64 * len(model.parameters())
            assert held["parameters"] == 4 * count and held["optimizer"] == 8 * count and held["gathered"] == 0
            assert 4 * count <= held["gradients"] <= 4 * count + padding

    minipar.run(main, 2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_the_allocator_agrees(stage):
    """All that NumPy has allocated since, on all thread ranks together, is what held_bytes says."""
    config = nn.GPTConfig(context=8, width=96, layers=3, heads=2)
    tokens = np.arange(9).reshape(1, 9)
    sides = {}

    def main(world):
        if world.rank == 0:
            tracemalloc.start()
        world.barrier()
        model = ZeRO(nn.GPT(config), DeviceMesh(world), stage)
        optimizer = AdamW(model.parameters())
        for _ in range(2):
            model.zero_grad()
            model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
        model.publish()
        held = held_bytes(model, optimizer)
        sides[world.rank] = sum(held.values())
        world.barrier()
        if world.rank == 0:
            numpy_only = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
            traces = tracemalloc.take_snapshot().filter_traces([numpy_only])
            sides["allocated"] = sum(trace.size for trace in traces.traces)
            tracemalloc.stop()
        world.barrier()

    minipar.run(main, 3)
    counted = sides[0] + sides[1] + sides[2]
    assert sides["allocated"] == pytest.approx(counted, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_on_threads(ranks, tmp_path):
    options = ["--ranks", str(ranks), "--size", "tiny", "--steps", "5", "--json", "a"]
    command = [sys.executable, "-m", "minipar.lessons.zero", *options]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    check(json.loads((tmp_path / "a").read_text()), ranks, "threads")
    assert (tmp_path / "figures" / "zero.png").stat().st_size > 10_000


@pytest.mark.slow
def test_under_mpi(mpi, tmp_path):
    result = mpi(["-m", "minipar.lessons.zero", "--size", "tiny", "--steps", "3", "--json", "a"], 4)
    assert result.returncode == 0, result.stderr
    check(json.loads((tmp_path / "a").read_text()), 4, "MPI")
    assert result.stdout.count("1  What there is to keep") == 1


@pytest.mark.slow
def test_no_steps(tmp_path):
    options = ["--ranks", "2", "--size", "tiny", "--steps", "0", "--no-figure"]
    command = [sys.executable, "-m", "minipar.lessons.zero", *options]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
