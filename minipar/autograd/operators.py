"""What Tensors understand: `a + b`, `x.mean(axis)`, `x[1:]`, each standing for Functions of ops.py."""

import math

import numpy as np

from minipar.arrays import array_module
from minipar.autograd import ops
from minipar.autograd.tensor import Tensor, is_floating
from minipar.errors import ShapeError


def pair(a, b):
    """Two operands as Tensors of one dtype: numbers and raw arrays take the Tensor's, two Tensors promote."""
    if not isinstance(a, Tensor):
        return _like(a, b), b
    if not isinstance(b, Tensor):
        return a, _like(b, a)
    if a.dtype != b.dtype:
        dtype = np.result_type(a.dtype, b.dtype)
        return cast(a, dtype), cast(b, dtype)
    return a, b


def _like(value, tensor):
    dtype = tensor.dtype if is_floating(tensor.dtype) else None
    return Tensor(array_module(tensor.data).asarray(value, dtype=dtype))


def cast(x, dtype):
    return x if x.dtype == np.dtype(dtype) else ops.Cast.apply(x, dtype=dtype)


def mean(x, axis=None, keepdims=False):
    """Arithmetic mean over `axis`; ShapeError where that is empty."""
    axes = range(x.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    count = math.prod(x.shape[a] for a in axes)
    if not count:
        raise ShapeError(f"the mean over axis {axis} of a tensor of shape {x.shape} has no elements.")
    return ops.Sum.apply(x, axis=axis, keepdims=keepdims) * (1 / count)


def var(x, axis=None, keepdims=False):
    """Mean squared deviation from the mean (no Bessel correction, as in NumPy)."""
    return ((x - mean(x, axis, True)) ** 2).mean(axis, keepdims)


def _transpose(x, *axes):
    if len(axes) == 1 and isinstance(axes[0], (tuple, list)):
        axes = axes[0]
    axes = tuple(a % x.ndim for a in axes) or tuple(reversed(range(x.ndim)))
    return ops.Transpose.apply(x, axes=axes)


def _reshape(x, *shape):
    return ops.Reshape.apply(x, shape=shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape)


def _binary(function):
    """The operator and its reflection, for `tensor + x` and `x + tensor`."""
    return lambda a, b: function.apply(*pair(a, b)), lambda a, b: function.apply(*pair(b, a))


def _compare(name):
    """Comparisons give plain boolean arrays: nothing flows back through them."""
    return lambda a, b: getattr(a.data, name)(b.data if isinstance(b, Tensor) else b)


Tensor.__add__, Tensor.__radd__ = _binary(ops.Add)
Tensor.__sub__ = lambda a, b: a + (-pair(a, b)[1])  # converted first: an unsigned b would wrap
Tensor.__rsub__ = lambda a, b: b + (-a)
Tensor.__mul__, Tensor.__rmul__ = _binary(ops.Mul)
Tensor.__truediv__, Tensor.__rtruediv__ = _binary(ops.Div)
Tensor.__matmul__, Tensor.__rmatmul__ = _binary(ops.MatMul)
Tensor.__gt__, Tensor.__ge__ = _compare("__gt__"), _compare("__ge__")
Tensor.__lt__, Tensor.__le__ = _compare("__lt__"), _compare("__le__")
Tensor.__neg__ = lambda x: ops.Neg.apply(x)
Tensor.__pow__ = lambda x, exponent: ops.Pow.apply(x, exponent=float(exponent))
Tensor.__getitem__ = lambda x, index: ops.GetItem.apply(x, index=index)
Tensor.exp = lambda x: ops.Exp.apply(x)
Tensor.log = lambda x: ops.Log.apply(x)
Tensor.sqrt = lambda x: ops.Sqrt.apply(x)
Tensor.tanh = lambda x: ops.Tanh.apply(x)
Tensor.relu = lambda x: ops.Relu.apply(x)
Tensor.sum = lambda x, axis=None, keepdims=False: ops.Sum.apply(x, axis=axis, keepdims=keepdims)
Tensor.max = lambda x, axis=None, keepdims=False: ops.Max.apply(x, axis=axis, keepdims=keepdims)
Tensor.std = lambda x, axis=None, keepdims=False: var(x, axis, keepdims).sqrt()
Tensor.argmax = lambda x, axis=None: x.data.argmax(axis)
Tensor.mean, Tensor.var, Tensor.astype, Tensor.reshape, Tensor.transpose = mean, var, cast, _reshape, _transpose
