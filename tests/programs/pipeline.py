"""Pipelines against one process: functions that every rank calls, on threads or as a program on MPI."""

import os
import sys
from functools import partial

import numpy as np

import minipar
from minipar import nn
from minipar.autograd import Tensor
from minipar.collectives import all_gather
from minipar.context import current
from minipar.errors import CommunicationTimeout
from minipar.optim import SGD
from minipar.parallel import DeviceMesh, tensor_parallel
from minipar.parallel.pipeline import SCHEDULES, Pipeline, Schedule, make, validate
from minipar.parallel.shard import whole
from minipar.parallel.verify import relative_error

IGNORED = -100
SYNCHRONOUS = tuple(name for name in SCHEDULES if name != "pipedream")  # the same computation as one process
TINY = nn.GPTConfig(vocab_size=17, context=5, width=8, layers=2, heads=2, dtype="float64")


def schedule_of(name, p, m, v=2):
    return make(name, p, m, v if name == "interleaved" else None)


def tokens_of(samples, config=TINY, seed=0):
    """(tokens, targets) with an ignored label here and there."""
    drawn = np.random.default_rng(seed).integers(config.vocab_size, size=(samples, config.context + 1))
    tokens, targets = drawn[:, :-1], drawn[:, 1:].copy()
    targets[::3, 1:] = IGNORED
    return tokens, targets


class Chain(nn.Module):
    """Linear layers with tanh, each a Layer of its own; the loss is a mean of squares."""

    def __init__(self, layers, width=4, seed=0):
        drawn = np.random.default_rng(seed)
        self.linears = [nn.Linear(width, width, dtype="float64") for _ in range(layers)]
        for p in self.parameters():
            p.data[...] = drawn.standard_normal(p.shape) / 2

    def layers(self):
        *first, last = self.linears
        return [
            *(nn.Layer(partial(self.inner, linear), (linear,), 1.0) for linear in first),
            nn.Layer(self.final, (last,), 1.0),
        ]

    def inner(self, linear, x):
        return linear(x).tanh()

    def final(self, x, targets):
        error = self.linears[-1](x).mean(axis=1) - targets
        return (error * error).mean()

    def loss(self, x, targets):
        for linear in self.linears[:-1]:
            x = self.inner(linear, x)
        return self.final(x, targets)


def samples_of(samples, width=4, seed=0):
    drawn = np.random.default_rng(seed)
    return drawn.standard_normal((samples, width)), drawn.standard_normal(samples)


def grads_equal(model, single, tolerance=1e-10):
    """Gradients of this rank's parameters; one counts as no smaller than a thousandth of the largest."""
    expected = dict(single.named_parameters())
    largest = max(abs(p.grad).max(initial=0) for p in expected.values() if p.grad is not None)
    for name, p in model.named_parameters():
        error = relative_error(whole(p, p.grad), expected[name].grad, largest / 1000)
        assert error <= tolerance, (name, error)


def weights_equal(model, single, tolerance=1e-10):
    expected = dict(single.named_parameters())
    for name, p in model.named_parameters():
        error = relative_error(whole(p, p.data), expected[name].data)
        assert error <= tolerance, (name, error)


def all_there(model, single, world):
    """Every parameter of the whole model is on some rank."""
    names = [name for name, _ in single.named_parameters()]
    mine = {name for name, _ in model.named_parameters()}
    table = all_gather(np.array([[name in mine for name in names]]), world, sizes=[1] * world.size)
    assert table.any(axis=0).all(), names


def check_equal(
    world, name, m, dp=1, tp=1, v=2, extra=1, recompute=False, tolerances=(1e-10, 1e-10), schedule=None, **config
):
    """Two steps, of m + extra samples and then of m, as one process: losses, gradients, weights, activations held."""
    p = world.size // (dp * tp)
    schedule = schedule or schedule_of(name, p, m, v)
    layers = max(0, schedule.stages - 1)  # one layer more than stages
    config = nn.GPTConfig(**{**vars(TINY), "layers": layers, "dropout": 0.1, **config})
    mesh = DeviceMesh(world, dp=dp, pp=p, tp=tp)
    single, model = nn.GPT(config), nn.GPT(config)
    pipeline = Pipeline(tensor_parallel(model, mesh) if tp > 1 else model, mesh, schedule, recompute=recompute)
    all_there(pipeline, single, world)
    optimizers = [SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (single, pipeline)]
    for step in range(2):
        current().step = step
        sizes = [m + (extra if step == 0 else 0) + d for d in range(dp)]  # data-parallel ranks need not be alike
        batch = tokens_of(sum(sizes), config, step)
        first = sum(sizes[: mesh.coordinates["dp"]])
        part = [a[first : first + sizes[mesh.coordinates["dp"]]] for a in batch]
        single.zero_grad()
        pipeline.zero_grad()
        expected = single.loss(*batch)
        expected.backward()
        loss = pipeline.forward_backward(*part)
        assert relative_error(np.array(loss), expected.data) <= tolerances[0], (name, p, m, loss, expected.data)
        grads_equal(pipeline, single, tolerances[1])
        peaks = validate(schedule)
        assert pipeline.peak == {stage: peaks[stage] for stage in pipeline.mine}
        for optimizer in optimizers:
            optimizer.step()
    weights_equal(pipeline, single, max(tolerances))
    return pipeline


