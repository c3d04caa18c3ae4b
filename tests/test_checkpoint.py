"""A run goes on from a checkpoint as if nothing had happened, on whatever ranks."""

import numpy as np
import pytest
from programs.data_parallel import MODES, Layers, cut, same_state, train, wrap

import minipar
from minipar import nn
from minipar.errors import CheckpointError, DeadlockError, RankFailed, ShapeError
from minipar.optim import SGD, AdamW
from minipar.parallel import DeviceMesh, ZeRO, full_state
from minipar.training import load_checkpoint, save_checkpoint

X, Y = np.random.default_rng(0).standard_normal((12, 18)), np.random.default_rng(1).standard_normal(12)
SIZES = {1: [12], 2: [5, 7], 3: [3, 0, 9], 4: [3, 3, 4, 2]}


def model_of(seed=0):
    return Layers((18, 3), seed)  # 57 elements


def part(world):
    return cut((X, Y), SIZES[world.size], world.rank)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_zf4_saved_on_four_and_gone_on_with_on_others(mode, ranks, tmp_path):
    path = tmp_path / "run" / "checkpoint.npz"

    def save(world):
        model = wrap(mode, model_of(), DeviceMesh(world))
        optimizer = AdamW(model.parameters(), lr=0.1)
        train(model, optimizer, part(world), 3)
        save_checkpoint(path, model, optimizer, position=7, order=np.arange(3), text="a")
        assert path.exists()

    def resume(world):
        model = wrap(mode, model_of(seed=9), DeviceMesh(world))
        optimizer = AdamW(model.parameters(), lr=0.1)
        more = load_checkpoint(path, model, optimizer)
        assert (more["position"], more["text"], more["order"].tolist()) == (7, "a", [0, 1, 2])
        train(model, optimizer, part(world), 3)
        return full_state(model, optimizer)

    single = model_of()
    optimizer = AdamW(single.parameters(), lr=0.1)
    train(single, optimizer, (X, Y), 6)
    minipar.run(save, 4)
    for state in minipar.run(resume, ranks):
        same_state(full_state(single, optimizer), state)
        assert state["steps"] == 6


def test_what_is_wrong_with_a_file_is_said(tmp_path):
    model = model_of()
    optimizer = AdamW(model.parameters())
    before = model.state_dict()
    with pytest.raises(CheckpointError, match=r"there is no checkpoint '.*nowhere.npz'"):
        load_checkpoint(tmp_path / "nowhere.npz", model)
    good = tmp_path / "good.npz"
    save_checkpoint(good, Layers((18, 3), seed=1))
    half = tmp_path / "half.npz"
    for end in (0, 100, good.stat().st_size // 2, good.stat().st_size - 30):
        half.write_bytes(good.read_bytes()[:end])
        with pytest.raises(CheckpointError, match=r"half\.npz' is no whole checkpoint"):
            load_checkpoint(half, model)
    damaged = bytearray(good.read_bytes())
    damaged[300] ^= 255
    half.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        load_checkpoint(half, model)
    with pytest.raises(CheckpointError, match="saved without one"):
        load_checkpoint(good, model, optimizer)
    with pytest.raises(ShapeError, match="does not fit the model"):
        load_checkpoint(good, Layers((18, 2)))
    save_checkpoint(good, Layers((18, 3), seed=1), SGD(model.parameters(), lr=1))
    with pytest.raises(ShapeError, match="of another optimizer"):
        load_checkpoint(good, model, optimizer)
    with pytest.raises(CheckpointError, match="more/bad is of type object: only numbers"):
        save_checkpoint(good, model, bad=object())
    with pytest.raises(CheckpointError, match="no checkpoint can be written to"):
        save_checkpoint("/dev/null/x.npz", model)
    for name, value in model.state_dict().items():
        assert value.tobytes() == before[name].tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.npz", "half.npz"]


def test_pickles_are_not_read(tmp_path):
    np.savez(tmp_path / "evil.npz", **{"parameters/layers.0.weight": np.array([print], object)})
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        load_checkpoint(tmp_path / "evil.npz", model_of())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_dtype_comes_back_as_it_was(dtype, tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    model = nn.GPT(nn.GPTConfig(vocab_size=7, context=4, width=4, layers=1, heads=2))
    for p in model.parameters():
        p.data = p.data.astype(getattr(ml_dtypes, dtype, dtype))
    save_checkpoint(tmp_path / "x.npz", model)
    expected = model.state_dict()
    for p in model.parameters():
        p.data[...] = 0
    load_checkpoint(tmp_path / "x.npz", model)
    for name, value in model.state_dict().items():
        assert value.dtype == expected[name].dtype and value.tobytes() == expected[name].tobytes()


def test_zf4_saving_on_rank_0_alone_is_told():
    def main(world):
        model = ZeRO(model_of(), DeviceMesh(world), 3)
        if world.rank == 0:
            save_checkpoint("/dev/null/never.npz", model)

    with pytest.raises((DeadlockError, RankFailed), match="all_gather of pieces"):
        minipar.run(main, 4)


@pytest.mark.slow
def test_zf4_saving_on_rank_0_alone_is_told_under_mpi(mpi):
    code = (
        "import minipar\n"
        "from minipar import nn\n"
        "from minipar.parallel import DeviceMesh, ZeRO\n"
        "from minipar.training import save_checkpoint\n"
        "def main(world):\n"
        "    model = ZeRO(nn.Linear(19, 3), DeviceMesh(world), 3)\n"
        "    if world.rank == 0:\n"
        "        save_checkpoint('never.npz', model)\n"
        "minipar.run(main)"
    ).replace("\\\n", "\\n")
    result = mpi(["-c", code], ranks=3, timeout=20)
    assert result.returncode and "all_gather of pieces" in result.stderr and "has ended" in result.stderr, result.stderr
