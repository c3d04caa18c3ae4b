"""Ranks that are MPI processes, over mpi4py's buffer interface.

Before its payload every message sends a small header: what it is for, dtype, size, the sender's clock. The receiver
compares it with what it expects, so that a mismatch is an error with two names in it instead of a wrong number.
Waiting is done by testing: first yielding the core at once, then in short sleeps, so that ranks which outnumber the
cores do not take each other's time, and no wait lasts longer than its limit.
"""

import os
import platform
import struct
import threading
import time
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
from mpi4py import MPI

from minipar.arrays import array_module, to_host
from minipar.comm.board import BYTES, Board
from minipar.comm.communicator import TAGS, Communicator, Request, clock, disagreement, mismatch
from minipar.comm.memory import Arena
from minipar.context import current
from minipar.errors import CommunicationTimeout, DeadlockError, LaunchError, MessageMismatch

# A header is a stamp and a claim. Both sides make the claim, and it must be the same, byte for byte.
STAMP = struct.Struct("<dq")  # sender's clock, message number
CLAIM = struct.Struct("<q16s88s")  # bytes, dtype, operation

# Numbers are written, then a flag that says so. x86 processors let nobody see these in another order; others may, so
# there ranks meet by messages.
STORES_STAY_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64")
SPINS = 100  # looks at a flag before the core is offered to others: about as long as a small message takes

give_way = getattr(os, "sched_yield", lambda: time.sleep(0))  # not every system has it


@lru_cache(maxsize=4096)  # a training step says the same few hundred things again and again
def claim(operation, dtype, nbytes):
    return CLAIM.pack(nbytes, str(dtype).encode(), operation.encode()[:88])


def read_claim(packed):
    nbytes, dtype, operation = CLAIM.unpack(packed)
    return operation.rstrip(b"\0").decode(errors="replace"), dtype.rstrip(b"\0").decode(), nbytes


class Overseer(threading.Thread):
    """Ends the job if `work`, (deadline, comm, operation, bytes), is still there when its time has come."""

    def __init__(self):
        super().__init__(daemon=True)
        self.work = None

    def run(self):
        while True:
            time.sleep(0.2)
            work = self.work
            if work and clock() > work[0]:
                _, comm, operation, nbytes = work
                raise CommunicationTimeout(
                    f"rank {comm.ranks[comm.rank]} is in the MPI library's {operation} ({nbytes} bytes) with ranks "
                    f"{comm.ranks}, which has not ended in {comm.timeout:g} s."
                )


class _Arrival:
    """What a rank waits for in a meeting."""

    def __init__(self, comm, operation, peer):
        self.comm, self.operation, self.peer = comm, operation, peer

    def describe(self):
        ranks = self.comm.ranks
        return f"rank {ranks[self.comm.rank]} waits in {self.operation} for rank {ranks[self.peer]}"


def check_room(nbytes):
    """Raise LaunchError if the system has less shared memory left: writing beyond it would kill the process."""
    if os.path.isdir("/dev/shm"):
        system = os.statvfs("/dev/shm")
        free = system.f_bavail * system.f_frsize
        if nbytes > free:
            raise LaunchError(
                f"{nbytes:,} bytes of shared memory are needed, but /dev/shm has {free:,} left: free some, or give it "
                "more (a container: docker run --shm-size=2g)."
            )


def make_board(local, members):
    """A Board of the ranks of `local`, an mpi4py communicator inside a node; members: their numbers in the world."""
    check_room(BYTES * len(members))
    window = MPI.Win.Allocate_shared(BYTES, 1, comm=local)
    board = Board({rank: window.Shared_query(r)[0] for r, rank in enumerate(members)})
    board.memories[members[local.Get_rank()]][:] = bytes(BYTES)
    board.window = window  # the memory lasts as long as this does
    local.Barrier()
    return board


