"""Is a parallel model the same model? Compare it with the whole one, number by number."""

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from minipar.arrays import to_host
from minipar.collectives import all_gather
from minipar.errors import ShapeError
from minipar.optim import SGD
from minipar.parallel.shard import whole


@dataclass(frozen=True)
class Equivalence:
    """How far a parallel model is from the whole one. Errors are max |a - b| / max |b|, the largest over parameters.

    A gradient counts as no smaller than a thousandth of the model's largest: where what a parameter does cancels out,
    only rounding noise is left of it, and that has no digits to agree on.
    """

    loss_relative_error: float
    gradient_relative_error: float
    parameter_relative_error: float  # after `steps` optimizer steps
    worst_parameter: str  # the one with the largest gradient error
    replicated_equal: bool  # parameters that every rank holds whole are bitwise equal between ranks
    steps: int

    def within(self, loss, gradient):
        """Whether the errors of loss and gradients are at most these and the replicas equal."""
        close = self.loss_relative_error <= loss and self.gradient_relative_error <= gradient
        return close and self.replicated_equal


def relative_error(actual, expected, floor=0.0):
    """max |actual - expected| / max |expected|, in float64; 0 where both are zero or empty, infinite where one is NaN.

    None, a gradient that is not there, equals None alone. floor: the least to divide by.
    """
    if actual is None or expected is None:
        return 0.0 if actual is expected else math.inf
    actual, expected = to_host(actual).astype(np.float64), to_host(expected).astype(np.float64)
    scale = max(np.abs(expected).max(initial=0.0), floor)
    difference = np.abs(actual - expected).max(initial=0.0)
    error = float(difference / scale) if scale else float(difference)
    return math.inf if math.isnan(error) else error


def replicas_equal(model, world):
    """Whether every parameter that is not split is bitwise the same on all ranks of `world`."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        if parameter.shard is None:
            digest.update(name.encode() + to_host(parameter.data).tobytes())
    digests = all_gather(np.frombuffer(digest.digest(), np.uint8).reshape(1, 16), world, sizes=[1] * world.size)
    return bool((digests == digests[0]).all())


def equivalent(model, parallel_model, batch, world, steps=3, optimizer=None, part=None):
    """Train both models on `batch` for `steps` steps and compare loss, gradients and parameters.

    Every rank of `world` calls it with the same whole `model` (one rank's work, done by each) and its part of the
    parallel one, initialised alike. batch: (tokens, targets), integers (batch, time). part: this rank's samples of it,
    where the ranks share them out; all of it otherwise. optimizer: makes one from a
    list of parameters; SGD with momentum by default, since it is linear in the gradient. (Adam divides a gradient by
    its own size, so where the true gradient is 0, as for a key's bias, it turns rounding noise into full steps.)
    At least 2 steps: biases start at 0, so what is wrong with them shows from the second step on. Returns an
    Equivalence, the same on every rank. Raises ShapeError if the models' parameters do not have the same names.
    """
    if steps < 2:
        raise ShapeError(f"{steps} steps prove too little: biases start at 0, so at least 2 are needed.")
    names = [{name for name, _ in m.named_parameters()} for m in (model, parallel_model)]
    if names[0] != names[1]:
        raise ShapeError(f"the two models do not have the same parameters: {sorted(names[0] ^ names[1])} differ.")
    make = optimizer or (lambda parameters: SGD(parameters, lr=0.1, momentum=0.9))
    optimizers = [make(m.parameters()) for m in (model, parallel_model)]
    loss_error = gradient_error = 0.0
    worst = ""
    for _ in range(steps):
        losses = []
        for m, samples in ((model, batch), (parallel_model, batch if part is None else part)):
            m.zero_grad()
            loss = m.loss(*samples)
            loss.backward()
            losses.append(loss.data)
        loss_error = max(loss_error, relative_error(losses[1], losses[0]))
        floor = max((abs(p.grad).max(initial=0) for p in model.parameters() if p.grad is not None), default=0)
        for name, ours, theirs in _pairs(parallel_model, model):
            error = relative_error(whole(ours, ours.grad), theirs.grad, float(floor) / 1000)
            if error >= gradient_error:
                gradient_error, worst = error, name
        for each in optimizers:
            each.step()
    parameter_error = max(relative_error(whole(a, a.data), b.data) for _, a, b in _pairs(parallel_model, model))
    # Ranks may differ in what they saw (a loss of their own, say): the worst of any of them is the answer of all.
    seen = np.array([[loss_error, gradient_error, parameter_error]])
    errors = all_gather(seen, world, sizes=[1] * world.size).max(axis=0)
    return Equivalence(*map(float, errors), worst, replicas_equal(parallel_model, world), steps)


def _pairs(parallel_model, model):
    expected = dict(model.named_parameters())
    for name, parameter in parallel_model.named_parameters():
        yield name, parameter, expected[name]
