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
        self.ranks, self.parts = comm.ranks, comm.share(nbytes)
        self.own = self.parts[comm.rank]
        self.address = self.own.__array_interface__["data"][0]
        comm.buffers.append(self)

    def array(self, shape, dtype=np.float32, offset=0):
        """An array in this rank's part, `offset` bytes from its start."""
        return self._view(self.own, shape, np.dtype(dtype), offset)

    def peers(self, x, ranks):
        """The arrays of the world ranks `ranks` at the place of the contiguous `x`; None if it lies elsewhere."""
        offset = x.__array_interface__["data"][0] - self.address
        if not (0 <= offset and offset + x.nbytes <= self.own.nbytes and set(ranks) <= set(self.ranks)):
            return None
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
    """What the ranks of a group meet in: a flag, and two slots for numbers, of each rank."""

    def __init__(self, comm):
        parts = comm.share(LINE + 2 * ARENA_BYTES)
        self.flags = [memoryview(part[:8]).cast("q") for part in parts]
        self.slots = [[part[start : start + ARENA_BYTES] for part in parts] for start in (LINE, LINE + ARENA_BYTES)]
        self.views = {}

    def slot(self, turn, dtype, elements):
        """Every rank's slot number `turn` % 2, as `elements` numbers of `dtype`."""
        key = (turn % 2, dtype, elements)
        if key not in self.views:
            if len(self.views) > 500:
                self.views.clear()
            nbytes = elements * dtype.itemsize
            self.views[key] = [part[:nbytes].view(dtype) for part in self.slots[turn % 2]]
        return self.views[key]
