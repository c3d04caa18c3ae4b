"""Data parallelism and ZeRO against one process: functions that every rank calls, on threads or as a program on MPI."""

import os
import warnings
from functools import partial
from itertools import pairwise

import numpy as np

import minipar
from minipar import nn
from minipar.autograd import Tensor, no_grad
from minipar.collectives import all_gather
from minipar.context import current
from minipar.optim import SGD, AdamW
from minipar.parallel import (
    DataParallel,
    DeviceMesh,
    ZeRO,
    clip_grad_norm,
    equivalent,
    full_state,
    joined,
    load_full_state,
    replicas_equal,
    tensor_parallel,
)
from minipar.parallel.shard import whole
from minipar.parallel.verify import relative_error

IGNORED = -100
MODES = ("ddp", 0, 1, 2, 3)  # DataParallel, and the stages of ZeRO
TINY = nn.GPTConfig(vocab_size=11, context=5, width=12, layers=3, heads=3, dtype="float64")


def wrap(mode, model, mesh, **options):
    if mode == "ddp":
        return DataParallel(model, mesh, **{"bucket_bytes": 2000, **options})
    return ZeRO(model, mesh, mode, **options)


def tokens_of(samples, config=TINY, seed=0):
    """(tokens, targets) with an ignored label here and there."""
    drawn = np.random.default_rng(seed).integers(config.vocab_size, size=(samples, config.context + 1))
    tokens, targets = drawn[:, :-1], drawn[:, 1:].copy()
    targets[::3, 1:] = IGNORED
    return tokens, targets


def cut(arrays, sizes, rank):
    """Rank's samples, `sizes` of them each."""
    first = sum(sizes[:rank])
    return tuple(a[first : first + sizes[rank]] for a in arrays)


