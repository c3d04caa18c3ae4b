"""Ring all-reduce: every rank talks to its two neighbours only, and no rank ever sends more than its share.

                ┌──→ rank 0 ──→ rank 1 ──→ rank 2 ──┐
                └───────────────────────────────────┘

Cut the array into as many chunks as there are ranks. In each round every rank passes one chunk to its right and takes
one from its left. First the chunks are summed up on their way round (reduce-scatter), then the sums go round once more
(all-gather). With three ranks and chunks a, b, c (rank 0 holds a0 b0 c0, and so on):

    reduce-scatter            round 1                      round 2
      rank 0   a0 b0 c0   sends c0, takes b2 → b02     sends b02, takes a12 → a = a1+a2+a0   done: a
      rank 1   a1 b1 c1   sends a1, takes c0 → c01     sends c01, takes b02 → b = b2+b0+b1   done: b
      rank 2   a2 b2 c2   sends b2, takes a1 → a12     sends a12, takes c01 → c = c0+c1+c2   done: c

    all-gather: a, b and c go round in the same way, copied instead of added.

That is 2 (n - 1) rounds, in which a rank sends 2 (n - 1) / n of the array: nearly independent of n, and the least that
any algorithm can do. Each sum is formed in one place and copied, so all ranks end with the same bits.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from minipar.arrays import array_module, split_sizes
from minipar.comm import Traffic

# Chunks travel in pieces, so that one is combined, still in the cache, while the next is under way. Smaller pieces cost
# more in messages than they save: 16 MiB on 2 ranks took 1.3 times as long with 256 KiB over MPI, 1.1 on threads.
SEGMENT_BYTES = 1024 * 1024


def all_reduce(source, target, comm, combine, operation):
    """Reduce the `source` of all ranks into every rank's `target`, contiguous 1-D arrays; they may be the same one.

    All algorithms of this folder have this form. combine(a, b, out=c): numpy.add, say.
    """
    sizes = split_sizes(source.size, comm.size)
    totals = cut(target, sizes)
    reduce_chunks(cut(source, sizes), totals, comm, combine, operation)
    all_gather(totals, comm, operation)


def reduce_scatter(sources, own, comm, combine, operation):
    """Reduce sources[r] of all ranks into `own` of rank r: contiguous 1-D arrays."""
    if comm.size == 1:
        own[...] = sources[0]
        return
    # Partial sums of the other chunks only pass through: those of one round can be overwritten two rounds later.
    passing = [array_module(own).empty(max(sources.sizes), own.dtype) for _ in range(2)]
    targets = [passing[(comm.rank - i) % comm.size % 2][:size] for i, size in enumerate(sources.sizes)]
    targets[comm.rank] = own
    reduce_chunks(sources, targets, comm, combine, operation)


def reduce_chunks(sources, targets, comm, combine, operation):
    """Reduce chunk r of all ranks to targets[r] of rank r. There must be at least two ranks.

    sources, targets: one contiguous 1-D array a rank, of the same sizes on every rank. A partial sum of chunk i on its
    way round passes through targets[i]; sources are read only.
    """
    outgoing = sources[(comm.rank - 1) % comm.size]
    for step in range(2, comm.size + 1):
        i = (comm.rank - step) % comm.size
        shift(outgoing, targets[i], comm, operation, combine, sources[i])
        outgoing = targets[i]


def all_gather(chunks, comm, operation):
    """Fill in all chunks from their owners: chunks[r] belongs to rank r."""
    for step in range(comm.size - 1):
        mine, theirs = (comm.rank - step) % comm.size, (comm.rank - step - 1) % comm.size
        shift(chunks[mine], chunks[theirs], comm, operation)


def shift(outgoing, target, comm, operation, combine=None, addend=None):
    """One round: `outgoing` to the right neighbour; what comes from the left, combined with `addend`, into `target`."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    exchange(outgoing, right, target, left, comm, operation, combine, addend)


def exchange(outgoing, dest, target, source, comm, operation, combine=None, addend=None):
    """Send one array and receive another at the same time, in segments: a round of every algorithm that has them."""
    comm.sent.rounds += 1
    sends = [comm.isend(piece, dest, operation) for piece in segments(outgoing)]
    receive(target, source, comm, operation, combine, addend)
    for request in sends:
        request.wait()


def receive(target, source, comm, operation, combine=None, addend=None):
    """Receive into `target` what rank `source` sends in segments; or combine(addend, what it sends)."""
    if combine is not None:
        receive_and_combine(segments(addend), segments(target), comm, source, operation, combine)
        return
    for request in [comm.irecv(piece, source, operation) for piece in segments(target)]:
        request.wait()


def receive_and_combine(addends, targets, comm, source, operation, combine):
    """targets[i] = combine(addends[i], message i from rank `source`), with two messages under way at a time."""
    landing = [array_module(target).empty_like(target) for target in targets[:2]]

    def start(i):
        return comm.irecv(landing[i % 2][: targets[i].size], source, operation)

    arrivals = [start(i) for i in range(len(landing))]
    for i, target in enumerate(targets):
        arrivals[i % 2].wait()
        combine(addends[i], landing[i % 2][: target.size], out=target)
        if i + 2 < len(targets):
            arrivals[i % 2] = start(i + 2)


class cut(list):
    """The consecutive pieces of the 1-D array `flat` that are `sizes` long, as views."""

    def __init__(self, flat, sizes):
        self.flat, self.sizes, start = flat, sizes, 0
        for size in sizes:
            self.append(flat[start : start + size])
            start += size


def segments(chunk):
    """`chunk` in pieces of SEGMENT_BYTES; an empty chunk has none, so that nothing is sent for it."""
    step = max(1, SEGMENT_BYTES // chunk.dtype.itemsize)
    return [chunk[i : i + step] for i in range(0, chunk.size, step)]


# --- what it costs ---------------------------------------------------------------------------------------------------
# `sizes`: elements of each rank's chunk. Where all are equal, S bytes together, a rank sends (n - 1) / n x S in n - 1
# rounds; where they differ it depends on the rank, because each leaves out another chunk.


def reduce_scatter_traffic(sizes, itemsize, rank):
    """What `rank` sends in a reduce-scatter, as Traffic: every chunk but its own."""
    return _traffic(sizes, rank, itemsize)


def all_gather_traffic(sizes, itemsize, rank):
    """What `rank` sends in an all-gather, as Traffic: every chunk but its right neighbour's."""
    return _traffic(sizes, (rank + 1) % len(sizes), itemsize)


def all_reduce_traffic(elements, itemsize, ranks, rank):
    """What `rank` sends in an all-reduce of `elements`, as Traffic: 2 (n - 1) / n of the array where n divides it."""
    sizes = split_sizes(elements, ranks)
    return reduce_scatter_traffic(sizes, itemsize, rank) + all_gather_traffic(sizes, itemsize, rank)


def message_count(elements, itemsize):
    """Messages that `elements` travel in."""
    return -(-elements // max(1, SEGMENT_BYTES // itemsize))


def _traffic(sizes, left_out, itemsize):
    sent = [size for rank, size in enumerate(sizes) if rank != left_out]
    return Traffic(sum(message_count(size, itemsize) for size in sent), sum(sent) * itemsize, len(sizes) - 1)
