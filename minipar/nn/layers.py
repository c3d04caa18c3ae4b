"""The layers of a transformer, written as if there were one rank."""

import numpy as np

from minipar import rng
from minipar.arrays import array_module
from minipar.autograd import functional as F
from minipar.context import current
from minipar.nn.module import Module, Parameter


class Linear(Module):
    """y = x @ weight + bias. x (..., inputs), weight (inputs, outputs), bias (outputs,)."""

    def __init__(self, inputs, outputs, bias=True, dtype="float32"):
        self.weight = Parameter(np.zeros((inputs, outputs), dtype))
        self.bias = Parameter(np.zeros(outputs, dtype)) if bias else None

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Embedding(Module):
    """Row `id` of weight (rows, width) for each of the integer ids (...)."""

    def __init__(self, rows, width, dtype="float32"):
        self.weight = Parameter(np.zeros((rows, width), dtype))

    def forward(self, ids):
        return F.embedding(self.weight, ids)


class LayerNorm(Module):
    """Normalises the last axis to mean 0 and variance 1, then scales and shifts it."""

    def __init__(self, width, dtype="float32"):
        self.weight = Parameter(np.ones(width, dtype))
        self.bias = Parameter(np.zeros(width, dtype))

    def forward(self, x):
        return F.layer_norm(x, self.weight, self.bias)


class Dropout(Module):
    """Drops elements with probability p while training. The mask depends on the seed, this layer's name and the step.

    `shard` maps an axis to (start, full size) where this rank holds a piece of that axis, and the context's `samples`
    does so for axis 0, the batch; the masks of all pieces are then pieces of the mask of the whole.
    """

    def __init__(self, p):
        self.p = p
        self.shard = {}

    def key(self):
        context = current()
        return context.seed, "dropout", self.name, context.step

    def block(self, shape):
        """(full shape, start of each axis) of the whole that an activation of `shape` is a piece of."""
        samples = current().samples
        shard = self.shard if samples is None else {**self.shard, 0: samples}
        pieces = [shard.get(axis, (0, n)) for axis, n in enumerate(shape)]
        return tuple(full for _, full in pieces), tuple(start for start, _ in pieces)

    def forward(self, x):
        if not (self.training and self.p):
            return x
        return F.dropout(x, self.p, self.key(), self.block(x.shape))


class CausalSelfAttention(Module):
    """Multi-head attention of each position to itself and those before it.

    The columns of qkv are ordered head by head, each head's query, key and value side by side, so that a range of
    heads is a range of columns.
    """

    def __init__(self, width, heads, dropout, dtype):
        self.heads, self.depth = heads, width // heads
        self.qkv = Linear(width, 3 * width, dtype=dtype)
        self.drop = Dropout(dropout)
        self.proj = Linear(width, width, dtype=dtype)

    def forward(self, x):
        batch, time, _ = x.shape
        qkv = self.qkv(x).reshape(batch, time, self.heads, 3, self.depth)
        keep, scale = None, 1.0
        if self.drop.training and self.drop.p:
            shape = (batch, self.heads, time, time)
            mask = rng.keep_mask(self.drop.p, shape, *self.drop.key(), block=self.drop.block(shape))
            keep, scale = array_module(x.data).asarray(mask), rng.keep_scale(self.drop.p)
        y = F.causal_attention(qkv, keep, scale=scale)
        return self.proj(y.reshape(batch, time, self.heads * self.depth))


class MLP(Module):
    """width -> hidden -> width with GELU between; hidden is 4 width in GPT-2."""

    def __init__(self, width, hidden, dtype):
        self.fc = Linear(width, hidden, dtype=dtype)
        self.proj = Linear(hidden, width, dtype=dtype)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x)))
