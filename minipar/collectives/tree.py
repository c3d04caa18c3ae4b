"""Broadcast along a binomial tree: in every round each rank that has the array passes it on, so their number doubles.

8 ranks, root 0:   round 1: 0 → 4     round 2: 0 → 2, 4 → 6     round 3: 0 → 1, 2 → 3, 4 → 5, 6 → 7
"""


def broadcast(flat, comm, root, operation):
    """Fill the contiguous 1-D array `flat` of every rank with root's: ceil(log2 n) rounds."""
    place = (comm.rank - root) % comm.size  # places count from the root
    reach = 1 << (comm.size - 1).bit_length()
    while reach > 1:
        reach //= 2
        if place % (2 * reach) == 0 and place + reach < comm.size:
            comm.send(flat, (place + reach + root) % comm.size, operation)
        elif place % (2 * reach) == reach:
            comm.recv(flat, (place - reach + root) % comm.size, operation)