class MPIRequest(Request):
    """`parts`: the MPI requests of header and payload. `host`: where they read or write; `array` itself on the CPU."""

    __slots__ = ("header", "host", "parts")

    def __init__(self, comm, array, peer, operation, tag, sends):
        super().__init__(comm, array, peer, operation, tag, sends)
        # A GPU array travels through host memory: an MPI that is not CUDA-aware would crash on it.
        if isinstance(array, (np.ndarray, np.generic)):
            self.host = array
        else:
            self.host = to_host(array) if sends else np.empty(array.shape, array.dtype)

    def done(self):
        return all(part.Test() for part in self.parts)

    def _wait(self):
        if not self.sends and self.header is not None:
            self.comm.poll(self.parts[0].Test, self)
            self._check_header()
        self.comm.poll(self.parts[-1].Test, self)
        self.comm.poll(self.parts[0].Test, self)
        if not self.sends and self.host is not self.array:
            self.array[...] = array_module(self.array).asarray(self.host)

    def _check_header(self):
        comm, source = self.comm, self.comm.ranks[self.peer]
        self.ready, number = STAMP.unpack_from(self.header)
        theirs, ours = self.header[STAMP.size :], claim(self.operation, self.array.dtype, self.array.nbytes)
        if theirs != ours:
            raise mismatch(comm, source, read_claim(theirs), read_claim(ours))
        recorder = current().recorder
        if recorder is not None:
            comm.poll(self.parts[-1].Test, self)
            me = comm.ranks[comm.rank]
            recorder.message(source << 40 | number, source, me, self.array.nbytes, self.ready, clock(), self.operation)


