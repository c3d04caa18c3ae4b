"""Module: a tree of layers and their parameters."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from minipar import arrays
from minipar.autograd import Tensor
from minipar.errors import ShapeError


class Parameter(Tensor):
    """A Tensor that training changes.

    `shard` is None for a whole parameter; for a piece of one it is (axis, start, stop, full size of that axis).
    """

    def __init__(self, data, shard=None):
        super().__init__(data, requires_grad=True)
        self.data = arrays.array_module(self.data).asarray(self.data, order="C")  # optimizers update it as a flat view
        self.shard = shard


class Buffer(Tensor):
    """A Tensor that belongs to the model's state but is not trained, such as a running mean."""


class Layer(NamedTuple):
    """A piece of a model that is a chain of them: `function` of the activation before it.

    modules: those whose parameters it uses; cost: its time relative to other layers'. The last layer of a chain is a
    function of (activation, targets), the mean loss.
    """

    function: Callable
    modules: tuple
    cost: float


class Module:
    """Base of all layers. Parameters, Buffers and Modules (also in lists) set as attributes belong to it.

    `name` is the dotted path from the root model, given by `assign_names`; draws and messages are labelled with it.
    """

    name = ""
    training = True

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def children(self):
        """(attribute, Module, Parameter or Buffer) pairs, in the order in which they were set."""
        for key, value in vars(self).items():
            if isinstance(value, (Module, Parameter, Buffer)):
                yield key, value
            elif isinstance(value, list):
                yield from ((f"{key}.{i}", item) for i, item in enumerate(value) if isinstance(item, Module))

    def named_modules(self, prefix=""):
        """(dotted name, Module) of this module and all below it."""
        yield prefix, self
        for key, child in self.children():
            if isinstance(child, Module):
                yield from child.named_modules(f"{prefix}.{key}" if prefix else key)

    def named_parameters(self):
        """(dotted name, Parameter); a tied parameter appears once, under its first name."""
        return self._named(Parameter)

    def named_buffers(self):
        """(dotted name, Buffer)."""
        return self._named(Buffer)

    def _named(self, kind):
        seen = set()
        for prefix, module in self.named_modules():
            for key, child in module.children():
                if isinstance(child, kind) and child not in seen:
                    seen.add(child)
                    yield (f"{prefix}.{key}" if prefix else key), child

    def parameters(self):
        return [parameter for _, parameter in self.named_parameters()]

    def assign_names(self):
        for name, module in self.named_modules():
            module.name = name

    def zero_grad(self):
        for parameter in self.parameters():
            parameter.grad = None

    def train(self, mode=True):
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self):
        return self.train(False)

    def to(self, xp):
        """Move parameters and buffers to the array module `xp` (see arrays.device), in place; returns self."""
        for _, tensor in self._named((Parameter, Buffer)):
            host = arrays.to_host(tensor.data)
            tensor.data, tensor.grad = host if xp is np else xp.asarray(host), None
        return self

    def state_dict(self):
        """Name -> host copy of each parameter and buffer."""
        return {name: arrays.to_host(t.data).copy() for name, t in self._named((Parameter, Buffer))}

    def load_state_dict(self, state):
        """Copy in what `state_dict` gave. Names and shapes must agree, else ShapeError and nothing is changed."""
        own = dict(self._named((Parameter, Buffer)))
        if own.keys() != state.keys():
            raise ShapeError(
                f"the state does not fit the model: missing {sorted(own.keys() - state.keys())}, "
                f"unknown {sorted(state.keys() - own.keys())}."
            )
        for name, parameter in own.items():
            if parameter.shape != state[name].shape:
                raise ShapeError(f"{name} has shape {parameter.shape}, the state has {state[name].shape}.")
        for name, parameter in own.items():
            parameter.data[...] = arrays.array_module(parameter.data).asarray(state[name])
            parameter.changed()
