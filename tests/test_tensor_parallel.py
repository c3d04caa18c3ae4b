"""Tensor parallelism equals one process, at sizes that divide and sizes that do not."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minipar
from minipar import nn
from minipar.arrays import split_bounds
from minipar.autograd import Tensor, no_grad
from minipar.autograd import functional as F
from minipar.context import current
from minipar.errors import ShapeError
from minipar.parallel import DeviceMesh, equivalent, replicas_equal, tensor_parallel
from minipar.parallel.tensor import ColumnParallelLinear, RowParallelLinear, reduce_from_region

TINY = nn.GPTConfig(vocab_size=11, context=6, width=12, layers=2, heads=6, dtype="float64")


def batch_of(config, batch=2, seed=0):
    tokens = np.random.default_rng(seed).integers(config.vocab_size, size=(batch, config.context + 1))
    return tokens[:, :-1], tokens[:, 1:].copy()


def compare(config, ranks, batch, **mesh):
    def rank_main(world):
        parallel = tensor_parallel(nn.GPT(config), DeviceMesh(world, **mesh))
        return equivalent(nn.GPT(config), parallel, batch, world)

    return minipar.run(rank_main, ranks=ranks)[0]


def check(result, tolerance):
    assert result.loss_relative_error < tolerance, result
    assert result.gradient_relative_error < tolerance, result
    assert result.parameter_relative_error < tolerance, result
    assert result.replicated_equal, result


@pytest.mark.parametrize("ranks", range(1, 7))
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gpt_equals_one_process_in_float64(ranks, dropout):
    config = nn.GPTConfig(**{**vars(TINY), "dropout": dropout})
    check(compare(config, ranks, batch_of(config), tp=ranks), 1e-10)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gpt_equals_one_process_in_float32(ranks):
    config = nn.GPTConfig(context=32, width=64, layers=2, heads=4)
    result = compare(config, ranks, batch_of(config), tp=ranks)
    assert result.loss_relative_error < 1e-6 and result.gradient_relative_error < 1e-5, result
    assert result.replicated_equal


def test_eight_thread_ranks():
    config = nn.GPTConfig(vocab_size=19, context=5, width=24, layers=1, heads=8, dtype="float64")
    check(compare(config, 8, batch_of(config), tp=8), 1e-10)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_sizes(data):
    ranks = data.draw(st.integers(1, 4))
    heads = data.draw(st.integers(ranks, 6))
    config = nn.GPTConfig(
        vocab_size=data.draw(st.integers(ranks, 17)),
        context=data.draw(st.integers(1, 7)),
        width=heads * data.draw(st.integers(1, 4)),
        layers=data.draw(st.integers(1, 2)),
        heads=heads,
        dropout=data.draw(st.sampled_from([0.0, 0.25])),
        dtype="float64",
    )
    tokens, targets = batch_of(config, data.draw(st.integers(1, 3)), data.draw(st.integers(0, 9)))
    targets[data.draw(st.integers(0, len(targets) - 1)), 0] = -100  # an ignored label
    check(compare(config, ranks, (tokens, targets), tp=ranks), 1e-9)


def test_empty_batch_and_no_labels_give_zero():
    def rank_main(world):
        model = tensor_parallel(nn.GPT(TINY), DeviceMesh(world, tp=2))
        losses = []
        for batch, label in ((0, 0), (2, -100)):
            tokens = np.zeros((batch, 3), np.int64)
            loss = model.loss(tokens, np.full((batch, 3), label))
            model.zero_grad()
            loss.backward()
            losses.append(loss.item())
            assert all(not p.grad.any() for p in model.parameters())
        return losses

    assert minipar.run(rank_main, ranks=2) == [[0.0, 0.0]] * 2


def test_logits_are_gathered_where_asked_for():
    tokens, _ = batch_of(TINY)

    def rank_main(world):
        with no_grad():
            return tensor_parallel(nn.GPT(TINY), DeviceMesh(world, tp=3))(tokens).data

    whole = nn.GPT(TINY)(tokens).data
    for logits in minipar.run(rank_main, ranks=3):
        np.testing.assert_allclose(logits, whole, rtol=1e-12, atol=1e-14)


def test_replicas_are_bitwise_equal_after_50_steps():
    config = nn.GPTConfig(vocab_size=13, context=8, width=18, layers=1, heads=3, dropout=0.1)
    tokens, targets = batch_of(config)

    def rank_main(world):
        model = tensor_parallel(nn.GPT(config), DeviceMesh(world, tp=3))
        optimizer = minipar.optim.AdamW(model.parameters())
        for step in range(50):
            current().step = step
            model.zero_grad()
            model.loss(tokens, targets).backward()
            optimizer.step()
        return replicas_equal(model, world)

    assert minipar.run(rank_main, ranks=3) == [True] * 3


def bias_on_every_rank(self, x):
    return reduce_from_region(F.linear(x, self.weight, self.bias), self.comm, self.name)


def no_reduction_of_the_input_gradient(self, x):
    return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize(
    ("layer", "mistake"),
    [(RowParallelLinear, bias_on_every_rank), (ColumnParallelLinear, no_reduction_of_the_input_gradient)],
)
def test_verification_sees_the_classic_mistakes(monkeypatch, layer, mistake):
    monkeypatch.setattr(layer, "forward", mistake)
    result = compare(TINY, 2, batch_of(TINY), tp=2)
    assert result.gradient_relative_error > 1e-3 and result.worst_parameter


def test_verification_is_not_fooled():
    def nan(world):
        parallel = tensor_parallel(nn.GPT(TINY), DeviceMesh(world, tp=2))
        parallel.blocks[0].ln1.weight.data[0] = np.nan
        return equivalent(nn.GPT(TINY), parallel, batch_of(TINY), world)

    result = minipar.run(nan, ranks=2)[0]
    assert result.loss_relative_error == result.gradient_relative_error == math.inf and result.worst_parameter

    def lost(world):
        parallel = tensor_parallel(nn.GPT(TINY), DeviceMesh(world, tp=2))
        parallel.named_parameters = lambda: [(n, p) for n, p in nn.Module.named_parameters(parallel) if "ln" not in n]
        return equivalent(nn.GPT(TINY), parallel, batch_of(TINY), world)

    with pytest.raises(ShapeError, match="do not have the same parameters"):
        minipar.run(lost, ranks=2)
    with pytest.raises(ShapeError, match="1 steps prove too little"):
        minipar.run(lambda world: equivalent(None, None, None, world, steps=1), ranks=1)

    def frozen(world):
        models = nn.GPT(TINY), tensor_parallel(nn.GPT(TINY), DeviceMesh(world, tp=2))
        for model in models:
            model.wpe.weight.requires_grad = False
        return equivalent(*models, batch_of(TINY), world)

    check(minipar.run(frozen, ranks=2)[0], 1e-10)


def test_a_model_is_split_once():
    def main(world):
        mesh = DeviceMesh(world, tp=2)
        tensor_parallel(tensor_parallel(nn.GPT(TINY), mesh), mesh)

    with pytest.raises(ShapeError, match="split already"):
        minipar.run(main, ranks=2)


def test_replicas_equal_sees_one_different_bit():
    def rank_main(world):
        model = tensor_parallel(nn.GPT(TINY), DeviceMesh(world, tp=2))
        if world.rank == 1:
            bias = model.blocks[0].mlp.proj.bias.data
            bias[3] = np.nextafter(bias[3], 1)
        return replicas_equal(model, world)

    assert minipar.run(rank_main, ranks=2) == [False, False]


# --- cases of the field ----------------------------------------------------------------------------------------------


def filled(inputs, outputs, weight, bias=None):
    layer = nn.Linear(inputs, outputs, bias=bias is not None, dtype="float64")
    layer.weight.data[:] = weight
    if bias is not None:
        layer.bias.data[:] = bias
    return layer


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tp1_row_parallel_adds_its_bias_once(ranks):
    def rank_main(world):
        layer = RowParallelLinear(filled(4, 3, 1.0, [100.0, 200.0, 300.0]), world)
        start, stop = split_bounds(4, world.size, world.rank)
        x = Tensor(np.array([[1.0, 2, 3, 4], [5, 6, 7, 8]])[:, start:stop])
        y = layer(x)
        y.sum().backward()
        return y.data, layer.bias.grad, layer.weight.grad, (start, stop)

    expected = np.array([[6.0] * 3, [8] * 3, [10] * 3, [12] * 3])
    for y, bias_grad, weight_grad, (start, stop) in minipar.run(rank_main, ranks=ranks):
        np.testing.assert_array_equal(y, [[110, 210, 310], [126, 226, 326]])
        np.testing.assert_array_equal(bias_grad, [2, 2, 2])
        np.testing.assert_array_equal(weight_grad, expected[start:stop])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tp4_column_parallel_reduces_the_input_gradient_once(ranks):
    def rank_main(world):
        x = Tensor(np.ones((1, 4)), requires_grad=True)
        ColumnParallelLinear(filled(4, 8, 1.0), world)(x).sum().backward()
        return x.grad

    for grad in minipar.run(rank_main, ranks=ranks):
        np.testing.assert_array_equal(grad, [[8.0] * 4])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda world: tensor_parallel(nn.GPT(nn.GPTConfig(width=8, heads=2)), DeviceMesh(world, tp=4)), "2 heads"),
        (lambda world: nn.GPTConfig(width=10, heads=3), "width 10 does not divide into 3 heads"),
        (lambda world: DeviceMesh(world, tp=3), "4"),
        (
            lambda world: tensor_parallel(nn.GPT(nn.GPTConfig(vocab_size=3)), DeviceMesh(world, tp=4)),
            "3 vocabulary rows",
        ),
    ],
)
def test_tp2_impossible_splits_name_the_sizes(make, message):
    with pytest.raises(ShapeError, match=message):
        minipar.run(make, ranks=4)


def test_tp2_25_heads_on_4_ranks_are_uneven_and_right():
    config = nn.GPTConfig(vocab_size=9, context=4, width=50, layers=1, heads=25, dtype="float64")
    check(compare(config, 4, batch_of(config), tp=4), 1e-10)


def test_tp7_dropout_inside_and_outside_the_split_region():
    """Replicated activations drop alike within the tensor-parallel group, split ones as their piece of the whole."""

    def rank_main(world):
        mesh = DeviceMesh(world, dp=2, tp=2)
        current().samples = (mesh["dp"].rank, 2)  # one sample a data-parallel rank
        config = nn.GPTConfig(vocab_size=8, context=4, width=8, layers=1, heads=4, dropout=0.5)
        model = tensor_parallel(nn.GPT(config), mesh)
        drop = model.blocks[0].drop1
        replicated = drop(Tensor(np.ones((1, 4, 16)))).data
        attention = model.blocks[0].attn.drop
        split = attention(Tensor(np.ones((1, 2, 4, 8)))).data
        return replicated, split

    results = minipar.run(rank_main, ranks=4)
    again = minipar.run(rank_main, ranks=4)
    for (a, b), (c, d) in zip(results, again, strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, d)
    replicated, split = zip(*results, strict=True)
    np.testing.assert_array_equal(replicated[0], replicated[1])  # ranks 0, 1 and ranks 2, 3 are the tp groups
    np.testing.assert_array_equal(replicated[2], replicated[3])
    assert (replicated[0] != replicated[2]).any()
    assert len({piece.tobytes() for piece in split}) == 4


def test_gelu_mlp_with_a_replicated_layer_in_front():
    rng = np.random.default_rng(0)
    x, first = rng.normal(size=(3, 5)), rng.normal(size=(5, 5))
    a, b = rng.normal(size=(5, 7)), rng.normal(size=(7, 2))

    def forward(front, column, row):
        hidden = minipar.autograd.functional.gelu(column(front(Tensor(x))))
        return (row(hidden) ** 2).sum()

    def rank_main(world):
        front = filled(5, 5, first)
        column, row = ColumnParallelLinear(filled(5, 7, a), world), RowParallelLinear(filled(7, 2, b), world)
        forward(front, column, row).backward()
        return front.weight.grad

    front = filled(5, 5, first)
    forward(front, filled(5, 7, a), filled(7, 2, b)).backward()
    grads = minipar.run(rank_main, ranks=3)
    for grad in grads:
        np.testing.assert_allclose(grad, front.weight.grad, rtol=1e-10)
        np.testing.assert_array_equal(grad, grads[0])
