"""Memory that all ranks of a node can read and write: no message is needed to see what another rank holds.

GPUs of a node reach each other's memory in the same way; NCCL and PyTorch (`torch.distributed._symmetric_memory`) build
their fastest all-reduce inside a node on such buffers, allocated at the same size on every rank.
"""

import math

import numpy as np

from minipar.errors import ShapeError

ARENA_BYTES = 512 * 1024  # each of the two slots that a rank has for arrays which lie elsewhere
LINE = 64  # bytes of a cache line: a flag has one for itself


class SymmetricBuffer:
    """`nbytes` of each rank of `comm`, which all of them can reach; every rank must make it, with the same size.

    parts[r]: the memory of rank r, uint8, zero at first; own: this rank's. It lasts as long as the world. An all-reduce
    (algorithm `shared`) of arrays that lie at the same place of it on every rank copies nothing in or out. Raises
    ShapeError if the ranks are not all on one node, LaunchError if the node has not enough shared memory.
    """

    def __init__(self, comm, nbytes):
        if len(set(comm.nodes)) > 1:
            raise ShapeError(f"ranks {comm.ranks} are on {len(set(comm.nodes))} nodes, which share no memory.")
        if nbytes < 0:
            raise ShapeError(f"a SymmetricBuffer of {nbytes} bytes is not possible.")
        comm.agree(f"SymmetricBuffer of {nbytes} bytes")
        self.ranks, self.parts = comm.ranks, comm.share(nbytes, f"SymmetricBuffer of {nbytes} bytes")
        self.own = self.parts[comm.rank]
        self.address = self.own.__array_interface__["data"][0]
        comm.buffers.append(self)
        self.number = len(comm.buffers) << 8 | comm.context  # tells it from others, alike on all of its ranks

    def array(self, shape, dtype=np.float32, offset=0):
        """An array in this rank's part, `offset` bytes from its start."""
        return self._view(self.own, shape, np.dtype(dtype), offset)

    def place(self, x, comm):
        """Where in this buffer the contiguous `x` lies, as a number above 0; 0 if it does not, or comm's ranks do not
        all share it."""
        if not isinstance(x, np.ndarray) or not x.flags.c_contiguous:
            return 0
        offset = x.__array_interface__["data"][0] - self.address
        inside = 0 <= offset and offset + x.nbytes <= self.own.nbytes and set(comm.ranks) <= set(self.ranks)
        return self.number << 40 | offset + 1 if inside else 0

    def peers(self, x, ranks):
        """The arrays of the world ranks `ranks` at the place of `x`."""
        offset = x.__array_interface__["data"][0] - self.address
        return [self._view(self.parts[self.ranks.index(r)], x.shape, x.dtype, offset) for r in ranks]

    def _view(self, part, shape, dtype, offset):
        nbytes = math.prod(shape if isinstance(shape, tuple | list) else (shape,)) * dtype.itemsize
        if offset < 0 or offset % dtype.itemsize or offset + nbytes > part.nbytes:
            raise ShapeError(
                f"a {dtype} array of shape {shape} at byte {offset} does not fit a buffer of {part.nbytes} bytes: it "
                f"needs {nbytes}, and a start that {dtype.itemsize} divides."
            )
        return part[offset : offset + nbytes].view(dtype).reshape(shape)


class Arena:
    """What the ranks of a group meet in: a flag, two offers and two slots for numbers of each rank."""

    def __init__(self, comm, operation):
        parts = comm.share(LINE + 2 * ARENA_BYTES, f"{operation}: shared memory")
        lines = [memoryview(part[:LINE]).cast("q") for part in parts]
        self.flags, self.offers = [line[:1] for line in lines], [[line[i:] for line in lines] for i in (1, 2)]
        self.slots = [[part[start : start + ARENA_BYTES] for part in parts] for start in (LINE, LINE + ARENA_BYTES)]
        self.uses = 0

    def views(self, shape, dtype):
        """Arrays of that shape in both slots of every rank: views[turn][rank].

        They are used in turn. One that was used two turns ago is free: whoever comes to this turn has met all others
        in the one between, and they had finished the one before.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        return [[part[:nbytes].view(dtype).reshape(shape) for part in parts] for parts in self.slots]

    def next_turn(self):
        self.uses = 1 - self.uses
        return self.uses
