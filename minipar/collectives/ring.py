"""Ring all-reduce: every rank talks to its two neighbours only, and no rank ever sends more than its share.

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

SEGMENT_BYTES = 256 * 1024  # chunks travel in pieces that stay in the cache between their arrival and the addition


def all_reduce(flat, comm, combine, operation):
    """Reduce the contiguous 1-D array `flat` over all ranks, in place."""
    chunks = cut(flat, split_sizes(flat.size, comm.size))
    reduce_scatter(chunks, comm, combine, operation)
    all_gather(chunks, comm, operation)


def reduce_scatter(chunks, comm, combine, operation):
    """Afterwards chunks[comm.rank] is reduced over all ranks; the other chunks hold what passed through.

    chunks: one contiguous 1-D array a rank, the same sizes on every rank. combine(a, b, out=a): numpy.add, say.
    """
    for step in range(1, comm.size):
        mine, theirs = chunks[(comm.rank - step) % comm.size], chunks[(comm.rank - step - 1) % comm.size]
        shift(mine, theirs, comm, operation, combine)


def all_gather(chunks, comm, operation):
    """Afterwards all chunks are as they were on their owners: chunk r belongs to rank r."""
    for step in range(comm.size - 1):
        mine, theirs = chunks[(comm.rank - step) % comm.size], chunks[(comm.rank - step - 1) % comm.size]
        shift(mine, theirs, comm, operation)


def shift(outgoing, incoming, comm, operation, combine=None):
    """One round: `outgoing` to the right neighbour, and from the left into `incoming`, or combined with it.

    Both travel in segments; while one segment is combined the next one is under way. Nothing larger is ever allocated.
    """
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sends = [comm.isend(piece, right, operation) for piece in segments(outgoing)]
    if combine is None:
        receives = [comm.irecv(piece, left, operation) for piece in segments(incoming)]
        for request in receives + sends:
            request.wait()
        return
    targets = segments(incoming)
    scratch = [array_module(incoming).empty_like(piece) for piece in targets[:2]]
    landing = [scratch[i % 2][: piece.size] for i, piece in enumerate(targets)]
    arrivals = [comm.irecv(piece, left, operation) for piece in landing[:2]]
    for i, target in enumerate(targets):
        arrivals[i].wait()
        combine(target, landing[i], out=target)
        if i + 2 < len(targets):
            arrivals.append(comm.irecv(landing[i + 2], left, operation))
    for request in sends:
        request.wait()


def cut(flat, sizes):
    """The consecutive pieces of `flat` that are `sizes` long, as views."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(flat[start : start + size])
        start += size
    return pieces


def segments(chunk):
    """`chunk` in pieces of SEGMENT_BYTES; an empty chunk has none, so that nothing is sent for it."""
    step = max(1, SEGMENT_BYTES // chunk.dtype.itemsize)
    return [chunk[i : i + step] for i in range(0, chunk.size, step)]


# --- what it costs ---------------------------------------------------------------------------------------------------


def all_reduce_bytes(elements, itemsize, ranks, rank):
    """Bytes that `rank` sends in an all-reduce: all chunks but one, twice; 2 (n-1)/n of the array where n divides it.

    In the reduce-scatter it never sends its own chunk, in the all-gather never its right neighbour's.
    """
    sizes = split_sizes(elements, ranks)
    return (2 * elements - sizes[rank] - sizes[(rank + 1) % ranks]) * itemsize if ranks > 1 else 0