class Wide(nn.Module):
    """Activations of any size, but few parameters: samples are numbers, spread over `width` columns, and scaled."""

    def __init__(self, layers, width):
        self.ramp = np.linspace(0.5, 1.5, width, dtype=np.float32)
        self.scales = [Scale(0.9 + 0.1 * i) for i in range(layers)]

    def layers(self):
        spread, *inner, last = self.scales
        return [
            nn.Layer(lambda x: spread(Tensor(x)) * self.ramp, (spread,), 1.0),
            *(nn.Layer(module, (module,), 1.0) for module in inner),
            nn.Layer(lambda x, targets: self.final(last(x), targets), (last,), 1.0),
        ]

    def final(self, x, targets):
        error = x.mean(axis=1) - targets
        return (error * error).mean()

    def loss(self, x, targets):
        *layers, last = self.layers()
        for layer in layers:
            x = layer.function(x)
        return last.function(x, targets)


class Scale(nn.Module):
    def __init__(self, weight):
        self.weight = nn.Parameter(np.full(1, weight, np.float32))

    def forward(self, x):
        return x * self.weight


def check_size(world, name, nbytes, m):
    """PP3: `nbytes` of activations a micro-batch; each has other numbers, so that none can take another's place."""
    schedule = schedule_of(name, world.size, m)
    single, model = (Wide(schedule.stages + 1, nbytes // 4) for _ in range(2))
    x, targets = np.arange(1, m + 1, dtype=np.float32)[:, None], np.ones(m, np.float32)
    pipeline = Pipeline(model, DeviceMesh(world, pp=world.size), schedule)
    loss = pipeline.forward_backward(x, targets)
    expected = 0.0
    for k in range(m):  # one process does not have to hold all of them at once
        part = single.loss(x[k : k + 1], targets[k : k + 1]) * np.float32(1 / m)
        part.backward()
        expected += float(part.data)
    assert relative_error(np.array(loss), np.array(expected)) < 1e-5, (loss, expected)
    grads_equal(pipeline, single, 1e-4)


def check_tied(world, steps=10):
    """The embedding that the first and the last rank have stays bitwise equal, whatever the optimizer."""
    config = nn.GPTConfig(**{**vars(TINY), "layers": 2 * world.size, "dtype": "float32", "dropout": 0.1})
    for schedule in (make("1f1b", world.size, 4), make("zb-v", world.size, 4)):
        pipeline = Pipeline(nn.GPT(config), DeviceMesh(world, pp=world.size), schedule)
        optimizer = minipar.optim.AdamW(pipeline.parameters(), lr=0.01)
        losses = []
        for step in range(steps):
            current().step = step
            pipeline.zero_grad()
            losses.append(pipeline.forward_backward(*tokens_of(6, config, step)))
            optimizer.step()
        have = [n for n, _ in pipeline.named_parameters() if n == "wte.weight"]
        weight = pipeline.model.wte.weight.data.view(np.int32).reshape(1, -1)
        rows = all_gather(weight, world, sizes=[1] * world.size)
        holders = all_gather(np.array([bool(have)]), world, sizes=[1] * world.size)
        assert holders.sum() == (min(2, world.size) if schedule.name == "1F1B" else 1), holders
        assert (rows[holders] == rows[holders][0]).all()
        assert (rows[0] != nn.GPT(config).wte.weight.data.view(np.int32).reshape(-1)).any()
        table = all_gather(np.array([losses]), world, sizes=[1] * world.size)
        assert (table == table[0]).all()  # bitwise the same loss on every rank


# Rank 1 wants both activations before it gives a gradient back; rank 0 wants a gradient first.
CIRCLE = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]


def deadlock(world):
    """A schedule that never ends, and that nobody has validated."""
    schedule = Schedule("circle", CIRCLE)
    pipeline = Pipeline(Chain(2), DeviceMesh(world, pp=2), schedule, check=False)
    pipeline.forward_backward(*samples_of(2))


def run_all(world):
    """What is run under MPI."""
    p = world.size
    for name in SYNCHRONOUS:
        check_equal(world, name, 2 * p)
    check_equal(world, "1f1b", 1)
    check_equal(world, "zb-h2", 5, recompute=True)
    if p % 2 == 0:
        check_equal(world, "zb-v", 4, dp=2)
        check_equal(world, "1f1b", 4, tp=2)
    for name, nbytes in (("1f1b", 1 << 10), ("interleaved", 200_000), ("1f1b", 16 << 20)):
        check_size(world, name, nbytes, m=p + 1)
    check_tied(world, steps=5)


if __name__ == "__main__":

    def main(world):
        if sys.argv[1:] == ["deadlock"]:
            try:
                deadlock(world)
            except CommunicationTimeout as error:
                os.write(1, f"{error}\n".encode())
                raise
        run_all(world)
        os.write(1, b"ok\n")

    minipar.run(main, timeout=3 if sys.argv[1:] else 60)
