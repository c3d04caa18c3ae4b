"""Collectives over arrays of any shape and strides, on send and receive alone.

Every rank of `comm` must call the same one, with the same shapes where the text does not say otherwise. `operation` is
a name that appears in errors and timelines. Results are bitwise equal on all ranks and from run to run; inputs are left
alone unless `out` is the input itself or overlaps it. With one rank nothing is sent, and the result is a copy.
"""

import math

import numpy as np

from minipar.arrays import array_module, split_sizes
from minipar.collectives import ring, tree
from minipar.errors import DTypeError, ShapeError

COMBINE = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum", "prod": "multiply"}


def all_reduce(x, comm, op="sum", out=None, operation="all_reduce"):
    """The elementwise `op` of all ranks' x, on every rank.

    op: "sum", "mean", "max", "min" or "prod". out: where to write the result, of x's shape and dtype and with any
    strides; out=x works in place. Raises ShapeError for another out, DTypeError for the mean of integers.
    """
    combine = _combine(x, op)
    xp = array_module(x)
    out = _output(x, out, operation)
    target = out if out.flags.c_contiguous else xp.empty(x.shape, x.dtype)
    if target is not x and xp.may_share_memory(x, target):
        x = x.copy()  # writing the result would change what has yet to be read
    source = x if x.flags.c_contiguous else target  # the ring reads x where it lies, if it can be sent from there
    if source is not x or comm.size == 1:
        target[...] = x
    if comm.size > 1:
        ring.all_reduce(source.reshape(-1), target.reshape(-1), comm, combine, operation)
    if op == "mean":
        target /= comm.size
    if target is not out:
        out[...] = target
    return out


def reduce_scatter(x, comm, op="sum", sizes=None, operation="reduce_scatter"):
    """This rank's piece of the elementwise `op` of all ranks' x.

    sizes: rows of x (its first axis) for each rank; by default x counts as flat and is cut as evenly as can be, then
    the piece is 1-D. Raises ShapeError if the sizes do not add up to x's rows, DTypeError for the mean of integers.
    """
    combine = _combine(x, op)
    xp = array_module(x)
    if sizes is None:
        x, sizes = x.reshape(-1), split_sizes(x.size, comm.size)
    if len(sizes) != comm.size or min(sizes) < 0 or x.ndim == 0 or sum(sizes) != len(x):
        raise ShapeError(f"{operation}: sizes {sizes} do not cut the {x.shape} array for {comm.size} ranks.")
    own = xp.empty((sizes[comm.rank], *x.shape[1:]), x.dtype)
    if comm.size == 1:
        own[...] = x
    else:
        counts = [size * math.prod(x.shape[1:]) for size in sizes]
        # Partial sums of the other chunks only pass through: those of one round can be overwritten two rounds later.
        passing = [xp.empty(max(counts), x.dtype) for _ in range(2)]
        targets = [passing[(comm.rank - i) % comm.size % 2][:count] for i, count in enumerate(counts)]
        targets[comm.rank] = own.reshape(-1)
        sources = ring.cut(xp.ascontiguousarray(x).reshape(-1), counts)
        ring.reduce_scatter(sources, targets, comm, combine, operation)
    if op == "mean":
        own /= comm.size
    return own


def all_gather(x, comm, axis=0, sizes=None, operation="all_gather"):
    """All ranks' x joined along `axis`, where their sizes may differ; their other axes and dtypes may not.

    sizes: those sizes if every rank knows them; None exchanges them first. Raises ShapeError if x is 0-d or does not
    have the size that `sizes` gives it.
    """
    xp = array_module(x)
    if x.ndim == 0:
        raise ShapeError(f"{operation}: a 0-d array has no axis to join: reshape it to (1,).")
    if sizes is None:
        sizes = _exchange(x.shape[axis], comm, f"{operation} sizes")
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
    """Rank `root`'s x, on every rank; elsewhere x gives shape and dtype only. root counts inside the group.

    out: where to write it, as in all_reduce. Raises ShapeError for a root outside the group.
    """
    if not 0 <= root < comm.size:
        raise ShapeError(f"{operation}: root {root} is not in this group of {comm.size} ranks.")
    out = _output(x, out, operation)
    target = out if out.flags.c_contiguous else array_module(x).empty(x.shape, x.dtype)
    if comm.rank == root and target is not x:
        target[...] = x
    tree.broadcast(target.reshape(-1), comm, root, f"{operation} from {root}")
    if target is not out:
        out[...] = target
    return out


def _combine(x, op):
    if op not in COMBINE:
        raise ValueError(f"op {op!r} is unknown: choose one of {', '.join(COMBINE)}.")
    if op == "mean" and x.dtype.kind in "biu":
        raise DTypeError(f"the mean of {x.dtype} numbers is no {x.dtype}: convert to a floating dtype first.")
    return getattr(array_module(x), COMBINE[op])


def _output(x, out, operation):
    """`out` after a check, or a new array like x."""
    if out is None:
        return array_module(x).empty(x.shape, x.dtype)
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ShapeError(f"{operation}: out is {out.dtype} {out.shape}, but x is {x.dtype} {x.shape}.")
    return out


def _exchange(number, comm, operation):
    """Every rank's `number`, as a list."""
    numbers = np.empty(comm.size, np.int64)
    numbers[comm.rank] = number
    ring.all_gather(ring.cut(numbers, [1] * comm.size), comm, operation)
    return numbers.tolist()
