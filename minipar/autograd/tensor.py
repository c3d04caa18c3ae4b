"""Reverse-mode automatic differentiation: Tensor, Function, and the walk back through the graph.

A Function turns arrays into an array and knows how to turn the gradient of its result into the gradients of its
inputs. Applying one to Tensors leaves a Node behind; Nodes point to the Nodes of their inputs, never to results, so
the graph has no reference cycle and vanishes with its last Tensor.
"""

import functools
import numbers
from contextlib import contextmanager

import numpy as np

from minipar.arrays import array_module
from minipar.context import current
from minipar.errors import DTypeError, GraphError, ShapeError


def is_floating(dtype):
    """Whether gradients can have `dtype` (bfloat16 is no subtype of NumPy's floating)."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


@contextmanager
def no_grad():
    """Record nothing inside the `with` block; belongs to the calling rank alone."""
    context = current()
    before, context.grad_enabled = context.grad_enabled, False
    try:
        yield
    finally:
        context.grad_enabled = before


class Context:
    """What a Function's forward leaves for its backward: `save_for_backward(...)` and any attribute.

    `needs_grad` says, input by input, whether a gradient is wanted.
    """

    saved = ()

    def __init__(self, needs_grad):
        self.needs_grad = needs_grad

    def save_for_backward(self, *arrays):
        self.saved = arrays


class Node:
    """One application of a Function: its context, and for each input the Node (or leaf) that takes the gradient."""

    __slots__ = ("context", "edges", "function", "versions")

    def __init__(self, function, context, edges, versions):
        self.function, self.context, self.edges, self.versions = function, context, edges, versions

    def check(self):
        """Raises GraphError if the graph below this node was freed, or an array it saved has changed since."""
        if self.context is None:
            raise GraphError(
                "backward through a graph that an earlier backward has freed: call it with retain_graph=True first."
            )
        for version, then in self.versions:
            if version[0] != then:
                raise GraphError(
                    f"an array that {self.function.__name__} saved for its backward was changed in place afterwards "
                    f"({version[0] - then} times): change a copy, or call backward first."
                )

    def backward(self, grad):
        grads = self.function.backward(self.context, grad)
        return grads if isinstance(grads, tuple) else (grads,)

    def put_off(self):
        """Leave the gradient that can wait out of `backward`, if it is a parameter's or a view's of one.

        Returns what computes it later, a function of the gradient of this node's result; None where nothing can wait.
        """
        i, context = self.function.can_wait, self.context
        end = None if i is None else self.edges[i]
        if end is None or not all(isinstance(e, Tensor) for e in getattr(end, "edges", [end])):
            return None
        self.edges = (*self.edges[:i], None, *self.edges[i + 1 :])
        context.needs_grad = (*context.needs_grad[:i], False, *context.needs_grad[i + 1 :])
        return lambda grad: _walk_back(end, self.function.waiting(context, grad), retain_graph=False)


class Function:
    """An operation. Subclasses give `forward(ctx, *arrays, **options)` and `backward(ctx, grad)`.

    `backward` returns an array (or None) for each input of `forward`, shaped like it: either new arrays, or views of
    `grad`, never something that it keeps. `view` says that the result shares memory with the first input. An input
    whose gradient `can_wait` is named by its number; `waiting(ctx, grad)` computes that gradient alone.
    """

    view = False
    can_wait = None

    @classmethod
    def apply(cls, *inputs, **options):
        """The Tensor that `forward` gives for `inputs` (Tensors, or arrays and None that need no gradient)."""
        enabled = current().grad_enabled
        context = Context(tuple(enabled and isinstance(x, Tensor) and x.requires_grad for x in inputs))
        data = cls.forward(context, *(x.data if isinstance(x, Tensor) else x for x in inputs), **options)
        result = Tensor(data, version=inputs[0].version if cls.view else None)
        if any(context.needs_grad) and is_floating(result.dtype):
            edges = tuple((x.node or x) if need else None for x, need in zip(inputs, context.needs_grad, strict=True))
            result.requires_grad = True
            result.node = Node(cls, context, edges, _versions(context.saved, (*inputs, result)))
        return result


def _owner(array):
    return array if array.base is None else array.base


def _versions(saved, tensors):
    """The version counters, and their values now, of those `tensors` whose memory is among the `saved` arrays."""
    owners = {id(_owner(array)) for array in saved if array is not None}
    return [(t.version, t.version[0]) for t in tensors if isinstance(t, Tensor) and id(_owner(t.data)) in owners]


class Tensor:
    """An array that remembers how it was computed.

    data: a NumPy or CuPy array (anything else is made a NumPy array). requires_grad: only floating dtypes can.
    `grad` is an array like `data`, filled by `backward`; gradients add up until they are set to None. Write in place
    through `tensor[...] = value`; who writes to `data` itself must call `changed()`, or a backward may be wrong.
    """

    # NumPy leaves `array + tensor` to Tensor's reflected operators when it sees this.
    __array_ufunc__ = None
    __slots__ = ("__weakref__", "data", "grad", "hooks", "node", "requires_grad", "version")

    def __init__(self, data, requires_grad=False, version=None):
        if isinstance(data, (numbers.Number, np.generic, list, tuple)):
            data = np.asarray(data)
        if requires_grad and not is_floating(data.dtype):
            raise DTypeError(f"{data.dtype} cannot require gradients: convert it first, as in x.astype('float32').")
        self.data, self.requires_grad = data, requires_grad
        self.grad = self.node = self.hooks = None
        self.version = [0] if version is None else version  # shared with views, counts in-place changes

    shape = property(lambda self: self.data.shape)
    dtype = property(lambda self: self.data.dtype)
    ndim = property(lambda self: self.data.ndim)
    size = property(lambda self: self.data.size)
    T = property(lambda self: self.transpose())

    def __repr__(self):
        return f"{type(self).__name__}({self.data!r}{', requires_grad=True' if self.requires_grad else ''})"

    def __array__(self, *args, **kwargs):
        raise TypeError("a minipar Tensor is no NumPy array: take its .data, or wrap the other operand in Tensor().")

    __array_function__ = __array__

    def item(self):
        """The value of a one-element tensor as a Python number (waits for the device)."""
        return self.data.item()

    def detach(self):
        """The same memory without the history."""
        return Tensor(self.data, version=self.version)

    def __setitem__(self, index, value):
        """Write in place, unrecorded: only inside no_grad, or where no gradient is required."""
        if self.requires_grad and current().grad_enabled:
            raise GraphError("an in-place write to a tensor that requires gradients is not recorded: use no_grad().")
        self.data[index] = value.data if isinstance(value, Tensor) else value
        self.changed()

    def changed(self):
        """Say that `data` was changed in place, so that a backward that needs the old values refuses."""
        self.version[0] += 1

    def register_hook(self, hook):
        """Call `hook(leaf)` each time this leaf's gradient is complete in a backward pass; returns a remover."""
        if self.node is not None:
            raise GraphError("gradient hooks belong to leaves: this tensor is the result of an operation.")
        self.hooks = {} if self.hooks is None else self.hooks
        key = object()
        self.hooks[key] = hook
        return lambda: self.hooks.pop(key, None)

    def backward(self, grad=None, retain_graph=False, later=None):
        """Add d(self)/d(leaf) to `grad` of every leaf that this tensor was computed from.

        grad: array shaped like self, the gradient of whatever comes after; one for a tensor of one element.
        Frees the graph unless `retain_graph`. Raises GraphError if it was freed or a saved array has changed.
        later: a list. The weight gradients of matrix products are then left out, and functions that add them to their
        leaves are put into it, to be called once each. (Zero-bubble pipelines fill their waits with these.)
        """
        if not self.requires_grad:
            raise GraphError("backward on a tensor that depends on nothing with requires_grad=True.")
        if grad is None:
            if self.size != 1:
                raise ShapeError(f"backward without a gradient needs a tensor of one element, not one of {self.shape}.")
            grad = array_module(self.data).ones_like(self.data)
        elif grad.shape != self.shape:
            raise ShapeError(f"the gradient of a tensor of shape {self.shape} cannot have the shape {grad.shape}.")
        context = current()
        outer, context.after_backward = context.after_backward, []
        try:
            _walk_back(self.node or self, grad.astype(self.dtype), retain_graph, later)
            for function in context.after_backward:
                function()
        finally:
            context.after_backward = outer

    def _accumulate(self, grad, fresh):
        """Add `grad` to this leaf's gradient; a `fresh` array, which nobody else holds, is taken as it is."""
        if self.grad is None:
            self.grad = grad if fresh else grad.copy()
        else:
            self.grad += grad
        for hook in list((self.hooks or {}).values()):
            hook(self)


