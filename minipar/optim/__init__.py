"""Optimizers: they update parameters in place, block by block in the cache."""

import math

from minipar.arrays import array_module
from minipar.autograd.fused import blocks


class Optimizer:
    """Base: `step()` updates every parameter that has a gradient; subclasses give `update`.

    params: an iterable of Parameters. lr: learning rate; may be changed between steps. The state of a parameter
    (`state_names`, arrays like it, zero at first) is made at its first step, so a frozen one has none.
    """

    state_names = ()

    def __init__(self, params, lr):
        self.params, self.lr, self.steps, self.state = list(params), lr, 0, {}

    def zero_grad(self):
        for parameter in self.params:
            parameter.grad = None

    def step(self):
        self.steps += 1
        for index, parameter in enumerate(self.params):
            if parameter.grad is None or not parameter.requires_grad:
                continue
            xp = array_module(parameter.data)
            if index not in self.state:
                self.state[index] = [xp.zeros_like(parameter.data) for _ in self.state_names]
            p, g, *state = (a.reshape(-1) for a in (parameter.data, parameter.grad, *self.state[index]))
            for block in blocks(xp, parameter.size):
                # A gradient may have another dtype than master weights have, and is rounded nowhere on its way.
                self.update(xp, p[block], g[block].astype(p.dtype, copy=False), *(a[block] for a in state))
            parameter.changed()


class SGD(Optimizer):
    """p -= lr v with v = momentum v + g + weight_decay p (Sutskever et al. 2013, as in PyTorch)."""

    state_names = ("velocity",)

    def __init__(self, params, lr, momentum=0.0, weight_decay=0.0):
        super().__init__(params, lr)
        self.momentum, self.weight_decay = momentum, weight_decay

    def update(self, xp, p, g, velocity):
        velocity *= self.momentum
        velocity += g
        if self.weight_decay:
            velocity += p * self.weight_decay
        p -= velocity * float(self.lr)


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2, as in PyTorch).

    freeze_after: the step after which the squares stay as they are, as 1-bit Adam needs it; by default never. Numbers
    whose gradient was always 0 until then have a square of 0 and take huge steps later, so choose enough steps.
    """

    state_names = ("mean", "square")

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, freeze_after=None):
        super().__init__(params, lr)
        self.betas, self.eps, self.weight_decay, self.freeze_after = betas, eps, weight_decay, freeze_after

    def update(self, xp, p, g, mean, square):
        beta1, beta2 = self.betas
        lr = float(self.lr)
        counted = self.steps if self.freeze_after is None else min(self.steps, self.freeze_after)
        s = g * (1 - beta1)
        mean *= beta1
        mean += s
        if counted == self.steps:
            xp.multiply(g, g, out=s)
            s *= 1 - beta2
            square *= beta2
            square += s
        # p = (1 - lr wd) p - lr (mean / c1) / (sqrt(square / c2) + eps)
        xp.sqrt(square, out=s)
        s *= 1 / math.sqrt(1 - beta2**counted)
        s += self.eps
        xp.divide(mean, s, out=s)
        s *= lr / (1 - beta1**self.steps)
        p *= 1 - lr * self.weight_decay
        p -= s