class MPICommunicator(Communicator):
    """A rank of an mpi4py intracommunicator. `check_headers=False` sends no headers: for measuring what they cost.

    nodes: the node of each rank, by default one for all; board: a Board of this node's ranks, or None.
    """

    transport = "MPI"

    def __init__(self, mpi, timeout=60.0, check_headers=True, nodes=None, board=None):
        super().__init__(mpi.Get_rank(), range(mpi.Get_size()), timeout, nodes, check_headers)
        self.mpi, self.board, self.own_native, self.windows = mpi, board, mpi, []

    def _begin(self):
        super()._begin()
        self.own_native = self.overseer = None

    def native(self):
        if self.own_native is None:
            self.barrier("native communicator")  # inside MPI nothing would end the wait for a rank that does not come
            group = self.mpi.Get_group().Incl(self.ranks)
            self.own_native = self.mpi.Create_group(group, self.context % 32768)
        return self.own_native

    def poll(self, test, wait):
        """Return when `test()` is true; wait.describe() says what this is for, and to whom."""
        if test():
            return
        start, polls, posted, looked, me = clock(), 0, False, 0.0, self.ranks[self.rank]
        peer, ended = self.ranks[wait.peer], None  # since when we know that the peer has ended
        while not test():
            polls += 1
            if polls < 300:
                give_way()
                continue
            waited = clock() - start
            time.sleep(min(1e-3, waited / 20))  # wakes at most 5 % of the wait too late
            if waited > looked + 0.02:
                looked = waited
                self._compare()
                if ended is None and self.board and peer in self.board.ended():
                    ended = waited
                if ended is not None and waited > ended + 1:  # what it sent at last may still be on its way
                    raise DeadlockError(f"{wait.describe()}, which has ended.")
                if self.board and not posted and waited > min(0.5, self.timeout / 2):
                    self.board.waits(me, wait.describe())
                    posted = True
            if waited > self.timeout:
                raise CommunicationTimeout(self._too_long(wait))
        if posted:  # after an error it stays, for the others to read
            self.board.waits(me, "")

    def finish(self):
        """Return when all ranks of the world, or of this node, have come to their end, which has no time limit.

        One that still waits for another finds it here and fails; outside, the launcher might end it before it can say
        so. Raises MessageMismatch if another has ended after another number of collectives.
        """
        me, ended = self.ranks[self.rank], {}
        if self.board:
            self.board.end(me, self.calls)
        while self.board and len(ended) < len(self.board.memories):
            time.sleep(1e-4)
            ended = self.board.ended()
            for rank, calls in ended.items():
                if calls != self.calls:
                    raise MessageMismatch(
                        f"rank {rank} has ended after {calls} collectives of all ranks, rank {me} after {self.calls}: "
                        "every rank must call the same."
                    )

    def _too_long(self, wait):
        me, board = self.ranks[self.rank], self.board.waiting() if self.board else {}
        others = "; ".join(text or f"rank {rank} waits for nobody" for rank, text in board.items() if rank != me)
        others = f" Meanwhile {others}." if others else ""
        return f"{wait.describe()}; nothing came in {self.timeout:g} s.{others}"

    def agree(self, claim):
        if self.board is None or not self.check_headers:
            return
        self.calls += 1
        slot, key = self.context * 7 + self.calls, self.context << 40 | self.calls
        self.call = slot, key, claim
        self.board.post(self.ranks[self.rank], slot, key, claim)
        self._compare()

    def _compare(self):
        if self.call is None:
            return
        slot, key, claim = self.call
        calls = self.board.calls(self.ranks, slot, key)
        if any(other != claim for other in calls.values()):
            time.sleep(1e-3)  # an entry may have been caught half written
            calls = self.board.calls(self.ranks, slot, key)
            if any(other != claim for other in calls.values()):
                raise disagreement(calls)

    def meet(self, operation, offer=0):
        if self.arena is None:
            self.arena = Arena(self, operation)
        offers = self.arena.offers[(self.meetings + 1) % 2]
        offers[self.rank][0] = offer
        self.arrive(operation)
        return [place[0] for place in offers]

    def arrive(self, operation):
        """Return when all ranks have come; the arena must be there."""
        self.meetings = turn = self.meetings + 1
        flags = self.arena.flags
        flags[self.rank][0] = turn
        if not STORES_STAY_IN_ORDER:
            self.barrier(operation)
        for flag in flags:
            if flag[0] < turn:
                self._wait_for(flag, turn, operation)

    def _wait_for(self, flag, turn, operation):
        for _ in range(SPINS):
            if flag[0] >= turn:
                return
        wait = _Arrival(self, operation, self.arena.flags.index(flag))
        self.poll(lambda: flag[0] >= turn, wait)

    @contextmanager
    def overseen(self, operation, nbytes):
        if self.overseer is None or not self.overseer.is_alive():
            self.overseer = Overseer()
            self.overseer.start()
        self.overseer.work = clock() + self.timeout, self, operation, nbytes
        try:
            yield
        finally:
            self.overseer.work = None

    def end(self, handle, idle):
        super().end(handle, idle)
        if handle.error:
            raise handle.error  # out of the stream's thread, which ends the job: the rank itself may not look for long

    def share(self, nbytes, operation):
        check_room(nbytes * self.size)
        self.barrier(operation)  # a rank that asks for another size is found here, with names, and not inside MPI
        window = MPI.Win.Allocate_shared(nbytes, 1, comm=self.native())
        parts = [np.frombuffer(window.Shared_query(r)[0], np.uint8) for r in range(self.size)]
        parts[self.rank][:] = 0
        self.windows.append(window)
        self.barrier(operation)
        return parts

    def _tag(self, tag):
        return (self.context * TAGS + tag) * 2

    def isend(self, array, dest, operation="send", tag=0):
        self._check(array, dest, tag)
        request = MPIRequest(self, array, dest, operation, tag, True)
        self.sent.messages += 1
        self.sent.bytes += array.nbytes
        peer, tag, request.header, request.parts = self.ranks[dest], self._tag(tag), None, []
        if self.check_headers:
            request.header = STAMP.pack(clock(), self.sent.messages) + claim(operation, array.dtype, array.nbytes)
            request.parts.append(self.mpi.Isend(request.header, peer, tag))
        # As bytes: MPI then needs no name for the dtype.
        request.parts.append(self.mpi.Isend((request.host, array.nbytes, MPI.BYTE), peer, tag + 1))
        return request

    def irecv(self, array, source, operation="recv", tag=0):
        self._check(array, source, tag, receives=True)
        request = MPIRequest(self, array, source, operation, tag, False)
        peer, tag, request.header, request.parts = self.ranks[source], self._tag(tag), None, []
        if self.check_headers:
            request.header = bytearray(STAMP.size + CLAIM.size)
            request.parts.append(self.mpi.Irecv(request.header, peer, tag))
        request.parts.append(self.mpi.Irecv((request.host, array.nbytes, MPI.BYTE), peer, tag + 1))
        return request
