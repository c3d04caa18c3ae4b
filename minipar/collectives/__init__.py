"""Collectives over arrays of any shape and strides, on send and receive alone.

Every rank of `comm` must call the same one, with the same shapes where the text does not say otherwise; who does not is
named, with what each rank called. Results are bitwise equal on all ranks and from run to run; inputs are left alone
unless `out` is the input itself or overlaps it. With one rank nothing is sent, and the result is a copy.

op: "sum", "mean", "max", "min" or "prod". float16 and bfloat16 (of the package ml_dtypes) are combined in float32 and
rounded once; integers wrap around, as NumPy's do, and have no mean; the sum of bools is their "or".
algorithm: "auto", or one of choice.ALGORITHMS. operation: a name that appears in errors and timelines.
`start` of minipar.comm runs any of them while the rank goes on.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from minipar.arrays import array_module, split_sizes
from minipar.collectives import shared
from minipar.collectives.choice import ALGORITHMS, choose
from minipar.collectives.ring import all_gather as ring_all_gather
from minipar.collectives.ring import all_reduce as ring_all_reduce
from minipar.collectives.ring import cut
from minipar.comm import start
from minipar.errors import DTypeError, ShapeError

__all__ = [
    "ALGORITHMS",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
    "start",
]
COMBINE = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum", "prod": "multiply"}


class Reduction(NamedTuple):
    """How numbers become one: combine(a, b, out=c), and then divided by the ranks if `mean`; `wide`: in that dtype."""

    op: str
    combine: object
    mean: bool
    wide: object  # None: in their own dtype

    def over(self, arrays, total, ranks):
        """Combine `arrays` into `total`, which may be the first of them."""
        into = total if self.wide is None else array_module(total).empty(total.shape, self.wide)
        if self.wide or len(arrays) == 1:
            into[...] = arrays[0]
        if len(arrays) > 1:
            self.combine(into if self.wide else arrays[0], arrays[1], out=into)
        for array in arrays[2:]:
            self.combine(into, array, out=into)
        self.finish(into, total, ranks)

    def finish(self, combined, result, ranks):
        """Divide `combined` by the ranks if this is a mean, and round it into `result`: the same memory unless wide."""
        if self.mean:
            combined /= ranks
        if self.wide:
            result[...] = combined


def all_reduce(x, comm, op="sum", out=None, operation="all_reduce", algorithm="auto"):
    """The elementwise `op` of all ranks' x, on every rank.

    out: where to write the result, of x's shape and dtype and with any strides; out=x works in place. Raises
    ShapeError for another out, DTypeError for the mean of integers.
    """
    algorithm = comm.preferred.get("all_reduce", algorithm) if algorithm == "auto" else algorithm
    try:
        plan = comm.plans.get((type(x), op, x.dtype, x.shape, operation, algorithm))
    except (AttributeError, TypeError):
        plan = None  # no array, or no name of an operation: said below
    if plan is None:
        plan = _plan_all_reduce(x, comm, op, operation, algorithm)
    claim, reduction, run, small, in_place = plan
    prepared = None
    if out is x and comm.buffers and in_place is not None:
        prepared = in_place.get(id(x)) or shared.in_buffer(x, comm, reduction, operation, in_place)
    if claim and comm.check_headers:
        comm.agree(f"{claim} {prepared}" if prepared else claim)
    if out is not x:
        out = _output(x, out, operation)
    if small:
        small(x, out)
        return out
    if prepared:
        prepared()
        return out
    target, source = _contiguous(x, out)
    if run is None:
        reduction.over([source], target, 1)
    elif run is shared.all_reduce:  # which looks at the dtype and the mean itself, while the numbers are in the cache
        run(source.reshape(-1), target.reshape(-1), comm, reduction, operation)
    else:
        wide = source.astype(reduction.wide) if reduction.wide else target
        run((wide if reduction.wide else source).reshape(-1), wide.reshape(-1), comm, reduction.combine, operation)
        reduction.finish(wide, target, comm.size)
    if target is not out:
        out[...] = target
    return out


def _plan_all_reduce(x, comm, op, operation, algorithm):
    """What all_reduce does with such arrays; the group keeps it.

    (claim, reduction, function, OneShot or None, {} for those that turn out to lie in a SymmetricBuffer or None)
    """
    reduction = reduction_of(array_module(x), op, x.dtype)
    run = choose("all_reduce", x.nbytes, comm, algorithm)
    if run is shared.all_reduce and not comm.sees_objects and not isinstance(x, np.ndarray):
        if algorithm != "auto":
            raise DTypeError(f"{operation}: between processes algorithm 'shared' takes NumPy arrays, not {type(x)}.")
        run = ring_all_reduce  # through host memory
    alone = comm.size == 1 or comm.moves_nothing
    claim = "" if alone else claim_of(operation, op, x.dtype, x.shape, algorithm)
    by_slots = run is shared.all_reduce and not comm.sees_objects and not alone
    small = by_slots and x.nbytes <= shared.ONE_SHOT_BYTES
    small = shared.OneShot(x.shape, x.dtype, comm, reduction, operation) if small else None
    in_buffers = not small and (by_slots or (algorithm == "auto" and not comm.sees_objects and not alone))
    plan = claim, reduction, None if alone else run, small, {} if in_buffers else None
    if len(comm.plans) > 1000:
        comm.plans.clear()
    comm.plans[type(x), op, x.dtype, x.shape, operation, algorithm] = plan
    return plan


def reduce(x, comm, op="sum", root=0, operation="reduce", algorithm="auto"):
    """The elementwise `op` of all ranks' x on rank `root`; None elsewhere. root counts inside the group."""
    operation = _from(root, comm, operation)
    xp = array_module(x)
    reduction = reduction_of(xp, op, x.dtype)
    _agree(comm, operation, op, x.dtype, x.shape, algorithm)
    run = choose("reduce", x.nbytes, comm, algorithm)
    source = xp.ascontiguousarray(x, reduction.wide).reshape(-1)
    result = xp.empty(x.shape, x.dtype)
    total = xp.empty(x.size, reduction.wide) if reduction.wide else result.reshape(-1)
    run(source, total, comm, root, reduction.combine, operation)
    reduction.finish(total, result.reshape(-1), comm.size)
    return result if comm.rank == root else None


