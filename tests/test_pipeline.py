"""Pipelines equal one process: programs/pipeline.py on threads and under MPI; the cases of the field."""

import copy
import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from programs import pipeline as program
from programs.pipeline import (
    SYNCHRONOUS,
    TINY,
    Chain,
    check_equal,
    check_size,
    check_tied,
    grads_equal,
    samples_of,
    schedule_of,
    tokens_of,
    weights_equal,
)

import minipar
from minipar import nn
from minipar.autograd import Tensor
from minipar.errors import DeadlockError, ScheduleError, ShapeError
from minipar.optim import SGD
from minipar.parallel import DeviceMesh
from minipar.parallel.pipeline import Pipeline, Schedule, balance, executor, make, measure, validate
from minipar.parallel.verify import relative_error


def on_ranks(ranks, function, *args, **kwargs):
    return minipar.run(lambda world: function(world, *args, **kwargs), ranks, timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_under_mpi(mpi, programs, ranks):
    result = mpi([programs / "pipeline.py"], ranks, timeout=100)
    assert (result.returncode, result.stdout) == (0, "ok\n" * ranks), result.stderr


@pytest.mark.slow
def test_a_deadlock_under_mpi_is_explained(mpi, programs):
    result = mpi([programs / "pipeline.py", "deadlock"], 2)
    assert result.returncode == 1
    assert "CommunicationTimeout" in result.stderr and "nothing came in 3 s" in result.stderr
    texts = (
        "0B0 waits for the gradient of micro-batch 0 from stage 1 (1B0 on rank 1), which has not run",
        "1F1 waits for the activations of micro-batch 1 from stage 0 (0F1 on rank 0), which has not run",
    )
    assert any(text in result.stdout + result.stderr for text in texts)


# --- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 5), (3, 7), (4, 9), (4, 3), (3, 1)])
def test_every_schedule_equals_one_process(name, p, m):
    """Ragged micro-batches, dropout, ignored labels, fewer micro-batches than ranks, a smaller last batch."""
    if name != "dualpipe-v" or m >= 2 * p:
        on_ranks(p, check_equal, name, m)


@settings(max_examples=15)
@given(
    st.sampled_from(SYNCHRONOUS),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from([(1, 1), (2, 1), (1, 2)]),
    st.integers(1, 3),
    st.integers(0, 9),
    st.booleans(),
    st.booleans(),
)
def test_any_layout_equals_one_process(name, p, m, axes, v, extra, recompute, tied):
    """dp and tp, any number of stages and of samples beyond one a micro-batch."""
    assume(name != "dualpipe-v" or m >= 2 * p)
    dp, tp = axes
    options = dict(dp=dp, tp=tp, v=v, extra=extra, recompute=recompute, tied=tied)
    on_ranks(min(p, 3 if dp * tp > 1 else 4) * dp * tp, check_equal, name, m, **options)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("options", [{"dp": 2}, {"tp": 2}, {"recompute": True}], ids=str)
def test_with_data_and_tensor_parallelism_and_recomputation(name, options):
    on_ranks(2 * options.get("dp", 1) * options.get("tp", 1), check_equal, name, 4, **options)


def test_all_axes_at_once():
    on_ranks(8, check_equal, "1f1b", 3, dp=2, tp=2)


def test_float32():
    for name in ("1f1b", "zb-v"):
        on_ranks(3, check_equal, name, 6, dtype="float32", tolerances=(1e-6, 1e-5))


def test_a_stage_that_is_the_embedding_alone():
    """As many layers as stages, so each has one."""

    def main(world):
        config = nn.GPTConfig(**{**vars(TINY), "layers": 2})
        single = nn.GPT(config)
        pipeline = Pipeline(nn.GPT(config), DeviceMesh(world, pp=4), make("zb-h1", 4, 4))
        assert [len(part) for part in pipeline.split] == [1] * 4
        single.loss(*tokens_of(4)).backward()
        pipeline.forward_backward(*tokens_of(4))
        grads_equal(pipeline, single)

    on_ranks(4, main)


@settings(max_examples=10)
@given(st.sampled_from(["1f1b", "interleaved", "zb-h1", "zb-v"]), st.integers(2, 3), st.integers(0, 10**6))
def test_a_schedule_that_validation_accepts_runs(name, p, seed):
    """Actions changed places, as often as is allowed: with reductions before other stages' actions, say."""
    draw, ranks = random.Random(seed), [list(actions) for actions in schedule_of(name, p, 5).ranks]
    schedule = Schedule(name, ranks)
    for _ in range(60):
        actions = draw.choice(ranks)
        i = draw.randrange(len(actions) - 1)
        actions[i : i + 2] = actions[i + 1], actions[i]
        try:
            validate(Schedule("swapped", ranks))
        except ScheduleError:
            actions[i : i + 2] = actions[i + 1], actions[i]
        else:
            schedule = Schedule("swapped", ranks)
    on_ranks(2 * p, check_equal, "swapped", 5, dp=2, schedule=schedule)


def test_gradients_are_added_to_what_is_there():
    """Two calls without zero_grad, also where data parallelism adds them up."""

    def main(world, dp):
        mesh = DeviceMesh(world, dp=dp, pp=2)
        single, pipeline = nn.GPT(TINY), Pipeline(nn.GPT(TINY), mesh, make("1f1b", 2, 3))
        for seed in range(3):
            batch = tokens_of(4 * dp, seed=seed)
            single.loss(*batch).backward()
            pipeline.forward_backward(*(np.split(a, dp)[mesh.coordinates["dp"]] for a in batch))
            grads_equal(pipeline, single)

    for dp in (1, 2):
        on_ranks(2 * dp, main, dp)


def test_a_micro_batch_without_labels():
    """A mean of the micro-batches' means would count it as much as the others; no labels at all give zero."""

    def main(world):
        single, pipeline = nn.GPT(TINY), Pipeline(nn.GPT(TINY), DeviceMesh(world, pp=2), make("zb-h1", 2, 4))
        tokens, targets = tokens_of(4)
        targets[1] = -100
        expected = single.loss(tokens, targets)
        expected.backward()
        assert abs(pipeline.forward_backward(tokens, targets) - expected.item()) < 1e-12
        grads_equal(pipeline, single)
        pipeline.zero_grad()
        assert pipeline.forward_backward(tokens, np.full_like(targets, -100)) == 0
        assert all(not p.grad.any() for p in pipeline.parameters())

    on_ranks(2, main)


def test_frozen_parameters_have_no_gradient():
    def main(world):
        single, model = Chain(4), Chain(4)
        for each in (single, model):
            for parameter in each.linears[0].parameters() + each.linears[2].parameters():
                parameter.requires_grad = False
        pipeline = Pipeline(model, DeviceMesh(world, dp=2, pp=2), make("zb-h1", 2, 3))
        batch = samples_of(6)
        single.loss(*batch).backward()
        pipeline.forward_backward(*(np.split(a, 2)[world.rank // 2] for a in batch))
        grads_equal(pipeline, single)
        assert model.linears[2 * (world.rank % 2)].weight.grad is None

    on_ranks(4, main)


def test_the_tied_embedding_is_bitwise_equal_on_its_ranks():
    for p in (1, 2, 4):
        on_ranks(p, check_tied, steps=5)


def test_state_of_dropout_and_samples_is_put_back():
    """Evaluation afterwards is that of a process of its own."""

    def main(world):
        pipeline = Pipeline(nn.GPT(TINY), DeviceMesh(world, pp=2), make("1f1b", 2, 2))
        pipeline.forward_backward(*tokens_of(3))
        assert minipar.context.current().samples is None

    on_ranks(2, main)


# --- PP1: micro-batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_pp1_any_number_of_micro_batches(name):
    def main(world):
        batch = samples_of(8)
        single = Chain(5)
        expected = single.loss(*batch)
        expected.backward()
        for m in (1, 2, 3, 4, 5, 8):
            pipeline = Pipeline(Chain(5), DeviceMesh(world, pp=4), make(name, 4, m))
            assert abs(pipeline.forward_backward(*batch) - expected.item()) < 1e-12
            assert pipeline.sizes == sorted(pipeline.sizes, reverse=True) and sum(pipeline.sizes) == 8
            assert m != 3 or pipeline.sizes == [3, 3, 2]
            grads_equal(pipeline, single)

    on_ranks(4, main)


@pytest.mark.parametrize(("samples", "targets"), [(2, 2), (8, 7), (0, 0)])
def test_pp1_what_cannot_be_cut_is_refused(samples, targets):
    def main(world):
        pipeline = Pipeline(Chain(5), DeviceMesh(world, pp=4), make("1f1b", 4, 4))
        pipeline.forward_backward(samples_of(samples)[0], samples_of(targets)[1])

    text = f"{samples} samples with {targets} targets cannot be cut into 4 micro-batches"
    with pytest.raises(ValueError, match=text) as caught:
        on_ranks(4, main)
    assert isinstance(caught.value, ShapeError)


# --- PP2: layers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "p", "cuts", "sizes"),
    [
        (10, 3, None, [4, 3, 3]),
        (30, 4, None, [7, 7, 8, 8]),
        (3, 3, None, [1, 1, 1]),
        (10, 3, [2, 5], [2, 3, 5]),
    ],
)
def test_pp2_every_layer_is_on_one_stage(layers, p, cuts, sizes):
    def main(world):
        single, batch = Chain(layers), samples_of(6)
        pipeline = Pipeline(Chain(layers), DeviceMesh(world, pp=p), make("1f1b", p, 3), cuts=cuts)
        assert list(itertools.chain(*pipeline.split)) == list(range(layers))
        expected = single.loss(*batch)
        assert abs(pipeline.forward_backward(*batch) - expected.item()) < 1e-12
        return [len(part) for part in pipeline.split], [name for name, _ in pipeline.named_parameters()]

    results = on_ranks(p, main)
    assert sorted(results[0][0]) == sorted(sizes) and (cuts is None or results[0][0] == sizes)
    names = Counter(name for _, names in results for name in names)
    assert names == Counter(name for name, _ in Chain(layers).named_parameters())


def test_pp2_fewer_layers_than_stages():
    def main(world, **options):
        Pipeline(Chain(3), DeviceMesh(world, pp=4), make("1f1b", 4, 4), **options)

    with pytest.raises(ShapeError, match="3 layers cannot be cut into 4 stages"):
        on_ranks(4, main)
    for cuts in ([1, 2, 3], [1, 1, 2], [1], [2, 1, 3], [0, 1, 2]):
        with pytest.raises(ShapeError, match=r"cuts \[.*\] do not make 4 stages of 3 layers"):
            on_ranks(4, main, cuts=cuts)


def test_balance_by_hand():
    assert [b - a for a, b in itertools.pairwise([0, *balance([1] * 10, 3)])] in ([4, 3, 3], [3, 4, 3], [3, 3, 4])
    assert sorted(b - a for a, b in itertools.pairwise([0, *balance([1] * 30, 4)])) == [7, 7, 8, 8]
    assert balance([0.0, 0.0, 0.0], 3) == [1, 2, 3] and balance([5], 1) == [1]
    for costs, stages in (([1] * 3, 4), ([], 1), ([1], 0)):
        with pytest.raises(ShapeError, match=f"{len(costs)} layers cannot be cut into {stages} stages"):
            balance(costs, stages)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_balance_is_the_best_there_is(costs, data):
    """All cuts compared: the least maximum, and of those the least sum of squares."""
    stages = data.draw(st.integers(1, len(costs)))

    def sums(ends):
        return [sum(costs[a:b]) for a, b in itertools.pairwise([0, *ends])]

    def badness(ends):
        return max(sums(ends)), sum(cost * cost for cost in sums(ends))

    ends = balance(costs, stages)
    assert len(ends) == stages and ends[-1] == len(costs) and all(a < b for a, b in itertools.pairwise([0, *ends]))
    choices = itertools.combinations(range(1, len(costs)), stages - 1)
    assert badness(ends) == min(badness([*inner, len(costs)]) for inner in choices)


# --- PP3: sizes of messages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "p", "m", "nbytes"),
    [
        ("1f1b", 2, 8, 1 << 10),
        ("interleaved", 2, 8, 1 << 10),  # the next rank is the previous one
        ("interleaved", 2, 6, (64 << 10) + 4),
        ("interleaved", 4, 6, (64 << 10) + 4),  # no multiple of the ranks
        ("gpipe", 3, 8, 200_000),
        ("1f1b", 4, 8, 1 << 20),
        ("zb-v", 3, 8, 1 << 20),
        ("dualpipe-v", 2, 8, 1 << 20),
        ("1f1b", 2, 8, 16 << 20),
        ("interleaved", 2, 4, 16 << 20),
    ],
)
def test_pp3_messages_of_any_size(name, p, m, nbytes):
    on_ranks(p, check_size, name, nbytes, m)


def test_pp3_more_stages_than_tags():
    """Two ranks send one another messages for 34 stages, in both directions."""

    def main(world):
        single, model, batch = Chain(34), Chain(34), samples_of(5)
        pipeline = Pipeline(model, DeviceMesh(world, pp=2), make("interleaved", 2, 5, 17))
        single.loss(*batch).backward()
        pipeline.forward_backward(*batch)
        grads_equal(pipeline, single)

    on_ranks(2, main)


# --- PP6: layouts ----------------------------------------------------------------------------------------------------


def train(world, dp, pp, m, name, batch, steps=5):
    """[loss of each step], and what the weights are then."""
    mesh = DeviceMesh(world, dp=dp, pp=pp)
    pipeline = Pipeline(nn.GPT(TINY), mesh, make(name, pp, m))
    optimizer = SGD(pipeline.parameters(), lr=0.2, momentum=0.5)
    losses = []
    for _ in range(steps):
        pipeline.zero_grad()
        losses.append(pipeline.forward_backward(*(np.split(a, dp)[mesh.coordinates["dp"]] for a in batch)))
        optimizer.step()
    return losses, pipeline


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_pp6_every_layout_has_the_same_loss_curve(dp, pp):
    batch, single = tokens_of(8), nn.GPT(TINY)
    optimizer, expected = SGD(single.parameters(), lr=0.2, momentum=0.5), []
    for _ in range(5):
        single.zero_grad()
        loss = single.loss(*batch)
        loss.backward()
        expected.append(loss.item())
        optimizer.step()
    assert expected[-1] < expected[0] - 0.01
    for m, name in zip((1, 2, 4, 8 // dp), ("1f1b", "gpipe", "zb-h1", "1f1b"), strict=True):
        results = on_ranks(dp * pp, train, dp, pp, m, name, batch)
        assert all(losses == results[0][0] for losses, _ in results)  # rank 0 knows the loss too, bit for bit
        assert relative_error(np.array(results[0][0]), np.array(expected)) < 1e-10
        for _, pipeline in results:
            weights_equal(pipeline, single)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved"])
def test_pp6_each_gradient_is_added_up_once_a_step(monkeypatch, name):
    """Numbers that cross dp: one for each parameter of the rank, and the loss; however many micro-batches there are."""
    calls = []

    def counted(x, comm, *args, operation, **kwargs):
        calls.append((threading_rank(), comm.size, operation.split()[-1], x.size))
        return original(x, comm, *args, operation=operation, **kwargs)

    def threading_rank():
        return minipar.context.current().world.rank

    original = executor.all_reduce
    monkeypatch.setattr(executor, "all_reduce", counted)

    def main(world):
        mesh = DeviceMesh(world, dp=3, pp=2)
        config = nn.GPTConfig(**{**vars(TINY), "layers": 5})
        pipeline = Pipeline(nn.GPT(config), mesh, schedule_of(name, 2, 5))
        pipeline.forward_backward(*tokens_of(5, config, world.rank // 2))
        return sum(p.size for p in pipeline.parameters())

    sizes = on_ranks(6, main)
    elements = sum(size for _, group, operation, size in calls if group == 3 and operation != "loss")
    assert elements == sum(sizes)
    assert max(Counter(call for call in calls if "wte" not in call[2]).values()) == 1


# --- PP8: labels -----------------------------------------------------------------------------------------------------


class Identity(nn.Module):
    """Returns what comes in; the loss says how far labels are from it, and nothing may be wrong."""

    def __init__(self, stages):
        self.stages = stages

    def layers(self):
        inner = [nn.Layer(lambda x: Tensor(x) if isinstance(x, np.ndarray) else x, (), 1.0)] * (self.stages - 1)
        return [*inner, nn.Layer(self.final, (), 1.0)]

    def final(self, x, targets):
        x = Tensor(x) if isinstance(x, np.ndarray) else x
        assert x.shape == targets.shape and (x.data == targets).all()
        return ((x - targets) ** 2).mean()


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_pp8_labels_travel_with_their_micro_batch(name):
    def main(world):
        p = world.size
        schedule = schedule_of(name, p, 2 * p)
        mesh = DeviceMesh(world, pp=p)
        pipeline = Pipeline(Identity(schedule.stages), mesh, schedule)
        first = world.rank == schedule.rank_of[0]
        for samples in (2 * p, 5 * p):
            order = np.random.default_rng().permutation(samples if first else 3).astype(np.float64)  # no seed
            assert pipeline.forward_backward(order, order.copy()) == 0.0
        assert pipeline.forward_backward(*((order, order) if first else ())) == 0.0  # others need not read at all

    for p in (1, 3):
        on_ranks(p, main)


def test_pp8_stages_may_take_micro_batches_in_other_orders():
    """The last stage does not do them in the order in which the first one does."""
    schedule = Schedule("late", [["0F0", "0F1", "0B1", "0B0"], ["1F1", "1F0", "1B1", "1B0"]])
    validate(schedule)

    def main(world):
        single, pipeline, batch = Chain(2), Pipeline(Chain(2), DeviceMesh(world, pp=2), schedule), samples_of(3)
        expected = single.loss(*batch)
        expected.backward()
        assert abs(pipeline.forward_backward(*batch) - expected.item()) < 1e-12
        grads_equal(pipeline, single)

    on_ranks(2, main)


# --- schedules that nobody has validated ------------------------------------------------------------------------------


def test_a_deadlock_is_explained():
    texts = {}

    def main(world):
        try:
            program.deadlock(world)
        except DeadlockError as error:
            texts[world.rank] = str(error)
            raise

    with pytest.raises(DeadlockError, match=r"rank 0 waits in recv \(0B0.* rank 1 waits in recv \(1F1"):
        minipar.run(main, 2, timeout=10)
    assert "0B0 waits for the gradient of micro-batch 0 from stage 1 (1B0 on rank 1), which has not run." in texts[0]
    assert "1F1 waits for the activations of micro-batch 1 from stage 0 (0F1 on rank 0), which" in texts[1]


def test_check_refuses_what_would_not_end():
    def main(world):
        Pipeline(Chain(2), DeviceMesh(world, pp=2), Schedule("circle", program.CIRCLE))

    with pytest.raises(ScheduleError, match=r"rank 0: 0B0 waits for the gradient .*rank 1: 1F1 waits for the activ"):
        on_ranks(2, main)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([["0B0", "0F0"], ["1F0", "1B0"]], "rank 0: 0B0 waits for the activations of micro-batch 0 from stage 0"),
        ([["0F0", "0B0"], ["1B0", "1F0"]], "rank 1: 1B0 waits for the activations of micro-batch 0 from stage 1"),
        ([["0F0", "0W0", "0I0"], ["1F0", "1I0", "1W0"]], "rank 0: 0W0 waits for the gradient of micro-batch 0 from"),
        (
            [["0F0", "0F1", "0B0", "0REDUCE_GRAD", "0B1"], ["1F0", "1B0", "1F1", "1B1", "1REDUCE_GRAD"]],
            "rank 0: 0REDUCE_GRAD waits for the gradient of micro-batch 1 from stage 0",
        ),
    ],
)
def test_a_wrong_order_on_one_rank_is_found_while_it_runs(ranks, text):
    def main(world):
        pipeline = Pipeline(Chain(2), DeviceMesh(world, pp=2), Schedule("wrong", ranks), check=False)
        pipeline.forward_backward(*samples_of(2))

    with pytest.raises(ScheduleError, match=text):
        on_ranks(2, main)


def test_the_schedule_is_for_as_many_ranks_as_the_mesh_has():
    def main(world):
        Pipeline(Chain(4), DeviceMesh(world, pp=2), make("1f1b", 3, 4))

    with pytest.raises(ShapeError, match="the schedule is for 3 ranks, the mesh has pp=2"):
        on_ranks(2, main)


# --- PipeDream -------------------------------------------------------------------------------------------------------


def delayed(model, split, batch, m, make_optimizer, steps):
    """One process that does as PipeDream: stage i of p takes weights of p - 1 - i updates ago for micro-batch k."""
    p, losses = len(split), []
    stages = [[q for i in part for q in model.linears[i].parameters()] for part in split]
    optimizers = [make_optimizer(parameters) for parameters in stages]
    for _ in range(steps):
        versions = [[copy.deepcopy([q.data for q in parameters])] for parameters in stages]  # since the step began
        total = 0.0
        for k, (x, targets) in enumerate(zip(*(np.array_split(a, m) for a in batch), strict=True)):
            for i, parameters in enumerate(stages):
                put(parameters, versions[i][max(0, k - (p - 1 - i))])
            model.zero_grad()
            loss = model.loss(x, targets)
            loss.backward()
            total += loss.item() * len(targets) / len(batch[1])
            for parameters, history, optimizer in zip(stages, versions, optimizers, strict=True):
                put(parameters, history[-1])
                optimizer.step()
                history.append(copy.deepcopy([q.data for q in parameters]))
        losses.append(total)
    return losses


def put(parameters, arrays):
    for parameter, array in zip(parameters, arrays, strict=True):
        parameter.data[...] = array
        parameter.changed()


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 5), (3, 2), (4, 9)])
def test_pipedream_is_training_with_delayed_weights(p, m):
    """Bitwise nothing like one process, but a known computation: its weights are p - 1 - i updates old."""

    def optimizer(parameters):
        return SGD(parameters, lr=0.1, momentum=0.9)

    def main(world):
        model = Chain(p + 1)
        pipeline = Pipeline(model, DeviceMesh(world, pp=p), make("pipedream", p, m), optimizer=optimizer)
        losses = [pipeline.forward_backward(*samples_of(m + 1)) for _ in range(3)]
        return losses, pipeline

    results, single = on_ranks(p, main), Chain(p + 1)
    expected = delayed(single, results[0][1].split, samples_of(m + 1), m, optimizer, 3)
    for losses, pipeline in results:
        assert relative_error(np.array(losses), np.array(expected)) < 1e-10
        weights_equal(pipeline, single)
        assert pipeline.peak == {stage: min(m, p - stage) for stage in pipeline.mine}


def test_pipedream_says_what_it_needs():
    def main(world, model, **options):
        dp = options.pop("dp", 1)
        Pipeline(model(), DeviceMesh(world, dp=dp, pp=2), make("pipedream", 2, 4), **options)

    def sgd(parameters):
        return SGD(parameters, lr=0.1)

    with pytest.raises(ShapeError, match="PipeDream updates weights within a step: it needs an optimizer"):
        on_ranks(2, main, lambda: Chain(3))
    with pytest.raises(ShapeError, match=r"one stage alone \(not so: wte\.weight\)"):
        on_ranks(2, main, lambda: nn.GPT(TINY), optimizer=sgd)
    with pytest.raises(ShapeError, match=r"dp=1 \(here 2\)"):
        on_ranks(4, main, lambda: Chain(3), optimizer=sgd, dp=2)


def test_measured_costs_cut_all_ranks_alike():
    config = nn.GPTConfig(vocab_size=2000, context=16, width=32, layers=4, heads=2, dtype="float64")
    x = np.zeros((4, 16), np.int64)

    def main(world):
        costs = measure(nn.GPT(config), x, x, world)
        pipeline = Pipeline(nn.GPT(config), DeviceMesh(world, pp=2), make("1f1b", 2, 4), costs=costs)
        return costs, pipeline.split, pipeline.forward_backward(x, x)

    (costs, split, loss), other = minipar.run(main, 2)
    assert other == (costs, split, loss) and len(costs) == 6 and min(costs) > 0
    assert loss == pytest.approx(float(nn.GPT(config).loss(x, x).data), rel=1e-10)
    uneven = Pipeline(nn.GPT(config), DeviceMesh(None), make("interleaved", 1, 1, 2), costs=[1, 1, 1, 1, 1, 9])
    assert uneven.split == [range(5), range(5, 6)]
    with pytest.raises(ShapeError, match="3 costs do not fit 6 layers"):
        Pipeline(nn.GPT(config), DeviceMesh(None), make("gpipe", 1, 1), costs=[1, 1, 1])
