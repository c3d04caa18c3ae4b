"""Operations that a transformer spends its time in, written to pass over memory as rarely as possible.

NumPy's cost is memory traffic: every `a * b + c` writes whole temporaries. On the CPU these Functions therefore work
block by block, in place, on pieces that stay in the cache, and keep for the backward pass what saves a later pass.
On a GPU there is one block. Each has a plain composition of elementary operations in the tests to be compared with.
"""

import math

import numpy as np

from minipar import rng
from minipar.arrays import array_module, scatter_add
from minipar.autograd.tensor import Function
from minipar.errors import DTypeError, ShapeError

BLOCK = 1 << 16  # elements a block: 256 KiB of float32, so that a handful of blocks fit the second-level cache


def blocks(xp, rows, width=1):
    """Slices over `rows` rows of `width` elements, about BLOCK elements each; on a GPU one slice."""
    step = max(1, BLOCK // max(1, width)) if xp is np else max(1, rows)
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


class Gelu(Function):
    """x/2 (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3): the tanh form of Hendrycks and Gimpel 2016, as in GPT-2.

    The derivative costs three more multiplications while the block is in the cache, so it is what is saved.
    """

    @staticmethod
    def forward(ctx, x):
        xp = array_module(x)
        y = xp.empty(x.shape, x.dtype)
        slope = xp.empty(x.shape, x.dtype)
        c = math.sqrt(2 / math.pi)
        flat_x, flat_y, flat_slope = x.reshape(-1), y.reshape(-1), slope.reshape(-1)
        for block in blocks(xp, x.size):
            Gelu.block(xp, flat_x[block], flat_y[block], flat_slope[block], c)
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    def block(xp, x, y, d, c):
        """y = gelu(x), d = gelu'(x)."""
        xp.multiply(x, x, out=d)
        t = d * 0.044715
        t += 1
        t *= x
        t *= c
        xp.tanh(t, out=t)
        # gelu' = ((1 + t) + (1 - t^2) x u') / 2,  u' = c + 3 * 0.044715 c x^2
        d *= 3 * 0.044715 * c
        d += c
        d *= x
        xp.multiply(t, t, out=y)
        xp.subtract(1, y, out=y)
        d *= y
        t += 1
        d += t
        d *= 0.5
        t *= 0.5
        xp.multiply(t, x, out=y)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved[0]


class LayerNorm(Function):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis (Ba et al. 2016).

    x (..., width), weight and bias (width,). Saves the normalised x and 1/sqrt(var + eps) of each row.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, eps=1e-5):
        xp = array_module(x)
        width = x.shape[-1]
        x2 = x.reshape(-1, width)
        normed, y = xp.empty(x2.shape, x.dtype), xp.empty(x2.shape, x.dtype)
        scale = xp.empty((len(x2), 1), x.dtype)
        for rows in blocks(xp, len(x2), width):
            n, s = normed[rows], scale[rows]
            xp.subtract(x2[rows], x2[rows].mean(axis=1, keepdims=True), out=n)
            s[:, 0] = xp.einsum("ij,ij->i", n, n)
            s /= width
            s += eps
            xp.sqrt(s, out=s)
            xp.divide(1, s, out=s)
            n *= s
            xp.multiply(n, weight, out=y[rows])
            y[rows] += bias
        ctx.save_for_backward(normed, scale, weight)
        return y.reshape(x.shape)

    @staticmethod
    def backward(ctx, grad):
        normed, scale, weight = ctx.saved
        xp = array_module(grad)
        width = weight.shape[0]
        grad2 = grad.reshape(-1, width)
        dx = xp.empty(normed.shape, grad.dtype)
        dweight = xp.zeros(width, grad.dtype)
        for rows in blocks(xp, len(grad2), width):
            n, d = normed[rows], dx[rows]
            dweight += xp.einsum("ij,ij->j", grad2[rows], n)
            # With g = grad * weight: dx = scale (g - mean(g) - normed mean(g normed))
            xp.multiply(grad2[rows], weight, out=d)
            along = xp.einsum("ij,ij->i", d, n)[:, None] / width
            d -= d.mean(axis=1, keepdims=True)
            d -= n * along.astype(grad.dtype)
            d *= scale[rows]
        return dx.reshape(grad.shape), dweight, grad2.sum(axis=0)


