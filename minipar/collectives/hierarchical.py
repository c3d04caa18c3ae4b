"""All-reduce where links inside a node are faster than those between nodes.

    inside each node    reduce-scatter: local rank i has the node's sum of slice i
    between nodes       all-reduce of slice i among the ranks with local number i: 1 / (ranks a node) of the array each
    inside each node    all-gather of the slices

Between nodes every rank sends 2 (m - 1) / m of S / k bytes, with m nodes of k ranks, where a ring over all ranks passes
nearly 2 S over each link between nodes. Where nodes have different numbers of ranks, there are as many slices as the
smallest node has ranks.
"""

from minipar.arrays import split_sizes
from minipar.collectives import ring
from minipar.comm import Traffic


def all_reduce(source, target, comm, combine, operation):
    """As ring.all_reduce; comm.nodes says which ranks are on one node."""
    node, peers, sizes = arrangement(source.size, comm.nodes, comm.rank)
    inside, slices = comm.subgroup(node), ring.cut(target, sizes)
    if inside.size > 1:
        ring.reduce_chunks(ring.cut(source, sizes), slices, inside, combine, operation)
    elif source is not target:
        target[...] = source
    if len(peers) > 1:
        between, own = comm.subgroup(peers), slices[inside.rank]
        ring.all_reduce(own, own, between, combine, operation)
    ring.all_gather(slices, inside, operation)


def arrangement(elements, nodes, rank):
    """(ranks of this node, ranks of all nodes that share this rank's slice, elements of each rank's slice)."""
    members = {}
    for r, node in enumerate(nodes):
        members.setdefault(node, []).append(r)
    own, count = members[nodes[rank]], min(map(len, members.values()))
    place = own.index(rank)
    peers = [ranks[place] for ranks in members.values()] if place < count else []
    return own, peers, split_sizes(elements, count) + [0] * (len(own) - count)


def all_reduce_traffic(elements, itemsize, nodes, rank):
    """What `rank` sends in an all-reduce, as Traffic."""
    node, peers, sizes = arrangement(elements, nodes, rank)
    place = node.index(rank)
    total = ring.all_gather_traffic(sizes, itemsize, place)
    if len(node) > 1:
        total += ring.reduce_scatter_traffic(sizes, itemsize, place)
    if len(peers) > 1:
        total += ring.all_reduce_traffic(sizes[place], itemsize, len(peers), peers.index(rank))
    return total if len(node) > 1 or len(peers) > 1 else Traffic()
