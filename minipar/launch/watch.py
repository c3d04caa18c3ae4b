"""Say which rank was killed.

A process that is killed cannot speak, and MPICH's launcher then kills the others at once and names whichever it found
first. So each node has a watcher, a process out of the launcher's reach, and every rank holds a socket to it. When a
process dies, the kernel closes its sockets together: the one that tells the launcher, and the one that tells the
watcher. The first that closes without a farewell is therefore the first that died. (The ends of the processes are
reported later and in any order.)
"""

import os
import select
import socket
import sys
from contextlib import contextmanager

START = 10.0  # seconds that the watcher may take to start
LEAVE, REASON_SAID = b".", b"!"
connection = None  # this process's socket to its node's watcher; threads share it as they share the process


@contextmanager
def over(local, rank, size):
    """Have this rank watched inside the `with` block, where the system can do it (Linux); in a nested run once only.

    local: mpi4py communicator of the node's ranks; rank, size: this rank's number in the world, and how many there are.
    """
    global connection
    if connection is not None or sys.platform != "linux":
        yield
        return
    connection = _connect(local, rank, size)
    try:
        yield
    finally:
        tell(LEAVE)
        connection.close()
        connection = None


def tell(word):
    """LEAVE: this rank ends in order. REASON_SAID: what went wrong has been said, and all ranks will end."""
    if connection is not None:
        try:
            connection.send(word)
        except OSError:
            pass  # the watcher has ended: somebody else has said the reason


def _connect(local, rank, size):
    first = local.Get_rank() == 0
    if first:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("")  # Linux chooses a name that is in no file system
        listener.listen(local.Get_size())
        _start(listener, local.Get_size(), size)
    address = local.bcast(listener.getsockname() if first else None)
    if first:
        listener.close()
    ours = socket.socket(socket.AF_UNIX)
    ours.settimeout(START)
    ours.connect(address)
    ours.send(rank.to_bytes(4, "big"))
    ours.recv(1)  # the watcher knows this rank from here on
    local.Barrier()  # and now all of them
    return ours


def _start(listener, ranks, size):
    command = [sys.executable, "-S", "-E", __file__, str(listener.fileno()), str(ranks), str(size)]
    os.set_inheritable(listener.fileno(), True)
    os.posix_spawn(sys.executable, command, os.environ, setsid=True)
    os.set_inheritable(listener.fileno(), False)


def watch(listener, ranks, size):
    """Wait until all `ranks` of this node have left, or one is gone without a word: then say which."""
    poll, members = select.epoll(), {}
    poll.register(listener, select.EPOLLIN)
    present = ranks
    while present:
        # One at a time: epoll keeps events in their order, however late this process wakes up.
        descriptor = poll.poll(maxevents=1)[0][0]
        if descriptor == listener.fileno():
            member, _ = listener.accept()
            members[member.fileno()] = member, int.from_bytes(member.recv(4), "big")
            poll.register(member, select.EPOLLIN)
            member.send(b"+")
            continue
        member, rank = members[descriptor]
        word = _receive(member)
        if word == LEAVE:
            poll.unregister(member)
            present -= 1
        else:
            if word != REASON_SAID and len(members) == ranks:
                text = f"minipar: rank {rank} of {size} died without a word: killed, or out of memory?"
                print(text, file=sys.stderr, flush=True)
            return


def _receive(member):
    try:
        return member.recv(1)
    except ConnectionResetError:
        return b""


if __name__ == "__main__":
    watch(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