def reduce_scatter(x, comm, op="sum", sizes=None, operation="reduce_scatter", algorithm="auto"):
    """This rank's piece of the elementwise `op` of all ranks' x.

    sizes: rows of x (its first axis) for each rank; by default x counts as flat and is cut as evenly as can be, then
    the piece is 1-D. Raises ShapeError if the sizes do not add up to x's rows, DTypeError for the mean of integers.
    """
    xp = array_module(x)
    reduction = reduction_of(xp, op, x.dtype)
    x = x.reshape(-1) if sizes is None else x
    sizes = _cut(x, sizes, comm, operation)
    _agree(comm, operation, op, x.dtype, f"{x.shape} cut by {sizes}", algorithm)
    run = choose("reduce_scatter", x.nbytes, comm, algorithm)
    sources = cut(xp.ascontiguousarray(x, reduction.wide).reshape(-1), _elements(sizes, x))
    own = xp.empty((sizes[comm.rank], *x.shape[1:]), x.dtype)
    total = xp.empty(own.size, reduction.wide) if reduction.wide else own.reshape(-1)
    if comm.moves_nothing:
        total[...] = sources[comm.rank]
    else:
        run(sources, total, comm, reduction.combine, operation)
        reduction.finish(total, own.reshape(-1), comm.size)
    return own


def all_gather(x, comm, axis=0, sizes=None, out=None, operation="all_gather", algorithm="auto"):
    """All ranks' x joined along `axis`, where their sizes may differ; their other axes and dtypes may not.

    sizes: those sizes if every rank knows them; None exchanges them first. out: where to write them along axis 0,
    contiguous; x may be this rank's own piece of it. Raises ShapeError if x is 0-d or does not have the size that
    `sizes` gives it, or for another out.
    """
    xp = array_module(x)
    _check_rows(x, operation)
    rows = xp.moveaxis(x, axis, 0)
    _agree(comm, operation, "rows", x.dtype, f"{rows.shape[1:]} along axis {axis}", algorithm)
    sizes = _sizes(x, axis, sizes, comm, operation)
    shape = (sum(sizes), *rows.shape[1:])
    if out is not None and (out.shape != shape or out.dtype != x.dtype or axis or not out.flags.c_contiguous):
        raise ShapeError(f"{operation}: out must be {x.dtype} {shape} and contiguous, for axis 0.")
    gathered = xp.empty(shape, x.dtype) if out is None else out
    run = choose("all_gather", gathered.nbytes, comm, algorithm)
    start = sum(sizes[: comm.rank])
    gathered[start : start + sizes[comm.rank]] = rows
    if comm.moves_nothing:
        gathered[:start], gathered[start + sizes[comm.rank] :] = 1, 1
    else:
        run(cut(gathered.reshape(-1), _elements(sizes, rows)), comm, operation)
    return xp.ascontiguousarray(xp.moveaxis(gathered, 0, axis))