class Linear(Function):
    """x @ weight + bias. x (..., inputs), weight (inputs, outputs), bias (outputs,) or None.

    Nobody reads the gradient of weight, half of the backward's work, before the optimizer does: it can wait.
    """

    can_wait = 1

    @staticmethod
    def forward(ctx, x, weight, bias):
        if x.shape[-1] != weight.shape[0]:
            raise ShapeError(f"a linear layer of {weight.shape[0]} inputs got an x of shape {x.shape}.")
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x if ctx.needs_grad[1] else None, weight)
        y = x.reshape(-1, x.shape[-1]) @ weight
        if ctx.has_bias:
            y += bias
        return y.reshape(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx, grad):
        weight = ctx.saved[1]
        grad2 = grad.reshape(-1, weight.shape[1])
        dx = (grad2 @ weight.T).reshape(*grad.shape[:-1], weight.shape[0]) if ctx.needs_grad[0] else None
        dweight = Linear.waiting(ctx, grad) if ctx.needs_grad[1] else None
        return dx, dweight, grad2.sum(axis=0) if ctx.has_bias else None

    @staticmethod
    def waiting(ctx, grad):
        """The gradient of weight."""
        x, weight = ctx.saved
        return x.reshape(-1, weight.shape[0]).T @ grad.reshape(-1, weight.shape[1])


class Embedding(Function):
    """weight[ids]. weight (rows, width), ids integers of any shape in [0, rows); an IndexError names one outside."""

    @staticmethod
    def forward(ctx, weight, ids):
        if ids.dtype.kind not in "iu":
            raise DTypeError(f"embedding ids must be integers, these are {ids.dtype}.")
        check_range(ids, len(weight), "id", "embedding")
        ctx.ids, ctx.shape = ids, weight.shape
        return weight[ids]

    @staticmethod
    def backward(ctx, grad):
        dweight = array_module(grad).zeros(ctx.shape, grad.dtype)
        scatter_add(dweight, ctx.ids.reshape(-1), grad.reshape(ctx.ids.size, ctx.shape[-1]))
        return dweight, None


def check_range(ids, rows, what, where):
    """IndexError unless 0 <= ids < rows. CuPy would wrap silently, NumPy accept negatives."""
    if ids.size and not (0 <= int(ids.min()) and int(ids.max()) < rows):
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise IndexError(f"{what} {wrong} is outside the {where} of {rows} rows: it must be 0 to {rows - 1}.")


class CrossEntropy(Function):
    """Mean over the labelled rows of log(sum(exp(logits))) - logits[target].

    logits (..., classes), targets integers (...,); a target equal to `ignore_index` does not count. With no labelled
    row the loss and its gradient are 0. Entries of -inf have probability and gradient exactly 0.
    """

    @staticmethod
    def forward(ctx, logits, targets, ignore_index=-100):
        xp = array_module(logits)
        classes = logits.shape[-1]
        if targets.shape != logits.shape[:-1]:
            raise ShapeError(f"logits of shape {logits.shape} need targets {logits.shape[:-1]}, not {targets.shape}.")
        z, t = logits.reshape(-1, classes), targets.reshape(-1)
        labelled = t != ignore_index
        t = xp.where(labelled, t, 0)
        check_range(t, classes, "target", "classes")
        probs, losses = xp.empty(z.shape, z.dtype), xp.empty(len(z), z.dtype)
        for rows in blocks(xp, len(z), classes):
            p = probs[rows]
            peak = z[rows].max(axis=1, keepdims=True)
            xp.subtract(z[rows], xp.where(peak == -math.inf, 0, peak), out=p)
            at = xp.arange(len(p))
            losses[rows] = -p[at, t[rows]]
            xp.exp(p, out=p)
            total = xp.maximum(p.sum(axis=1, keepdims=True), 1)  # 0 where the whole row is -inf, else 1 or more
            losses[rows] += xp.log(total[:, 0])
            p /= total
        ctx.count = max(1, int(labelled.sum()))
        ctx.targets, ctx.labelled, ctx.shape = t, labelled, logits.shape
        ctx.save_for_backward(probs)
        return xp.asarray((xp.where(labelled, losses, 0).sum(dtype=losses.dtype) / ctx.count).astype(z.dtype))

    @staticmethod
    def backward(ctx, grad):
        (probs,) = ctx.saved
        xp = array_module(probs)
        weight = (ctx.labelled / ctx.count).astype(probs.dtype) * grad
        dlogits = probs * weight[:, None]
        dlogits[xp.arange(len(probs)), ctx.targets] -= weight
        return dlogits.reshape(ctx.shape), None


