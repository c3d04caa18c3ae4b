"""The elementary operations, one Function each."""

import itertools
import math

import numpy as np

from minipar.arrays import array_module
from minipar.autograd.tensor import Function


def sum_to(grad, shape):
    """Undo broadcasting: `grad` summed over the axes along which an operand of `shape` was repeated."""
    if grad.shape == shape:
        return grad
    extra = grad.ndim - len(shape)
    axes = (*range(extra), *(i + extra for i, n in enumerate(shape) if n == 1 and grad.shape[i + extra] != 1))
    return grad.sum(axis=axes, keepdims=True).reshape(shape)


# --- two operands ----------------------------------------------------------------------------------------------------


class Add(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.shapes = a.shape, b.shape
        return a + b

    @staticmethod
    def backward(ctx, grad):
        return tuple(sum_to(grad, shape) for shape in ctx.shapes)


class Mul(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.shapes = a.shape, b.shape
        ctx.save_for_backward(a if ctx.needs_grad[1] else None, b if ctx.needs_grad[0] else None)
        return a * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved
        return (
            sum_to(grad * b, ctx.shapes[0]) if ctx.needs_grad[0] else None,
            sum_to(grad * a, ctx.shapes[1]) if ctx.needs_grad[1] else None,
        )


class Div(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a / b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved
        return sum_to(grad / b, a.shape), sum_to(-grad * a / (b * b), b.shape)


class MatMul(Function):
    """a @ b with the broadcasting rules of NumPy's matmul; either may be a vector."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved
        # A vector on the left is a row, on the right a column; the result lacks that axis.
        rows = a[None, :] if a.ndim == 1 else a
        columns = b[:, None] if b.ndim == 1 else b
        if b.ndim == 1:
            grad = grad[..., None]
        if a.ndim == 1:
            grad = grad[..., None, :]
        da = sum_to(grad @ columns.swapaxes(-1, -2), rows.shape).reshape(a.shape) if ctx.needs_grad[0] else None
        db = sum_to(rows.swapaxes(-1, -2) @ grad, columns.shape).reshape(b.shape) if ctx.needs_grad[1] else None
        return da, db


# --- one operand -----------------------------------------------------------------------------------------------------


class Neg(Function):
    @staticmethod
    def forward(ctx, x):
        return -x

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Pow(Function):
    """x ** exponent for a number `exponent`."""

    @staticmethod
    def forward(ctx, x, exponent):
        ctx.exponent = exponent
        ctx.save_for_backward(x)
        return x**exponent

    @staticmethod
    def backward(ctx, grad):
        (x,), n = ctx.saved, ctx.exponent
        return grad * (n * x ** (n - 1)) if n else array_module(grad).zeros_like(grad)


class Exp(Function):
    @staticmethod
    def forward(ctx, x):
        y = array_module(x).exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved[0]


class Log(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return array_module(x).log(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.saved[0]


class Sqrt(Function):
    """Square root; its derivative at 0, which is infinite, counts as 0, so that a zero vector's norm has gradient 0."""

    @staticmethod
    def forward(ctx, x):
        y = array_module(x).sqrt(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved
        xp = array_module(y)
        return xp.where(y > 0, grad / (2 * xp.where(y > 0, y, 1)), 0).astype(grad.dtype)


class Tanh(Function):
    @staticmethod
    def forward(ctx, x):
        y = array_module(x).tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved
        return grad * (1 - y * y)


class Relu(Function):
    @staticmethod
    def forward(ctx, x):
        y = array_module(x).maximum(x, 0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved[0] > 0)


class Cast(Function):
    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = x.dtype
        return x.astype(dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.astype(ctx.dtype)


class Softmax(Function):
    """exp(x) / sum(exp(x)) along `axis`; entries of -inf get exactly 0, an axis that is -inf throughout gives zeros."""

    @staticmethod
    def forward(ctx, x, axis=-1):
        xp = array_module(x)
        ctx.axis = axis
        peak = x.max(axis=axis, keepdims=True)
        y = xp.exp(x - xp.where(peak == -math.inf, 0, peak).astype(x.dtype))
        total = y.sum(axis=axis, keepdims=True)
        y /= xp.where(total == 0, 1, total).astype(x.dtype)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved
        return y * (grad - (grad * y).sum(axis=ctx.axis, keepdims=True))


# --- reductions ------------------------------------------------------------------------------------------------------


def _spread(grad, shape, axis, keepdims):
    """The gradient of a reduction, repeated over the axes that it reduced."""
    xp = array_module(grad)
    if axis is not None and not keepdims:
        grad = xp.expand_dims(grad, axis)
    return xp.broadcast_to(grad, shape)


class Sum(Function):
    @staticmethod
    def forward(ctx, x, axis=None, keepdims=False):
        ctx.shape, ctx.axis, ctx.keepdims = x.shape, axis, keepdims
        return array_module(x).asarray(x.sum(axis=axis, keepdims=keepdims))

    @staticmethod
    def backward(ctx, grad):
        return _spread(grad, ctx.shape, ctx.axis, ctx.keepdims)


class Max(Function):
    """Maximum over `axis`; equal maxima share the gradient evenly."""

    @staticmethod
    def forward(ctx, x, axis=None, keepdims=False):
        xp = array_module(x)
        ctx.axis, ctx.keepdims = axis, keepdims
        is_peak = x == x.max(axis=axis, keepdims=True)
        ctx.save_for_backward(is_peak / is_peak.sum(axis=axis, keepdims=True).astype(x.dtype))
        return xp.asarray(x.max(axis=axis, keepdims=keepdims))

    @staticmethod
    def backward(ctx, grad):
        (weights,) = ctx.saved
        return _spread(grad, weights.shape, ctx.axis, ctx.keepdims) * weights


# --- shapes ----------------------------------------------------------------------------------------------------------


class Reshape(Function):
    view = True

    @staticmethod
    def forward(ctx, x, shape):
        ctx.shape = x.shape
        return x.reshape(shape)

    @staticmethod
    def backward(ctx, grad):
        return grad.reshape(ctx.shape)


class Transpose(Function):
    view = True

    @staticmethod
    def forward(ctx, x, axes):
        ctx.inverse = tuple(axes.index(i) for i in range(x.ndim))
        return x.transpose(axes)

    @staticmethod
    def backward(ctx, grad):
        return grad.transpose(ctx.inverse)


class GetItem(Function):
    """x[index] for slices, integers, None, Ellipsis and integer or boolean arrays; repeated indices add up."""

    view = True

    @staticmethod
    def forward(ctx, x, index):
        ctx.shape, ctx.index = x.shape, index
        return array_module(x).asarray(x[index])

    @staticmethod
    def backward(ctx, grad):
        xp = array_module(grad)
        full = xp.zeros(ctx.shape, grad.dtype)
        parts = ctx.index if isinstance(ctx.index, tuple) else (ctx.index,)
        if all(p is None or p is Ellipsis or isinstance(p, (slice, int)) for p in parts):
            full[ctx.index] = grad
        else:
            xp.add.at(full, ctx.index, grad)
        return full


class Concatenate(Function):
    @staticmethod
    def forward(ctx, *arrays, axis=0):
        ctx.axis, ctx.sizes = axis, [a.shape[axis] for a in arrays]
        return array_module(arrays[0]).concatenate(arrays, axis=axis)

    @staticmethod
    def backward(ctx, grad):
        starts = np.cumsum([0, *ctx.sizes])
        lead = (slice(None),) * (ctx.axis % grad.ndim)
        return tuple(grad[(*lead, slice(int(a), int(b)))] for a, b in itertools.pairwise(starts))


class Where(Function):
    """condition ? a : b; the branch that was not taken gets exactly 0, even where its own derivative is infinite."""

    @staticmethod
    def forward(ctx, condition, a, b):
        ctx.shapes = a.shape, b.shape
        ctx.save_for_backward(condition)
        return array_module(a).where(condition, a, b)

    @staticmethod
    def backward(ctx, grad):
        (condition,) = ctx.saved
        xp = array_module(grad)
        a, b = ctx.shapes
        return None, sum_to(xp.where(condition, grad, 0), a), sum_to(xp.where(condition, 0, grad), b)
