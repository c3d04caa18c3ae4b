"""Collectives in which every pair of ranks has a message of its own.

all_to_all: in round i each rank sends to the i-th rank on its right and receives from the i-th on its left, so that
nobody gets two messages at a time. gather, scatter: the root talks to every rank.
"""

from minipar.collectives.ring import exchange, message_count, receive
from minipar.collectives.tree import send
from minipar.comm import Traffic


def all_to_all(outgoing, incoming, comm, operation):
    """outgoing[r] goes to rank r; incoming[r] comes from rank r: contiguous 1-D arrays."""
    incoming[comm.rank][...] = outgoing[comm.rank]
    for distance in range(1, comm.size):
        right, left = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        exchange(outgoing[right], right, incoming[left], left, comm, operation)


def gather(own, pieces, comm, root, operation):
    """`own` of every rank, to the root's pieces[r]; elsewhere `pieces` is not used."""
    comm.sent.rounds += comm.size > 1
    if comm.rank != root:
        send(own, root, comm, operation)
        return
    pieces[root][...] = own
    for r in range(comm.size):
        if r != root:
            receive(pieces[r], r, comm, operation)


def scatter(pieces, own, comm, root, operation):
    """The root's pieces[r], to `own` of rank r."""
    comm.sent.rounds += comm.size > 1
    if comm.rank != root:
        receive(own, root, comm, operation)
        return
    own[...] = pieces[root]
    for r in range(comm.size):
        if r != root:
            send(pieces[r], r, comm, operation)


def all_to_all_traffic(sizes, itemsize, rank):
    """What `rank` sends, as Traffic: all that is not for itself; sizes: elements for each rank."""
    sent = [size for r, size in enumerate(sizes) if r != rank]
    return Traffic(sum(message_count(size, itemsize) for size in sent), sum(sent) * itemsize, len(sizes) - 1)
