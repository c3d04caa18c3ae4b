"""Binomial trees: in every round each rank that has the array passes it on, so that their number doubles.

8 ranks, root 0:   round 1: 0 → 4     round 2: 0 → 2, 4 → 6     round 3: 0 → 1, 2 → 3, 4 → 5, 6 → 7

Read backwards this is a reduction: who passed the array on now takes the other's and combines it with its own. Only
ceil(log2 n) rounds, so a tree is good where the latency of a message counts, but each carries the whole array.
"""

from minipar.collectives.ring import message_count, receive, segments
from minipar.comm import Traffic


def all_reduce(source, target, comm, combine, operation):
    """As ring.all_reduce: reduce to rank 0, then broadcast: 2 ceil(log2 n) rounds of the whole array."""
    reduce(source, target, comm, 0, combine, operation)
    broadcast(target, comm, 0, operation)


def broadcast(flat, comm, root, operation):
    """Fill the contiguous 1-D array `flat` of every rank with root's: ceil(log2 n) rounds."""
    for reach in reversed(reaches(comm.size)):
        comm.sent.rounds += 1
        peer, nearer = branch(comm, root, reach)
        if peer is not None:
            send(flat, peer, comm, operation) if nearer else receive(flat, peer, comm, operation)


def reduce(source, target, comm, root, combine, operation):
    """Reduce the `source` of all ranks to root's `target`; elsewhere `target` is used on the way."""
    if target is not source:
        target[...] = source
    for reach in reaches(comm.size):
        comm.sent.rounds += 1
        peer, nearer = branch(comm, root, reach)
        if peer is not None:
            if nearer:
                receive(target, peer, comm, operation, combine, target)
            else:
                send(target, peer, comm, operation)


def reaches(ranks):
    """How far the branches of each round reach, nearest first: 1, 2, 4, ..."""
    return [1 << i for i in range((ranks - 1).bit_length())]


def branch(comm, root, reach):
    """(the rank at the other end of this rank's branch of that length, or None; whether this end is nearer the root)"""
    place = (comm.rank - root) % comm.size  # places count from the root
    nearer = place % (2 * reach) == 0
    peer = place + reach if nearer else place - reach
    return (None if place % reach or peer >= comm.size else (peer + root) % comm.size), nearer


def send(array, dest, comm, operation):
    """Send `array` to rank `dest` in segments."""
    for request in [comm.isend(piece, dest, operation) for piece in segments(array)]:
        request.wait()


# --- what it costs ---------------------------------------------------------------------------------------------------


def broadcast_traffic(elements, itemsize, ranks, rank, root=0):
    """What `rank` sends in a broadcast, as Traffic: the whole array to every branch that starts here."""
    place = (rank - root) % ranks
    branches = sum(place % (2 * reach) == 0 and place + reach < ranks for reach in reaches(ranks))
    return Traffic(branches * message_count(elements, itemsize), branches * elements * itemsize, len(reaches(ranks)))


def reduce_traffic(elements, itemsize, ranks, rank, root=0):
    """What `rank` sends in a reduction, as Traffic: the whole array once, unless it is the root."""
    sends = rank != root
    return Traffic(sends * message_count(elements, itemsize), sends * elements * itemsize, len(reaches(ranks)))


def all_reduce_traffic(elements, itemsize, ranks, rank):
    """What `rank` sends in an all-reduce, as Traffic."""
    return reduce_traffic(elements, itemsize, ranks, rank) + broadcast_traffic(elements, itemsize, ranks, rank)