class Dropout(Function):
    """x scaled by 1 / (1 - p) where kept, 0 where dropped with probability p.

    `key` and `block` select the mask as in rng.keep_mask: it depends on what is dropped, not on who computes it.
    """

    @staticmethod
    def forward(ctx, x, p, key, block=None):
        ctx.scale = rng.keep_scale(p)
        keep = array_module(x).asarray(rng.keep_mask(p, x.shape, *key, block=block))
        ctx.save_for_backward(keep)
        return Dropout.masked(x, keep, ctx.scale)

    @staticmethod
    def masked(x, keep, scale):
        y = x * keep
        y *= scale
        return y

    @staticmethod
    def backward(ctx, grad):
        return Dropout.masked(grad, ctx.saved[0], ctx.scale)


class CausalAttention(Function):
    """softmax(q k^T / sqrt(depth) + causal mask) v for every head (Vaswani et al. 2017).

    qkv (batch, time, heads, 3, depth), the three of a head side by side so that heads can be split among ranks;
    the result is (batch, time, heads, depth). Works one sample at a time: its (heads, time, time) scores stay in the
    cache from the first product to the last. Saves the probabilities. `keep` (batch, heads, time, time), a mask from
    rng.keep_mask, and `scale` apply dropout to them.
    """

    @staticmethod
    def forward(ctx, qkv, keep, scale=1.0):
        xp = array_module(qkv)
        batch, time, heads, _, depth = qkv.shape
        q, k, v = (qkv[:, :, :, i].transpose(0, 2, 1, 3) for i in range(3))  # (batch, heads, time, depth)
        probs = xp.empty((batch, heads, time, time), qkv.dtype)
        y = xp.empty((batch, time, heads, depth), qkv.dtype)
        future = xp.triu(xp.full((time, time), -math.inf, qkv.dtype), 1)
        for b in blocks(xp, batch, heads * time * time):
            p = probs[b]
            xp.matmul(q[b], k[b].swapaxes(-1, -2), out=p)
            p *= 1 / math.sqrt(depth)
            p += future
            p -= p.max(axis=-1, keepdims=True)
            xp.exp(p, out=p)
            p /= p.sum(axis=-1, keepdims=True)
            dropped = p if keep is None else Dropout.masked(p, keep[b], scale)
            xp.matmul(dropped, v[b], out=y[b].transpose(0, 2, 1, 3))
        ctx.scale = scale
        ctx.save_for_backward(qkv, probs, keep)
        return y

    @staticmethod
    def backward(ctx, grad):
        qkv, probs, keep = ctx.saved
        xp = array_module(grad)
        batch, time, heads, _, depth = qkv.shape
        dqkv = xp.empty(qkv.shape, qkv.dtype)
        q, k, v = (qkv[:, :, :, i].transpose(0, 2, 1, 3) for i in range(3))
        dq, dk, dv = (dqkv[:, :, :, i].transpose(0, 2, 1, 3) for i in range(3))
        dy = grad.transpose(0, 2, 1, 3)
        for b in blocks(xp, batch, heads * time * time):
            p = probs[b]
            dropped = p if keep is None else Dropout.masked(p, keep[b], ctx.scale)
            xp.matmul(dropped.swapaxes(-1, -2), dy[b], out=dv[b])
            ds = xp.matmul(dy[b], v[b].swapaxes(-1, -2))
            if keep is not None:
                ds = Dropout.masked(ds, keep[b], ctx.scale)
            # softmax: ds = p (dp - sum(dp p)), with the 1/sqrt(depth) of the scores folded in
            ds -= xp.einsum("bhij,bhij->bhi", ds, p)[..., None]
            ds *= p
            ds *= 1 / math.sqrt(depth)
            xp.matmul(ds, k[b], out=dq[b])
            xp.matmul(ds.swapaxes(-1, -2), q[b], out=dk[b])
        return dqkv, None
