"""All-reduce in memory that all ranks of a node can reach: no messages, one pass.

    meet       everybody's numbers are there
    reduce     each rank takes one slice: block by block, so that all is done in the cache, it reads the block of every
               rank, combines them, and writes the result back to every rank
    meet       everybody's sums are there

Each number is read once and written once by one rank. NCCL and PyTorch (`torch.ops.symm_mem.two_shot_all_reduce_`) do
this between the GPUs of a node. Ranks that are threads reach each other's arrays anyway; processes reach those that lie
in a SymmetricBuffer. Other arrays of theirs go through slots of shared memory: small ones are put there by every rank
and combined by every rank for itself (`one_shot`), which saves the second meeting; large ones pass piece by piece.
"""

import math

from minipar.arrays import split_bounds
from minipar.comm import Traffic
from minipar.comm.memory import ARENA_BYTES, Arena
from minipar.context import current
from minipar.errors import MessageMismatch, ShapeError

BLOCK_BYTES = 256 * 1024  # of one array: the blocks of two ranks stay in a core's cache until they have been written
ONE_SHOT_BYTES = 64 * 1024


def all_reduce(source, target, comm, reduction, operation):
    """As ring.all_reduce, but `reduction` also says in which dtype to combine and whether to divide by the ranks."""
    span = stopwatch(operation)
    if comm.sees_objects:
        arrays = comm.meet(operation, (source, target))
        span("wait")
        sources, targets = zip(*arrays, strict=True)
        reduce_blocks(blocks(sources, targets, comm), comm, reduction)
        span("communication")
        comm.meet(operation)
        span("wait")
    else:
        check_one_node(comm, operation)
        meet_at(0, comm, operation)
        by_pieces(source, target, comm, reduction, operation, span)
    _count(comm, all_reduce_traffic(source.size, source.itemsize, comm.size, comm.rank))


def meet_at(place, comm, operation):
    """Meet; MessageMismatch unless the arrays of all ranks lie at the same place, 0 for outside of any buffer."""
    if comm.meet(operation, place).count(place) < comm.size:
        raise MessageMismatch(
            f"{operation}: the arrays of ranks {comm.ranks} must all lie at the same place of one SymmetricBuffer, or "
            "all lie elsewhere."
        )


def in_buffer(x, comm, reduction, operation, known):
    """An InPlace for x if it lies in a SymmetricBuffer of all of comm's ranks, else None; known: {id(x): InPlace}."""
    for buffer in comm.buffers:
        if buffer.place(x, comm):
            if len(known) > 100:
                known.clear()
            known[id(x)] = InPlace(x, buffer, comm, reduction, operation)
            return known[id(x)]
    return None


class InPlace:
    """All-reduce of one array that lies in a SymmetricBuffer, where it is; everything is prepared once."""

    def __init__(self, x, buffer, comm, reduction, operation):
        self.x = x  # kept, so that no other array is ever taken for this one
        self.comm, self.reduction, self.operation, self.place = comm, reduction, operation, buffer.place(x, comm)
        parts = [part.reshape(-1) for part in buffer.peers(x, comm.ranks)]
        self.blocks = list(blocks(parts, parts, comm))
        self.traffic = all_reduce_traffic(x.size, x.itemsize, comm.size, comm.rank)

    def __str__(self):
        return f"in place {self.place:#x} of a SymmetricBuffer"

    def __call__(self):
        span = stopwatch(self.operation)
        meet_at(self.place, self.comm, self.operation)
        span("wait")
        reduce_blocks(self.blocks, self.comm, self.reduction)
        span("communication")
        self.comm.arrive(self.operation)
        span("wait")
        _count(self.comm, self.traffic)


def check_one_node(comm, operation):
    if comm.nodes.count(comm.nodes[0]) < comm.size:
        raise ShapeError(f"{operation}: algorithm 'shared' needs all ranks on one node; {comm.ranks} are not.")


