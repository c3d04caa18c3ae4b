"""Recursive halving and doubling: the ring's few bytes in a tree's few rounds.

In each round a rank and its partner split what they share: each keeps one half, sends the other half, and combines.
With 4 ranks and chunks a b c d:

    halving     round 1, partner 2 away    ranks 0, 1 keep a b      ranks 2, 3 keep c d
                round 2, partner 1 away    rank 0 keeps a, 1: b     rank 2 keeps c, 3: d
    doubling    round 3, partner 1 away    ranks 0, 1 have a b      ranks 2, 3 have c d
                round 4, partner 2 away    all ranks have a b c d

2 log2 n rounds and 2 (n - 1) / n of the array a rank. Ranks beyond a power of two hand their array to a rank inside it
first, and get the result at the end. Each sum is formed in one place and copied: the same bits everywhere.
Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
"""

from itertools import accumulate

from minipar.arrays import split_sizes
from minipar.collectives.ring import exchange, message_count, receive
from minipar.collectives.tree import send
from minipar.comm import Traffic


def all_reduce(source, target, comm, combine, operation):
    """As ring.all_reduce, for any number of ranks."""
    rank, inside = comm.rank, largest_power_of_two(comm.size)
    outside = comm.size - inside  # so many ranks have one more array to take care of
    if rank >= inside:
        comm.sent.rounds += 1
        send(source, rank - inside, comm, operation)
    elif outside:
        comm.sent.rounds += 1
        if rank < outside:
            receive(target, rank + inside, comm, operation, combine, source)
            source = target
    if rank < inside:
        rounds = halvings(source.size, inside, rank)
        for distance, kept, given in rounds:
            exchange(
                source[given], rank ^ distance, target[kept], rank ^ distance, comm, operation, combine, source[kept]
            )
            source = target
        for distance, kept, given in reversed(rounds):
            exchange(target[kept], rank ^ distance, target[given], rank ^ distance, comm, operation)
    else:
        comm.sent.rounds += 2 * (inside.bit_length() - 1)
    if outside:
        comm.sent.rounds += 1
        if rank >= inside:
            receive(target, rank - inside, comm, operation)
        elif rank < outside:
            send(target, rank + inside, comm, operation)


def largest_power_of_two(ranks):
    """The largest power of two that is not above `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def halvings(elements, ranks, rank):
    """[(distance of the partner, slice that `rank` keeps, slice that it gives away)] of every round of halving."""
    bounds = [0, *accumulate(split_sizes(elements, ranks))]
    rounds, first, distance = [], 0, ranks // 2
    while distance:
        middle, last = first + distance, first + 2 * distance
        low, high = slice(bounds[first], bounds[middle]), slice(bounds[middle], bounds[last])
        rounds.append((distance, high, low) if rank & distance else (distance, low, high))
        first, distance = first + (rank & distance), distance // 2
    return rounds


def all_reduce_traffic(elements, itemsize, ranks, rank):
    """What `rank` sends in an all-reduce, as Traffic: 2 (n - 1) / n of the array where n is a power of two."""
    inside = largest_power_of_two(ranks)
    sizes = [elements] if rank >= inside or rank < ranks - inside else []
    if rank < inside:
        for _, kept, given in halvings(elements, inside, rank):
            sizes += [kept.stop - kept.start, given.stop - given.start]
    rounds = 2 * (inside.bit_length() - 1) + 2 * (ranks > inside)
    return Traffic(sum(message_count(size, itemsize) for size in sizes), sum(sizes) * itemsize, rounds)
