"""The MPI library's own collectives, to compare with and to choose where they are faster.

They block inside the library, where no time limit of ours reaches, so a second thread looks at the clock meanwhile.
The functions have the form of those of ring, tree and direct.
"""

import sys
from contextlib import contextmanager

import numpy as np

from minipar.errors import DTypeError

NAMES = {"add": "SUM", "maximum": "MAX", "minimum": "MIN", "multiply": "PROD"}


@contextmanager
def library(comm, array, operation, combine=np.add):
    """(MPI communicator, MPI operation) for a `with` block that must end within the time limit."""
    mpi = comm.native()
    if not isinstance(array, np.ndarray):
        raise DTypeError(f"{operation}: algorithm 'native' takes NumPy arrays; this one is a {type(array).__name__}.")
    if array.dtype.kind not in "iuf" or array.dtype.name in ("float16", "bfloat16"):
        raise DTypeError(f"{operation}: algorithm 'native' does not take {array.dtype}: MPI has no such type.")
    with comm.overseen(operation, array.nbytes):
        yield mpi, getattr(sys.modules["mpi4py.MPI"], NAMES[combine.__name__])


def all_reduce(source, target, comm, combine, operation):
    with library(comm, target, operation, combine) as (mpi, op):
        if source is not target:
            target[...] = source
        mpi.Allreduce(in_place(), target, op)  # in place on all ranks or on none, says the standard


def reduce_scatter(sources, own, comm, combine, operation):
    with library(comm, own, operation, combine) as (mpi, op):
        mpi.Reduce_scatter(sources.flat, own, sources.sizes, op)


def all_gather(chunks, comm, operation):
    with library(comm, chunks.flat, operation) as (mpi, _):
        mpi.Allgatherv(in_place(), (chunks.flat, chunks.sizes))


def broadcast(flat, comm, root, operation):
    with library(comm, flat, operation) as (mpi, _):
        mpi.Bcast(flat, root)


def reduce(source, target, comm, root, combine, operation):
    with library(comm, target, operation, combine) as (mpi, op):
        mpi.Reduce(source, target if comm.rank == root else None, op, root)


def all_to_all(outgoing, incoming, comm, operation):
    with library(comm, outgoing.flat, operation) as (mpi, _):
        mpi.Alltoallv((outgoing.flat, outgoing.sizes), (incoming.flat, incoming.sizes))


def gather(own, pieces, comm, root, operation):
    with library(comm, own, operation) as (mpi, _):
        mpi.Gatherv(own, (pieces.flat, pieces.sizes) if comm.rank == root else None, root)


def scatter(pieces, own, comm, root, operation):
    with library(comm, own, operation) as (mpi, _):
        mpi.Scatterv((pieces.flat, pieces.sizes) if comm.rank == root else None, own, root)


def in_place():
    return sys.modules["mpi4py.MPI"].IN_PLACE
