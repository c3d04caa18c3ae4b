"""Which piece of a parameter a rank holds, and how pieces become whole again, whatever cut them."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from minipar.arrays import array_module, to_host
from minipar.collectives import all_gather, all_reduce
from minipar.errors import ShapeError
from minipar.nn import Parameter


@dataclass(frozen=True)
class Shard:
    """The piece of an array that a rank holds: [start, stop) of `size` along `axis`; `comm` has the rest.

    shape: where a flat piece was cut from an array of that shape; of: the Shard that this array itself is, if any.
    """

    axis: int
    start: int
    stop: int
    size: int
    comm: Any
    shape: tuple | None = None
    of: Any = None


def whole(parameter, array):
    """`array` (the data, gradient or optimizer state of `parameter`) put together from the ranks' pieces.

    All ranks must call it; each gets the whole. None stays None.
    """
    shard = parameter.shard
    while shard is not None and array is not None:
        array = all_gather(array, shard.comm, axis=shard.axis, operation="all_gather of pieces")
        array, shard = array.reshape(shard.shape or array.shape), shard.of
    return array


def own_piece(parameter, array):
    """The opposite of `whole`: this rank's piece of a whole array; sends nothing."""
    shards, shard = [], parameter.shard
    while shard is not None:
        shards.append(shard)
        shard = shard.of
    for shard in reversed(shards):  # what was cut first comes first
        array = array.reshape(-1) if shard.shape else array
        array = array[(slice(None),) * shard.axis + (slice(shard.start, shard.stop),)]
    return array


def grad_norm(parameters):
    """The norm of all gradients together, each counted once however it is cut or copied; the same on every rank.

    parameters: the same ones in the same order on every rank, pieces included. Added up in float64.
    """
    totals = {}  # the groups that a parameter is spread over -> [them, sum of squares]
    for parameter in parameters:
        comms, shard = [], parameter.shard
        while shard is not None:
            comms.append(shard.comm)
            shard = shard.of
        entry = totals.setdefault(tuple(map(id, comms)), [comms, 0.0])
        if parameter.grad is not None:
            entry[1] += sum_of_squares(parameter.grad)
    norm = 0.0
    for comms, total in totals.values():
        for comm in comms:
            total = float(all_reduce(np.array(total), comm, operation="all_reduce of squares"))
        norm += total
    return math.sqrt(norm)


def sum_of_squares(x, step=1 << 14):
    """In pieces, so that float32 products are added up in float64 without a copy of the whole."""
    flat, total = x.reshape(-1), 0.0
    for begin in range(0, flat.size, step):
        piece = flat[begin : begin + step].astype(np.float64)
        total += float(array_module(piece).dot(piece, piece))
    return total


def clip_grad_norm(parameters, max_norm):
    """Scale all gradients down so that their common norm is at most `max_norm`; returns the norm before.

    As in PyTorch: by max_norm / (norm + 1e-6). All ranks must call it, and all scale alike.
    """
    parameters = list(parameters)
    norm = grad_norm(parameters)
    if norm > max_norm:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad *= max_norm / (norm + 1e-6)
    return norm


# --- the state of a model and its optimizer, in a form that no number of ranks shows in ------------------------------


def full_state(model, optimizer=None):
    """{"parameters": {name: array}, "optimizer": {state: {name: array}}, "steps": int}: host arrays, all whole.

    All ranks must call it, and each gets all of it. With `load_full_state` it moves a run to another number of ranks,
    or from one way of splitting to another.
    """
    named = list(model.named_parameters())
    state = {"parameters": {name: _host(whole(p, p.data)) for name, p in named}}
    state["parameters"] |= {name: _host(buffer.data) for name, buffer in model.named_buffers()}
    if optimizer is not None:
        places = {id(p): i for i, p in enumerate(optimizer.params)}
        state["steps"], state["optimizer"] = optimizer.steps, {}
        for which, kind in enumerate(optimizer.state_names):
            arrays = {}
            for name, p in named:
                own = optimizer.state.get(places.get(id(p)))
                own = whole(p, None if own is None else own[which])
                if own is not None:
                    arrays[name] = _host(own)
            state["optimizer"][kind] = arrays
    return state


def _host(x):
    return np.array(to_host(x))


def load_full_state(model, state, optimizer=None):
    """Take over what `full_state` gave, from any number of ranks. Sends nothing.

    Raises ShapeError, and changes nothing, where names or shapes do not fit.
    """
    named = dict(model.named_parameters())
    tensors = named | dict(model.named_buffers())
    _check_fit(state, tensors, optimizer)
    for name, tensor in tensors.items():
        tensor.data[...] = _piece(tensor, state["parameters"][name])
        tensor.changed()
    if optimizer is None:
        return
    places = {id(p): i for i, p in enumerate(optimizer.params)}
    optimizer.steps, optimizer.state = state["steps"], {}
    for name, p in named.items():
        arrays = [state["optimizer"][kind][name] for kind in optimizer.state_names if name in state["optimizer"][kind]]
        if arrays and id(p) in places:
            optimizer.state[places[id(p)]] = [_piece(p, array).astype(p.dtype) for array in arrays]


def _piece(tensor, array):
    piece = own_piece(tensor, array) if isinstance(tensor, Parameter) else array
    return array_module(tensor.data).array(piece)


def _check_fit(state, tensors, optimizer):
    have = state["parameters"]
    if tensors.keys() != have.keys():
        raise ShapeError(
            f"the state does not fit the model: missing {sorted(tensors.keys() - have.keys())}, "
            f"unknown {sorted(have.keys() - tensors.keys())}."
        )
    for name, tensor in tensors.items():
        if _piece(tensor, have[name]).shape != tensor.shape:
            raise ShapeError(f"{name} of the state has shape {have[name].shape}, which does not fit the model.")
    if optimizer is not None and set(state.get("optimizer", ())) != set(optimizer.state_names):
        kinds = f"{sorted(state.get('optimizer', ()))}, not {sorted(optimizer.state_names)}"
        raise ShapeError(f"the state is of another optimizer: it has {kinds}.")
