"""Say which rank was killed.

A process that is killed cannot speak, and MPICH's launcher kills the others at once, then names whichever it found
first. So the first rank of each node starts a watcher outside the launcher's reach: it learns of a death from the
kernel, in order, says who it was, and ends. Ranks that end in order, or say themselves what went wrong, dismiss it.
"""

import os
import select
import signal
import sys

watcher = None  # process id of this node's watcher: one for all ranks of the node, so no rank's own


def start(local, rank, size):
    """Start the watcher of a node, where the system can tell of deaths (Linux).

    local: mpi4py communicator of the node's ranks; rank, size: this rank's number in the world, and how many there are.
    """
    global watcher
    pids = local.allgather((rank, os.getpid()))
    if local.Get_rank() == 0 and hasattr(os, "pidfd_open"):
        command = [sys.executable, "-S", "-E", __file__, str(size), *(f"{r}:{pid}" for r, pid in pids)]
        watcher = os.posix_spawn(sys.executable, command, os.environ, setsid=True)
    watcher = local.bcast(watcher)


def dismiss():
    """All is in order, or the reason has been said."""
    if watcher is not None:
        try:
            os.kill(watcher, signal.SIGTERM)
        except ProcessLookupError:
            pass


def watch(size, ranks):
    """Wait for the first death among `ranks`, a dict of process id -> rank, and say whose it was."""
    poll, names = select.epoll(), {}
    for pid, rank in ranks.items():
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        names[descriptor] = f"rank {rank} of {size} (process {pid})"
        poll.register(descriptor, select.EPOLLIN)
    first = poll.poll(maxevents=1)[0][0]  # epoll keeps events in their order, however late this process wakes up
    print(f"minipar: {names[first]} died without a word: killed, or out of memory?", file=sys.stderr, flush=True)


if __name__ == "__main__":
    watch(int(sys.argv[1]), {int(pid): int(rank) for rank, pid in (pair.split(":") for pair in sys.argv[2:])})
