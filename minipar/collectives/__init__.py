"""Collective operations on arrays of any shape and strides, on send and receive alone.

Every rank of `comm` must call the same one, with the same shapes where the text does not say otherwise. `operation` is
a name that appears in errors and timelines. Results are bitwise equal on all ranks and from run to run; inputs are left
alone unless `out` is the input itself. With one rank nothing is sent.
"""

import math

import numpy as np

from minipar.arrays import array_module, split_sizes
from minipar.collectives import ring, tree
from minipar.errors import DTypeError, ShapeError

COMBINE = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum", "prod": "multiply"}


def all_reduce(x, comm, op="sum", out=None, operation="all_reduce"):
    """The elementwise `op` of all ranks' x, on every rank. `out`: where to write it; out=x works in place."""
    combine = _combine(x, op)
    out = array_module(x).empty(x.shape, x.dtype) if out is None else out
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ShapeError(f"{operation}: out is {out.dtype} {out.shape}, but x is {x.dtype} {x.shape}.")
    if out is not x:
        out[...] = x
    if comm.size > 1:
        flat = _flat(out)
        ring.all_reduce(flat, comm, combine, operation)
        _put_back(flat, out)
    if op == "mean":
        out /= comm.size
    return out


def reduce_scatter(x, comm, op="sum", sizes=None, operation="reduce_scatter"):
    """This rank's piece of the elementwise `op` of all ranks' x.

    sizes: rows of x (its first axis) for each rank; by default x counts as flat and is cut as evenly as can be.
    """
    combine = _combine(x, op)
    xp = array_module(x)
    if sizes is None:
        x, sizes = x.reshape(-1), split_sizes(x.size, comm.size)
    if len(sizes) != comm.size or x.ndim == 0 or sum(sizes) != len(x):
        raise ShapeError(f"{operation}: sizes {sizes} do not cut the {x.shape} array for {comm.size} ranks.")
    row = math.prod(x.shape[1:])
    chunks = ring.cut(xp.array(x, copy=True, order="C").reshape(-1), [size * row for size in sizes])
    ring.reduce_scatter(chunks, comm, combine, operation)
    own = chunks[comm.rank].reshape(sizes[comm.rank], *x.shape[1:]).copy()
    if op == "mean":
        own /= comm.size
    return own


def all_gather(x, comm, axis=0, sizes=None, operation="all_gather"):
    """All ranks' x joined along `axis`, where their sizes may differ.

    sizes: those sizes if every rank knows them; None exchanges them first.
    """
    xp = array_module(x)
    if x.ndim == 0:
        raise ShapeError(f"{operation}: a 0-d array has no axis to join: reshape it to (1,).")
    if sizes is None:
        lengths = np.empty(comm.size, np.int64)
        lengths[comm.rank] = x.shape[axis]
        ring.all_gather(ring.cut(lengths, [1] * comm.size), comm, f"{operation} sizes")
        sizes = lengths.tolist()
    if len(sizes) != comm.size or sizes[comm.rank] != x.shape[axis]:
        raise ShapeError(f"{operation}: rank {comm.rank} has {x.shape[axis]} along axis {axis}, but sizes are {sizes}.")
    rows = xp.moveaxis(x, axis, 0)
    gathered = xp.empty((sum(sizes), *rows.shape[1:]), x.dtype)
    start = sum(sizes[: comm.rank])
    gathered[start : start + sizes[comm.rank]] = rows
    row = math.prod(rows.shape[1:])
    ring.all_gather(ring.cut(gathered.reshape(-1), [size * row for size in sizes]), comm, operation)
    return xp.ascontiguousarray(xp.moveaxis(gathered, 0, axis))


def broadcast(x, comm, root=0, out=None, operation="broadcast"):
    """Rank `root`'s x, on every rank; elsewhere x gives shape and dtype only. out=x overwrites it in place."""
    if not 0 <= root < comm.size:
        raise ShapeError(f"{operation}: root {root} is not in this group of {comm.size} ranks.")
    out = x.copy() if out is None else out
    if out is not x:
        out[...] = x
    flat = _flat(out)
    tree.broadcast(flat, comm, root, operation)
    _put_back(flat, out)
    return out


def _combine(x, op):
    if op not in COMBINE:
        raise ValueError(f"op {op!r} is unknown: choose one of {', '.join(COMBINE)}.")
    if op == "mean" and x.dtype.kind in "biu":
        raise DTypeError(f"the mean of {x.dtype} numbers is no {x.dtype}: convert to a floating dtype first.")
    return getattr(array_module(x), COMBINE[op])


def _flat(array):
    """The elements of `array` as a contiguous 1-D array: a view where its layout allows, else a copy."""
    return array_module(array).ascontiguousarray(array).reshape(-1)


def _put_back(flat, array):
    """After a change to `flat`: write it back if _flat had to copy."""
    if not array.flags.c_contiguous:
        array[...] = flat.reshape(array.shape)
