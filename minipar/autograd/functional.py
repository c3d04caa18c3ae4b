"""The operations as functions of Tensors: `functional.gelu(x)` and the like."""

from minipar.arrays import array_module
from minipar.autograd import fused, ops
from minipar.autograd.operators import pair
from minipar.autograd.tensor import Tensor

softmax = ops.Softmax.apply  # (x, axis=-1)
gelu = fused.Gelu.apply  # (x)
layer_norm = fused.LayerNorm.apply  # (x, weight, bias, eps=1e-5)
linear = fused.Linear.apply  # (x, weight, bias or None)
causal_attention = fused.CausalAttention.apply  # (qkv, keep or None, scale=1.0)


def where(condition, a, b):
    """condition (booleans) ? a : b, broadcast together."""
    condition = condition.data if isinstance(condition, Tensor) else condition
    return ops.Where.apply(condition, *pair(a, b))


def concatenate(tensors, axis=0):
    """The tensors joined along `axis`."""
    return ops.Concatenate.apply(*tensors, axis=axis)


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