def _count_edges(root, waiting):
    """How many gradients each node below `root` will receive. An explicit stack: no recursion limit.

    waiting: None, or a dict that gets {node: what computes later what can wait}.
    """
    expected, stack = {root: 0}, [root]
    while stack:
        node = stack.pop()
        if isinstance(node, Tensor):
            continue
        node.check()
        if waiting is not None:
            waiting[node] = node.put_off()
        for edge in node.edges:
            if edge is not None:
                if edge not in expected:
                    expected[edge] = 0
                    stack.append(edge)
                expected[edge] += 1
    return expected


def _walk_back(root, grad, retain_graph, later=None):
    """Visit each node once, after all its gradients have arrived (Kahn's topological order)."""
    waiting = None if later is None else {}
    missing = _count_edges(root, waiting)
    grads, fresh = {root: grad}, {root}  # fresh: nodes whose gradient is an array that nobody else holds
    ready = [root]
    while ready:
        node = ready.pop()
        grad = grads.pop(node, None)
        if isinstance(node, Tensor):
            if grad is not None:
                # Operands of two dtypes leave a gradient of the wider one.
                node._accumulate(grad.astype(node.dtype, copy=False), node in fresh)
            continue
        results = (None,) * len(node.edges) if grad is None else node.backward(grad)
        if waiting and waiting[node] and grad is not None:
            later.append(functools.partial(waiting[node], grad))
        if not retain_graph:
            node.context = None
        for edge, result in zip(node.edges, results, strict=True):
            if edge is None:
                continue
            if result is not None and edge not in grads:
                grads[edge] = result
                if result is not grad and result.base is None:
                    fresh.add(edge)
            elif result is not None and edge in fresh:
                grads[edge] += result
            elif result is not None:
                grads[edge] = grads[edge] + result
                fresh.add(edge)
            missing[edge] -= 1
            if not missing[edge]:
                ready.append(edge)


def saved_bytes(*roots):
    """Bytes of the distinct arrays that the graphs below `roots` keep for their backward, leaves' own data apart."""
    leaves, arrays, seen, stack = set(), {}, set(), [t.node for t in roots if t.node]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Tensor):
            leaves.add(id(_owner(node.data)))
            continue
        arrays.update((id(_owner(a)), _owner(a).nbytes) for a in node.context.saved if a is not None)
        stack.extend(edge for edge in node.edges if edge is not None)
    return sum(nbytes for owner, nbytes in arrays.items() if owner not in leaves)