def uneven(ranks, seed):
    """Samples of each rank: 0 for some, 2 in the mean."""
    return [
        int(n) for n in np.random.default_rng(seed).permutation([2 + (-1) ** i * (i // 2 % 3) for i in range(ranks)])
    ]


def close(actual, expected, tolerance=1e-10):
    assert relative_error(actual, expected) <= tolerance, (relative_error(actual, expected), actual, expected)


class Layers(nn.Module):
    """Linear layers one after another, with a mean of squares as the loss; weights from `seed`."""

    def __init__(self, widths, seed=0, bias=True):
        drawn = np.random.default_rng(seed)
        self.layers = [nn.Linear(a, b, bias=bias, dtype="float64") for a, b in pairwise(widths)]
        for p in self.parameters():
            p.data[...] = drawn.standard_normal(p.shape) / 2

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, x, targets):
        """Mean over samples; a sample whose target is below -99 does not count."""
        labelled = targets > -100
        wanted = np.where(labelled, targets, 0.0)[:, None] * labelled[:, None]
        error = (self(x) - wanted) * labelled[:, None]
        return (error * error).sum() * (1 / max(1, int(labelled.sum())))


def check_gpt(world):
    """Ranks with different numbers of samples, ignored labels, dropout, tied weights."""
    for mode in MODES:
        for seed, dropout, layers in ((0, 0.0, 3), (1, 0.3, 2), (2, 0.3, 0), (3, 0.0, 1)):
            config = nn.GPTConfig(**{**vars(TINY), "dropout": dropout, "layers": layers})
            sizes = uneven(world.size, seed)
            batch = tokens_of(sum(sizes), config, seed)
            model = wrap(mode, nn.GPT(config), DeviceMesh(world))
            result = equivalent(nn.GPT(config), model, batch, world, part=cut(batch, sizes, world.rank))
            assert result.within(1e-10, 1e-10) and result.parameter_relative_error < 1e-10, (mode, seed, result)


def check_float32(world):
    config = nn.GPTConfig(context=16, width=48, layers=2, heads=4)
    sizes = uneven(world.size, 1)
    batch = tokens_of(sum(sizes), config)
    for mode in MODES:
        model = wrap(mode, nn.GPT(config), DeviceMesh(world))
        result = equivalent(nn.GPT(config), model, batch, world, part=cut(batch, sizes, world.rank))
        # Sums over other groups of samples are rounded elsewhere: gradients differ by some units of 6e-8.
        # What a bias has become after three steps is nothing but gradients.
        assert result.within(1e-6, 3e-6) and result.parameter_relative_error < 3e-6, (mode, result)


def check_accumulation(world):
    """Micro-batches under no_sync, uneven, with one that nobody has labels in: as all of them in one batch."""
    config = nn.GPTConfig(**{**vars(TINY), "dropout": 0.2})
    parts, table = [], [uneven(world.size, 5), [0] * world.size, uneven(world.size, 6)]
    everything = tokens_of(sum(map(sum, table)), config)
    everything[1][: sum(table[0])][:1] = IGNORED
    first = 0
    for sizes in table:
        whole = cut(everything, [first, sum(sizes)], 1)
        parts.append(cut(whole, sizes, world.rank))
        first += sum(sizes)
    single = nn.GPT(config)
    single.loss(*everything).backward()
    norm = np.sqrt(sum(float((p.grad**2).sum()) for p in single.parameters()))
    for mode in MODES:
        model = wrap(mode, nn.GPT(config), DeviceMesh(world))
        for _ in range(2):  # and again from the start
            model.zero_grad()
            with model.no_sync():
                for part in parts[:-1]:
                    model.loss(*part).backward()
            model.loss(*parts[-1]).backward()
            grads_equal(model, single)
        close(np.array(clip_grad_norm(model.parameters(), norm / 2)), np.array(norm))
        grads_equal(model, single, 1 / (2 + 2e-6 / norm))
        # A second exchange is added to what the first has left.
        model.loss(*parts[0]).backward()
        alone = nn.GPT(config)
        alone.loss(*cut(everything, [sum(table[0])], 0)).backward()
        for (_, p), q in zip(alone.named_parameters(), single.parameters(), strict=True):
            p.grad = p.grad + q.grad / (2 + 2e-6 / norm)
        grads_equal(model, alone)


def grads_equal(model, single, factor=1.0):
    expected = dict(single.named_parameters())
    largest = max(abs(p.grad).max(initial=0) for p in expected.values() if p.grad is not None)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(names) == sorted(expected)
    for name, p in model.named_parameters():
        grad, wanted = whole(p, p.grad), expected[name].grad
        error = relative_error(grad, wanted if wanted is None else wanted * factor, largest / 1000)
        assert error < 1e-10, (name, error)


def check_sizes(world):
    """ZF1: any number of elements on any number of ranks, three steps of Adam, a clipped norm, whole states."""
    for widths in ((7, 5, 2), (18, 1), (9, 1), (3, 1), (1, 1), (2, 2, 1, 2)):
        for bias in (True, False):
            x = np.random.default_rng(0).standard_normal((2 * world.size + 1, widths[0]))
            y = np.random.default_rng(1).standard_normal(len(x))
            sizes = [2] * (world.size - 1) + [3]
            for mode in MODES:
                train_alike(world, mode, partial(Layers, widths, bias=bias), (x, y), cut((x, y), sizes, world.rank))


def train_alike(world, mode, make, batch, part, steps=3, optimizer=AdamW):
    """Train both ways; parameters, norms and optimizer states must come out equal. Returns the parallel model."""
    models = [make(), wrap(mode, make(), DeviceMesh(world))]
    optimizers = [optimizer(m.parameters(), lr=0.1, weight_decay=0.1) for m in models]
    for _ in range(steps):
        norms = []
        for model, samples, each in zip(models, (batch, part), optimizers, strict=True):
            model.zero_grad()
            model.loss(*samples).backward()
            norms.append(clip_grad_norm(model.parameters(), 0.5))
            each.step()
        close(np.array(norms[1]), np.array(norms[0]), 1e-9)
    states = [full_state(m, o) for m, o in zip(models, optimizers, strict=True)]
    same_state(*states)
    return models[1]


def same_state(expected, state, tolerance=1e-8):
    assert expected["steps"] == state["steps"] and expected["optimizer"].keys() == state["optimizer"].keys()
    for a, b in [(expected["parameters"], state["parameters"])] + [
        (expected["optimizer"][kind], state["optimizer"][kind]) for kind in expected["optimizer"]
    ]:
        assert a.keys() == b.keys(), (sorted(a), sorted(b))
        for name in a:
            assert a[name].shape == b[name].shape, name
            close(b[name], a[name], tolerance)


def check_memory_is_shared_out(world):
    """ZF1: what a rank holds is a share of all, whatever the sizes."""
    for widths, elements in (((18, 1), 18), ((3, 1), 3), ((10, 1), 10), ((19, 3), 57)):
        for stage in (1, 2, 3):
            model = ZeRO(Layers(widths, bias=False), DeviceMesh(world), stage)
            own = sum(p.size for p in model.parameters())
            share = -(-elements // world.size)
            assert own == max(0, min(share, elements - world.rank * share)), (widths, stage, own)


def check_frozen(world):
    """ZF3: what is frozen stays, bit for bit, and has no state; unfrozen after two steps it trains as elsewhere."""
    x = np.random.default_rng(0).standard_normal((2 * world.size, 4))
    y = np.random.default_rng(1).standard_normal(len(x))
    sizes = [2] * world.size
    for mode in MODES:
        for frozen in (("layers.1.weight", "layers.1.bias"), ("layers.1.bias",), ("layers.0.weight", "layers.2.bias")):
            models = [Layers((4, 5, 3, 1)), Layers((4, 5, 3, 1))]
            before = dict(models[0].named_parameters())
            before = {name: before[name].data.copy() for name in frozen}
            thaw = [dict(m.named_parameters()) for m in models]
            for named in thaw:
                for name in frozen:
                    named[name].requires_grad = False
            models[1] = wrap(mode, models[1], DeviceMesh(world))
            optimizers = [AdamW(m.parameters(), lr=0.05, weight_decay=0.1) for m in models]
            for step in range(5):
                if step == 2:
                    state = full_state(models[1], optimizers[1])
                    for name in frozen:
                        assert state["parameters"][name].tobytes() == before[name].tobytes()
                        assert all(name not in arrays for arrays in state["optimizer"].values())
                    for named in thaw:
                        for name in frozen:
                            named[name].requires_grad = True
                for model, samples, each in zip(
                    models, ((x, y), cut((x, y), sizes, world.rank)), optimizers, strict=True
                ):
                    model.zero_grad()
                    model.loss(*samples).backward()
                    each.step()
                same_state(*(full_state(m, o) for m, o in zip(models, optimizers, strict=True)))


class Branches(nn.Module):
    """Three branches of which each sample set uses those it is told to."""

    def __init__(self):
        self.a, self.b, self.c = Layers((3, 2, 1), 1), Layers((3, 1), 2), Layers((3, 1), 3)
        self.trunk = Layers((3, 3), 4)

    def loss(self, x, targets, use):
        h = self.trunk(x)
        return sum(((getattr(self, branch)(h)) ** 2).sum() for branch in use) * (1 / max(1, len(x)))


def wrap_branches(mode, world):
    """Only what every forward pass uses can be a unit."""
    model = Branches()
    return wrap(mode, model, DeviceMesh(world), **({} if mode == "ddp" else {"units": model.trunk.layers}))


def check_branches(world):
    """DP6: rank r uses branch a or b, nobody uses c; with momentum and weight decay, as one process that does both."""
    x = np.random.default_rng(0).standard_normal((3 * world.size, 3))
    for mode in MODES:
        models = [Branches(), wrap_branches(mode, world)]
        optimizers = [SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1) for m in models]
        before = {name: p.data.copy() for name, p in models[0].c.named_parameters()}
        for step in range(3):
            for model in models:
                model.zero_grad()
            losses = []
            for r in range(world.size):
                losses.append(models[0].loss(x[3 * r : 3 * r + 3], None, "ab"[(r + step) % 2]))
            loss = sum(losses[1:], losses[0]) * (1 / world.size)
            loss.backward()
            mine = x[3 * world.rank : 3 * world.rank + 3]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                use, model = "ab"[(world.rank + step) % 2], models[1]
                ours = model.average(lambda: model.model.loss(mine, None, use), 3, 3)  # noqa: B023
                ours.backward()
            close(ours.data, loss.data)
            unused = ["c", "b" if step % 2 == 0 else "a"] if world.size == 1 else ["c"]
            assert {name[0] for name in models[1].unused} == set(unused), models[1].unused
            grads_equal(models[1], models[0])
            for each in optimizers:
                each.step()
            same_state(*(full_state(m, o) for m, o in zip(models, optimizers, strict=True)))
            assert replicas_equal(models[1], world)
        state = full_state(models[1])["parameters"]
        for name, value in before.items():
            assert state[f"c.{name}"].tobytes() == value.tobytes()


def check_branch_in_one_micro_batch(world):
    """DP6: a branch that only the first of two micro-batches uses."""
    x = np.random.default_rng(0).standard_normal((2, world.size, 3))
    for mode in MODES:
        single, model = Branches(), wrap_branches(mode, world)
        losses = [single.loss(x[m], None, "ab"[m]) for m in range(2)]
        ((losses[0] + losses[1]) * 0.5).backward()
        parts = x[:, world.rank : world.rank + 1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with model.no_sync():
                model.average(lambda: model.model.loss(parts[0], None, "a"), 1, 1).backward()  # noqa: B023
            model.average(lambda: model.model.loss(parts[1], None, "b"), 1, 1).backward()  # noqa: B023
        grads_equal(model, single)


class Running(nn.Module):
    """A layer with a running mean, as batch normalisation has."""

    def __init__(self):
        self.layer = Layers((3, 2, 1))
        self.mean = nn.Buffer(np.zeros(3))
        self.steps = nn.Buffer(np.zeros((), np.int64))

    def loss(self, x, targets):
        self.mean.data[...] = 0.9 * self.mean.data + 0.1 * (x.mean(axis=0) if len(x) else 0)
        self.steps.data[...] += 1
        return self.layer.loss(x, targets)


def check_buffers(world):
    """DP7: running means stay equal between ranks, and are the mean of what the ranks have seen."""
    for mode in MODES:
        model, expected = wrap(mode, Running(), DeviceMesh(world)), np.zeros(3)
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x = np.random.default_rng(step).standard_normal((world.size, 4, 3))
            model.zero_grad()
            model.loss(x[world.rank], np.zeros(4)).backward()
            optimizer.step()
            expected = 0.9 * expected + 0.1 * x.mean(axis=(0, 1))
        buffers = dict(model.named_buffers())
        close(buffers["mean"].data, expected, 1e-12)
        assert buffers["steps"].data == 3
        rows = all_gather(buffers["mean"].data[None], world)
        assert (rows == rows[0]).all()


def check_ignored_and_empty(world):
    """DP7: the last rank's labels are all ignored; then all ranks'; then its batch is empty; then all are."""
    tokens, targets = tokens_of(2 * world.size)
    for mode in MODES:
        for who in ("last", "all"):
            for what in ("ignored", "empty"):
                t, y = tokens.copy(), targets.copy()
                rows = slice(2 * world.size - 2, None) if who == "last" else slice(None)
                y[rows] = IGNORED
                part = cut((t, y), [2] * world.size, world.rank)
                if what == "empty" and (who == "all" or world.rank == world.size - 1):
                    part = tuple(a[:0] for a in part)
                single, model = nn.GPT(TINY), wrap(mode, nn.GPT(TINY), DeviceMesh(world))
                expected = single.loss(t, y)
                expected.backward()
                loss = model.loss(*part)
                loss.backward()
                close(loss.data, expected.data)
                assert np.isfinite(loss.data) and (who == "last" or world.size > 1 or not loss.data.any())
                for _, p in single.named_parameters():
                    p.grad = np.zeros(p.shape) if p.grad is None else p.grad
                for _, p in model.named_parameters():
                    p.grad = np.zeros(p.shape) if p.grad is None else p.grad
                if who == "last" and world.size > 1:
                    grads_equal(model, single)
                else:
                    assert all(not p.grad.any() for p in model.parameters())


def check_joined(world):
    """DP1: ranks with 5, 2, 0, ... batches all do as many steps, and end as one process with the same samples."""
    counts = [(5, 2, 0, 3)[r % 4] for r in range(world.size)]
    x = np.random.default_rng(0).standard_normal((sum(counts), 2, 4))
    y = np.random.default_rng(1).standard_normal((sum(counts), 2))
    own = list(zip(*cut((x, y), counts, world.rank), strict=True))
    for mode in MODES:
        single, model = Layers((4, 3, 1)), wrap(mode, Layers((4, 3, 1)), DeviceMesh(world))
        optimizers = [SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (single, model)]
        steps = 0
        for part in joined(own, world, (x[0][:0], y[0][:0])):
            model.zero_grad()
            model.loss(*part).backward()
            optimizers[1].step()
            rows = [sum(counts[:r]) + steps for r in range(world.size) if steps < counts[r]]
            single.zero_grad()
            single.loss(x[rows].reshape(-1, 4), y[rows].reshape(-1)).backward()
            optimizers[0].step()
            steps += 1
        assert steps == max(counts)
        expected, state = full_state(single)["parameters"], full_state(model)["parameters"]
        for name in expected:
            close(state[name], expected[name])


def check_start(world):
    """DP4: whatever weights and buffers a rank starts from, it goes on with rank 0's; dropout draws differ."""
    for mode in MODES:
        model = Running()
        for tensor in [*model.parameters(), *(b for _, b in model.named_buffers())]:
            tensor.data[...] = np.random.default_rng(1000 + world.rank).standard_normal(tensor.shape) * 9
        wrapped = wrap(mode, model, DeviceMesh(world))
        expected = Running()
        for name, tensor in [*expected.named_parameters(), *expected.named_buffers()]:
            tensor.data[...] = np.random.default_rng(1000).standard_normal(tensor.shape) * 9
            found = full_state(wrapped)["parameters"][name]
            assert found.tobytes() == tensor.data.tobytes(), (mode, name)
    current().seed = 7  # one seed for all: masks differ between ranks, and are the same when drawn again
    drop = nn.Dropout(0.5)
    drop.name = "drop"
    wrapped = DataParallel(Dropping(drop), DeviceMesh(world))
    masks = [wrapped(Tensor(np.ones((1, 64)))).data for _ in range(2)]
    assert masks[0].tobytes() == masks[1].tobytes()
    rows = all_gather(masks[0], world)
    assert len({row.tobytes() for row in rows}) == world.size


class Dropping(nn.Module):
    def __init__(self, drop):
        self.drop = drop
        self.weight = nn.Parameter(np.ones(1))

    def forward(self, x):
        return self.drop(x) * self.weight


def check_replicas(world):
    """Bitwise equal parameters on all ranks after 100 steps, in each mode; stage 3 keeps no replica to compare."""
    config = nn.GPTConfig(vocab_size=13, context=6, width=18, layers=1, heads=3, dropout=0.1)
    for mode in (*MODES[:-1], "half") if world.size <= 4 else ():
        if mode == "half":
            model = ZeRO(
                nn.GPT(nn.GPTConfig(**{**vars(config), "dtype": "float16"})),
                DeviceMesh(world),
                2,
                master_dtype="float32",
            )
        else:
            model = wrap(mode, nn.GPT(config), DeviceMesh(world))
        optimizer = AdamW(model.parameters(), lr=1e-3)
        sizes = uneven(world.size, 3)
        for step in range(100):
            current().step = step
            part = cut(tokens_of(sum(sizes), config, step), sizes, world.rank)
            model.zero_grad()
            model.loss(*part).backward()
            clip_grad_norm(model.parameters(), 1.0)
            optimizer.step()
        if mode != "ddp":
            model.publish()
        assert replicas_equal(model.model, world), mode
        assert all(np.isfinite(p.data).all() for p in model.parameters())


def check_data_and_tensor_parallel(world):
    """Both axes: the mean over dp of models that are cut along tp."""
    if world.size % 2:
        return
    sizes = uneven(world.size // 2, 1)
    config = nn.GPTConfig(**{**vars(TINY), "width": 8, "heads": 2, "dropout": 0.1})
    batch = tokens_of(sum(sizes), config)
    for mode in MODES:
        mesh = DeviceMesh(world, tp=2)
        model = wrap(mode, tensor_parallel(nn.GPT(config), mesh), mesh)
        part = cut(batch, sizes, mesh.coordinates["dp"])
        result = equivalent(nn.GPT(config), model, batch, world, part=part)
        assert result.within(1e-10, 1e-10), (mode, result)


def check_state(world):
    """ZF4: three steps, all state to one place and back into a new model, three more: as six steps in one process."""
    x = np.random.default_rng(0).standard_normal((2 * world.size, 18))
    y = np.random.default_rng(1).standard_normal(len(x))
    part = cut((x, y), [2] * world.size, world.rank)
    for mode in MODES:
        single = Layers((18, 3), bias=True)
        optimizer = AdamW(single.parameters(), lr=0.1)
        train(single, optimizer, (x, y), 6)
        first = wrap(mode, Layers((18, 3)), DeviceMesh(world))
        optimizers = [AdamW(first.parameters(), lr=0.1)]
        train(first, optimizers[0], part, 3)
        second = wrap(MODES[MODES.index(mode) - 1], Layers((18, 3), seed=5), DeviceMesh(world))
        optimizers.append(AdamW(second.parameters(), lr=0.1))
        load_full_state(second, full_state(first, optimizers[0]), optimizers[1])
        train(second, optimizers[1], part, 3)
        same_state(full_state(single, optimizer), full_state(second, optimizers[1]))


def train(model, optimizer, part, steps):
    for _ in range(steps):
        model.zero_grad()
        model.loss(*part).backward()
        optimizer.step()


def check_evaluation(world):
    """Inside no_grad the loss is that of all ranks at once, and forward is the model's own."""
    sizes = uneven(world.size, 2)
    batch = tokens_of(sum(sizes))
    single = nn.GPT(TINY)
    for mode in MODES:
        model = wrap(mode, nn.GPT(TINY), DeviceMesh(world))
        part = cut(batch, sizes, world.rank)
        with no_grad():
            close(model.loss(*part).data, single.loss(*batch).data)
            close(model(part[0]).data, single(part[0]).data)
        model.loss(*part).backward()  # and training goes on afterwards


CHECKS = [f for name, f in list(globals().items()) if name.startswith("check_")]

if __name__ == "__main__":

    def main(world):
        for check in CHECKS:
            check(world)
        os.write(1, b"ok\n")

    minipar.run(main)