def broadcast(x, comm, root=0, out=None, operation="broadcast", algorithm="auto"):
    """Rank `root`'s x, on every rank; elsewhere x gives shape and dtype only. root counts inside the group.

    out: where to write it, as in all_reduce. Raises ShapeError for a root outside the group.
    """
    operation = _from(root, comm, operation)
    xp = array_module(x)
    _agree(comm, operation, "of", x.dtype, x.shape, algorithm)
    run = choose("broadcast", x.nbytes, comm, algorithm)
    out = _output(x, out, operation)
    target = out if out.flags.c_contiguous else xp.empty(x.shape, x.dtype)
    if comm.rank == root and target is not x:
        target[...] = x
    run(target.reshape(-1), comm, root, operation)
    if target is not out:
        out[...] = target
    return out


def all_to_all(x, comm, sizes=None, operation="all_to_all", algorithm="auto"):
    """The rows (first axis) that every rank's x has for this rank, joined in rank order.

    sizes: how many rows of x go to each rank; by default they are cut as evenly as can be. Ranks may have different
    sizes, which are exchanged. Raises ShapeError if they do not add up to x's rows.
    """
    xp = array_module(x)
    sizes = _cut(x, sizes, comm, operation)
    _agree(comm, operation, "rows", x.dtype, x.shape[1:], algorithm)
    run = choose("all_to_all", 0, comm, algorithm)
    table = np.array([sizes] * comm.size)  # row r: how many rows of rank r's x go to each rank
    ring_all_gather(list(table), comm, f"{operation} sizes")
    received = [sizes[comm.rank]] * comm.size if comm.moves_nothing else table[:, comm.rank].tolist()
    joined = xp.empty((sum(received), *x.shape[1:]), x.dtype)
    outgoing = cut(xp.ascontiguousarray(x).reshape(-1), _elements(sizes, x))
    run(outgoing, cut(joined.reshape(-1), _elements(received, x)), comm, operation)
    return joined


def gather(x, comm, root=0, sizes=None, operation="gather", algorithm="auto"):
    """All ranks' x joined along the first axis, where their sizes may differ, on rank `root`; None elsewhere.

    sizes: as in all_gather.
    """
    operation = _from(root, comm, operation)
    _check_rows(x, operation)
    _agree(comm, operation, "rows", x.dtype, x.shape[1:], algorithm)
    sizes, run = _sizes(x, 0, sizes, comm, operation), choose("gather", 0, comm, algorithm)
    xp, is_root = array_module(x), comm.rank == root
    gathered = xp.empty((sum(sizes) * is_root, *x.shape[1:]), x.dtype)
    run(xp.ascontiguousarray(x).reshape(-1), cut(gathered.reshape(-1), _elements(sizes, x)), comm, root, operation)
    return gathered if is_root else None


def scatter(x, out, comm, root=0, operation="scatter", algorithm="auto"):
    """Rank `root`'s x cut along its first axis, a piece for each rank's `out`, which is returned.

    out: contiguous; the sizes of all ranks' must add up to x's rows, or the root raises ShapeError. x is not looked at
    elsewhere.
    """
    operation = _from(root, comm, operation)
    array_module(out)
    _check_rows(out, operation)
    _agree(comm, operation, "rows", out.dtype, out.shape[1:], algorithm)
    if not out.flags.c_contiguous:
        raise ShapeError(f"{operation}: out must be contiguous; this {out.shape} array is not.")
    sizes, run = _sizes(out, 0, None, comm, operation), choose("scatter", 0, comm, algorithm)
    flat = out.reshape(-1)
    if comm.rank == root:
        array_module(x)
        if x.shape != (sum(sizes), *out.shape[1:]) or x.dtype != out.dtype:
            raise ShapeError(f"{operation}: x is {x.dtype} {x.shape}, but all outs have {sizes} rows {out.shape[1:]}.")
        flat = array_module(x).ascontiguousarray(x).reshape(-1)
    run(cut(flat, _elements(sizes, out)), out.reshape(-1), comm, root, operation)
    return out