def by_pieces(source, target, comm, reduction, operation, span):
    """Through the slots: in two turns, so that a rank can fill one while others still read the other."""
    step = ARENA_BYTES // source.itemsize
    views = comm.arena.views((step,), source.dtype)
    for start in range(0, source.size, step):
        piece = source[start : start + step]
        slots = [slot[: piece.size] for slot in views[comm.arena.next_turn()]]
        slots[comm.rank][...] = piece
        span("communication")
        comm.arrive(operation)
        span("wait")
        reduce_blocks(blocks(slots, slots[:1], comm), comm, reduction)
        span("communication")
        comm.arrive(operation)
        span("wait")
        target[start : start + step] = slots[0]
        span("communication")


class OneShot:
    """All-reduce of small arrays of one shape and dtype: every rank combines everything for itself, in the same order.

    One meeting instead of two. Everything is prepared once, because here a microsecond counts.
    """

    def __init__(self, shape, dtype, comm, reduction, operation):
        check_one_node(comm, operation)
        self.comm, self.reduction, self.operation = comm, reduction, operation
        self.shape, self.dtype, self.views = shape, dtype, None
        self.plain = comm.size == 2 and not reduction.wide and not reduction.mean
        self.nbytes = one_shot_traffic(math.prod(shape), dtype.itemsize, comm.size).bytes

    def __call__(self, x, out):
        comm, reduction = self.comm, self.reduction
        if self.views is None:  # now that the ranks have compared what they call
            comm.arena = comm.arena or Arena(comm, self.operation)
            self.views = comm.arena.views(self.shape, self.dtype)
        span = stopwatch(self.operation)
        slots = self.views[comm.arena.next_turn()]
        slots[comm.rank][...] = x  # from here on `out` may be written, whatever it overlaps
        span("communication")
        comm.arrive(self.operation)
        span("wait")
        if self.plain:
            reduction.combine(slots[0], slots[1], out)
        else:
            reduction.over(slots, out, comm.size)
        span("communication")
        comm.sent.bytes += self.nbytes
        comm.sent.rounds += 1


def blocks(sources, targets, comm):
    """This rank's slice in blocks: (that of every source, where its sum goes first, and where it is copied to)."""
    start, stop = split_bounds(sources[0].size, comm.size, comm.rank)
    step = BLOCK_BYTES // sources[0].itemsize
    for at in range(start, stop, step):
        block = slice(at, min(at + step, stop))
        total, *others = [target[block] for target in targets]
        yield [source[block] for source in sources], total, others


def reduce_blocks(blocks, comm, reduction):
    for sources, total, others in blocks:
        reduction.over(sources, total, comm.size)  # total may be the first source: that is read before it is written
        for other in others:
            other[...] = total


def stopwatch(operation):
    """A function span(kind) that records the time since it was last called, or since this call, as that."""
    recorder = current().recorder
    if recorder is None:
        return _nothing
    last = recorder.clock()

    def span(kind):
        nonlocal last
        start, last = last, recorder.clock()
        recorder.span(kind, operation, start, last)

    return span


def _nothing(kind):
    pass


def _count(comm, traffic):
    comm.sent.bytes += traffic.bytes
    comm.sent.rounds += traffic.rounds


# --- what it costs: bytes that a rank reads from or writes to the memory of others; a round is a meeting ---------


def all_reduce_traffic(elements, itemsize, ranks, rank):
    """What `rank` moves in an all-reduce in place, as Traffic: its slice from and to each of the others."""
    start, stop = split_bounds(elements, ranks, rank)
    return Traffic(0, 2 * (ranks - 1) * (stop - start) * itemsize, 2)


def one_shot_traffic(elements, itemsize, ranks):
    """What a rank moves in an all-reduce of at most ONE_SHOT_BYTES, as Traffic: all of the others' numbers."""
    return Traffic(0, (ranks - 1) * elements * itemsize, 1)
