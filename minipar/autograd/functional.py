"""The operations as functions of Tensors: `functional.gelu(x)` and the like."""

from minipar.arrays import array_module
from minipar.autograd import fused, ops
from minipar.autograd.tensor import Tensor


def where(condition, a, b):
    """condition (booleans) ? a : b, broadcast together."""
    condition = condition.data if isinstance(condition, Tensor) else condition
    return ops.Where.apply(condition, *ops.pair(a, b))


def concatenate(tensors, axis=0):
    """The tensors joined along `axis`."""
    return ops.Concatenate.apply(*tensors, axis=axis)


def softmax(x, axis=-1):
    """See ops.Softmax."""
    return ops.Softmax.apply(x, axis=axis)


def gelu(x):
    """See fused.Gelu."""
    return fused.Gelu.apply(x)


def layer_norm(x, weight, bias, eps=1e-5):
    """See fused.LayerNorm."""
    return fused.LayerNorm.apply(x, weight, bias, eps=eps)


def linear(x, weight, bias=None):
    """See fused.Linear."""
    return fused.Linear.apply(x, weight) if bias is None else fused.Linear.apply(x, weight, bias)


def embedding(weight, ids):
    """See fused.Embedding; `ids` is an integer array, not a Tensor."""
    return fused.Embedding.apply(weight, array_module(weight.data).asarray(ids))


def cross_entropy(logits, targets, ignore_index=-100):
    """See fused.CrossEntropy; `targets` is an integer array, not a Tensor."""
    targets = array_module(logits.data).asarray(targets)
    return fused.CrossEntropy.apply(logits, targets, ignore_index=ignore_index)


def dropout(x, p, key, block=None):
    """See fused.Dropout; p = 0 is the identity."""
    return fused.Dropout.apply(x, p=p, key=key, block=block) if p else x


def causal_attention(qkv, keep=None, scale=1.0):
    """See fused.CausalAttention."""
    return fused.CausalAttention.apply(qkv, keep, scale=scale)
