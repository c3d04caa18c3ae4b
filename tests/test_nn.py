"""The plain GPT and its optimizers."""

import math

import numpy as np
import pytest

from minipar import nn, optim, rng
from minipar.autograd import Tensor, no_grad
from minipar.context import RankContext, activate
from minipar.errors import ShapeError

TINY = nn.GPTConfig(vocab_size=7, context=5, width=6, layers=2, heads=2, dropout=0.2, dtype="float64")


def batch(config=TINY, samples=3):
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(samples, config.context + 1))
    return tokens[:, :-1], tokens[:, 1:]


def test_weights_depend_on_seed_and_name_only():
    a, b = nn.GPT(TINY), nn.GPT(nn.GPTConfig(**{**vars(TINY), "layers": 3}))
    ours, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    for name, parameter in ours.items():
        if "proj" not in name:  # their scale depends on the depth
            np.testing.assert_array_equal(parameter.data, theirs[name].data)
    other = nn.GPT(nn.GPTConfig(**{**vars(TINY), "seed": 1}))
    assert (other.wte.weight.data != a.wte.weight.data).any()
    np.testing.assert_allclose(nn.GPT(nn.GPTConfig(**{**vars(TINY), "dtype": "float32"})).wte.weight.data,
                               a.wte.weight.data, rtol=1e-6)  # fmt: skip


def test_untrained_loss_is_that_of_guessing():
    config = nn.GPTConfig(context=16, width=32, layers=2, heads=4)
    assert nn.GPT(config).loss(*batch(config)).item() == pytest.approx(math.log(256), rel=0.01)


def test_gradients_against_central_differences_with_dropout():
    model = nn.GPT(TINY)
    generator = np.random.default_rng(1)
    for parameter in model.parameters():
        parameter.data += 0.3 * generator.standard_normal(parameter.shape)
    tokens, targets = batch()
    targets = np.where(np.arange(5) == 2, -100, targets)
    model.loss(tokens, targets).backward()
    for name, parameter in model.named_parameters():
        flat, grad = parameter.data.reshape(-1), parameter.grad.reshape(-1)
        for i in generator.integers(flat.size, size=3):
            before, values = flat[i], []
            for flat[i] in (before + 1e-6, before - 1e-6):
                values.append(model.loss(tokens, targets).item())
            flat[i] = before
            assert (values[0] - values[1]) / 2e-6 == pytest.approx(grad[i], abs=1e-7), name


def test_attention_does_not_see_the_future():
    model = nn.GPT(TINY).eval()
    tokens, _ = batch()
    changed = tokens.copy()
    changed[:, 3] = (changed[:, 3] + 1) % 7
    a, b = model(tokens).data, model(changed).data
    np.testing.assert_array_equal(a[:, :3], b[:, :3])
    assert (a[:, 3:] != b[:, 3:]).any()


def test_dropout_depends_on_seed_step_and_layer():
    x = Tensor(np.ones((64,)))
    model = nn.GPT(nn.GPTConfig(**{**vars(TINY), "dropout": 0.5}))

    def mask(layer, **context):
        with activate(RankContext(**context)):
            return layer(x).data.tobytes()

    first, second = model.blocks[0].drop1, model.blocks[1].drop1
    assert mask(first) == mask(first)
    assert len({mask(first), mask(second), mask(first, step=1), mask(first, seed=1)}) == 4
    assert (model.eval().blocks[0].drop1(x).data == 1).all()


def test_masks_are_blocks_of_the_whole_mask():
    whole = rng.keep_mask(0.3, (3, 5, 4, 6), "key")
    for block in (
        np.s_[0:3, 1:3, 0:4, 0:6],
        np.s_[1:2, 0:5, 2:3, 0:6],
        np.s_[2:3, 2:4, 1:4, 3:5],
        np.s_[0:0, 0:5, 0:4, 0:6],
    ):
        start = tuple(s.start for s in block)
        piece = rng.keep_mask(0.3, whole[block].shape, "key", block=(whole.shape, start))
        np.testing.assert_array_equal(piece, whole[block])
    assert rng.keep_mask(0.3, (200, 200), "key").mean() == pytest.approx(0.7, abs=0.01)
    assert rng.keep_mask(0.0, (10,), "key").all()