def _agree(comm, *call):
    """Note what this rank calls, before anything is sent."""
    if comm.check_headers and comm.size > 1:
        comm.agree(claim_of(*call))


@lru_cache(maxsize=4096)  # a training step says the same few hundred things again and again
def claim_of(operation, op, dtype, shape, algorithm):
    """What a rank calls, in words that all ranks must agree on."""
    return f"{operation} ({op}, {dtype}, {shape}, by {algorithm})"


def reduction_of(xp, op, dtype):
    """The Reduction for numbers of `dtype`; ValueError for another op, DTypeError for the mean of integers."""
    if not isinstance(op, str) or op not in COMBINE:
        raise ValueError(f"op {op!r} is unknown: choose one of {', '.join(COMBINE)}.")
    return _reduction(xp, op, dtype)


@lru_cache
def _reduction(xp, op, dtype):
    if dtype.kind in "OSUMm":
        raise DTypeError(f"{dtype} values cannot be added up: only numbers can.")
    if op == "mean" and dtype.kind in "biu":
        raise DTypeError(f"the mean of {dtype} numbers is no {dtype}: convert to a floating dtype first.")
    wide = np.dtype(np.float32) if dtype.name in ("float16", "bfloat16") else None
    return Reduction(op, getattr(xp, COMBINE[op]), op == "mean", wide)


def _output(x, out, operation):
    """`out` after a check, or a new array like x."""
    if out is None:
        return array_module(x).empty(x.shape, x.dtype)
    array_module(out)
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ShapeError(f"{operation}: out is {out.dtype} {out.shape}, but x is {x.dtype} {x.shape}.")
    return out


def _contiguous(x, out):
    """(target, source): contiguous arrays to write the result to and to read x from; they may be one."""
    if out is x and x.flags.c_contiguous:
        return x, x
    xp = array_module(x)
    target = out if out.flags.c_contiguous else xp.empty(x.shape, x.dtype)
    if xp.may_share_memory(x, target):
        x = x.copy()  # writing the result would change what has yet to be read
    if x.flags.c_contiguous:
        return target, x
    target[...] = x
    return target, target


def _from(root, comm, operation):
    if root not in range(comm.size):
        raise ShapeError(f"{operation}: root {root} is not in this group of {comm.size} ranks.")
    return f"{operation} from {root}"


def _check_rows(x, operation):
    if x.ndim == 0:
        raise ShapeError(f"{operation}: a 0-d array has no axis to join or to cut: reshape it to (1,).")


def _sizes(x, axis, sizes, comm, operation):
    """Every rank's size along `axis`, exchanged if they are not known."""
    if sizes is None:
        numbers = np.full(comm.size, x.shape[axis], np.int64)
        if not comm.moves_nothing:
            ring_all_gather(cut(numbers, [1] * comm.size), comm, f"{operation} sizes")
        sizes = numbers.tolist()
    if len(sizes) != comm.size or sizes[comm.rank] != x.shape[axis]:
        raise ShapeError(f"{operation}: rank {comm.rank} has {x.shape[axis]} along axis {axis}, but sizes are {sizes}.")
    return sizes


def _cut(x, sizes, comm, operation):
    """How many rows of x each rank gets."""
    if sizes is None and x.ndim:
        sizes = split_sizes(len(x), comm.size)
    if x.ndim == 0 or len(sizes) != comm.size or min(sizes) < 0 or sum(sizes) != len(x):
        raise ShapeError(f"{operation}: sizes {sizes} do not cut the {x.shape} array for {comm.size} ranks.")
    return sizes


def _elements(sizes, x):
    """Elements in so many rows of x each."""
    return [size * math.prod(x.shape[1:]) for size in sizes]
