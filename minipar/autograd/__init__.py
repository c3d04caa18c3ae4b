"""A small reverse-mode autograd on NumPy or CuPy arrays."""

from minipar.autograd import functional
from minipar.autograd.tensor import Function, Tensor, no_grad, saved_bytes

__all__ = ["Function", "Tensor", "functional", "no_grad", "saved_bytes"]