def test_state_dict_round_trip_and_refusal():
    model, other = nn.GPT(TINY), nn.GPT(nn.GPTConfig(**{**vars(TINY), "seed": 1}))
    other.load_state_dict(model.state_dict())
    np.testing.assert_array_equal(other.eval()(batch()[0]).data, model.eval()(batch()[0]).data)
    state = model.state_dict()
    before = other.wpe.weight.data.copy()
    state["wpe.weight"] = state["wpe.weight"] + 1
    state["ln_f.bias"] = np.ones(3)
    with pytest.raises(ShapeError, match=r"ln_f.bias has shape \(6,\), the state has \(3,\)"):
        other.load_state_dict(state)
    np.testing.assert_array_equal(other.wpe.weight.data, before)
    del state["ln_f.bias"]
    with pytest.raises(ShapeError, match=r"missing \['ln_f.bias'\]"):
        other.load_state_dict(state)


def test_sizes_are_checked():
    with pytest.raises(ShapeError, match="longer than the model's context of 5"):
        nn.GPT(TINY)(np.zeros((1, 6), np.int64))
    with pytest.raises(ShapeError, match="probability"):
        nn.GPTConfig(dropout=1.0)


def test_tied_weight_is_one_parameter():
    model = nn.GPT(TINY)
    names = [name for name, _ in model.named_parameters()]
    assert names.count("wte.weight") == 1 and not any(name.startswith("head") for name in names)
    assert model.head.weight is model.wte.weight


def test_adamw_against_the_formula():
    parameter = nn.Parameter(np.array([1.0, -2.0]))
    optimizer = optim.AdamW([parameter], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.05)
    p, m, v = parameter.data.copy(), 0.0, 0.0
    for step in range(1, 5):
        g = p * step - 1
        parameter.grad = parameter.data * step - 1
        optimizer.step()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        p = p * (1 - 0.1 * 0.05) - 0.1 * (m / (1 - 0.8**step)) / (np.sqrt(v / (1 - 0.9**step)) + 1e-6)
        np.testing.assert_allclose(parameter.data, p, rtol=1e-12)


def test_sgd_against_the_formula_and_frozen_parameters():
    parameter, frozen = nn.Parameter(np.array([1.0])), nn.Parameter(np.array([1.0]))
    frozen.requires_grad = False
    optimizer = optim.SGD([parameter, frozen], lr=0.1, momentum=0.9, weight_decay=0.5)
    p, velocity = 1.0, 0.0
    for _ in range(3):
        parameter.grad = np.array([2.0])
        frozen.grad = np.array([2.0])
        optimizer.step()
        velocity = 0.9 * velocity + 2 + 0.5 * p
        p -= 0.1 * velocity
    assert parameter.data[0] == pytest.approx(p) and frozen.data[0] == 1 and list(optimizer.state) == [0]


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.AdamW])
def test_parameters_that_are_not_contiguous_are_updated(optimizer):
    assert nn.Parameter(np.array(1.0)).shape == ()
    parameter = nn.Parameter(np.ones((3, 4)).T)
    for _ in range(2):
        before = parameter.data.copy()
        parameter.grad = np.arange(1.0, 13).reshape(4, 3)
        optimizer([parameter], lr=0.1).step()
        assert (parameter.data < before).all()


def test_a_gpt_learns_a_sequence_by_heart():
    config = nn.GPTConfig(vocab_size=8, context=8, width=16, layers=1, heads=2)
    model = nn.GPT(config)
    optimizer = optim.AdamW(model.parameters(), lr=0.02)
    tokens = np.array([[0, 1, 2, 3, 4, 5, 6, 7]])
    for _ in range(60):
        model.zero_grad()
        loss = model.loss(tokens, (tokens + 3) % 8)
        loss.backward()
        optimizer.step()
    with no_grad():
        assert (model(tokens).argmax(-1) == (tokens + 3) % 8).all()
    assert loss.item() < 0.1
