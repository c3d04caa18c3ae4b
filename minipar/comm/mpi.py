"""Ranks that are MPI processes, over mpi4py's buffer interface.

Before its payload every message sends a small header: what it is for, dtype, size, the sender's clock. The receiver
compares it with what it expects, so that a mismatch is an error with two names in it instead of a wrong number.
Waiting is done by testing: first yielding the core at once, then in short sleeps, so that ranks which outnumber the
cores do not take each other's time, and no wait lasts longer than its limit.
"""

import os
import struct
import time

import numpy as np

from minipar.arrays import array_module, to_host
from minipar.comm.communicator import Communicator, Request, clock, mismatch
from minipar.context import current
from minipar.errors import CommunicationTimeout

HEADER = struct.Struct("<dqq16s88s")  # sender's clock, message number, bytes, dtype, operation
TAGS = 64  # tags of one group; its number times this keeps groups apart


def pack_header(number, array, operation):
    text = operation.encode()[:88]
    return np.frombuffer(
        bytearray(HEADER.pack(clock(), number, array.nbytes, str(array.dtype).encode(), text)), np.uint8
    )


def unpack_header(header):
    sent, number, nbytes, dtype, operation = HEADER.unpack(header.tobytes())
    return sent, number, (operation.rstrip(b"\0").decode(errors="replace"), dtype.rstrip(b"\0").decode(), nbytes)


def as_bytes(host):
    """The memory of a contiguous array as bytes: MPI then needs no name for its dtype."""
    return host.reshape(-1).view(np.uint8)


class MPIRequest(Request):
    """`parts`: the MPI requests of header and payload. `host`: where they read or write; `array` itself on the CPU."""

    __slots__ = ("header", "host", "parts")

    def __init__(self, comm, array, peer, operation, tag, sends):
        super().__init__(comm, array, peer, operation, tag, sends)
        # A GPU array travels through host memory: an MPI that is not CUDA-aware would crash on it.
        self.host = to_host(array) if sends or isinstance(array, np.ndarray) else np.empty(array.shape, array.dtype)

    def done(self):
        return all(part.Test() for part in self.parts)

    def _wait(self):
        if not self.sends and self.header is not None:
            self._poll(self.parts[0])
            self._check_header()
        self._poll(self.parts[-1])
        self._poll(self.parts[0])
        if not self.sends and self.host is not self.array:
            self.array[...] = array_module(self.array).asarray(self.host)

    def _poll(self, part):
        start, polls = clock(), 0
        while not part.Test():
            polls += 1
            if polls < 300:
                os.sched_yield()
                continue
            waited = clock() - start
            time.sleep(min(1e-3, waited / 20))  # wakes at most 5 % of the wait too late
            if waited > self.comm.timeout:
                raise CommunicationTimeout(f"{self.describe()}; nothing came in {self.comm.timeout:g} s.")

    def _check_header(self):
        comm, source = self.comm, self.comm.ranks[self.peer]
        self.ready, number, theirs = unpack_header(self.header)
        ours = self.operation.encode()[:88].decode(errors="replace"), str(self.array.dtype), self.array.nbytes
        if theirs != ours:
            raise mismatch(comm, source, theirs, ours)
        recorder = current().recorder
        if recorder is not None:
            self._poll(self.parts[-1])
            me = comm.ranks[comm.rank]
            recorder.message(source << 40 | number, source, me, self.array.nbytes, self.ready, clock(), self.operation)


class MPICommunicator(Communicator):
    """A rank of an mpi4py intracommunicator. `check_headers=False` sends no headers: for measuring what they cost."""

    transport = "MPI"

    def __init__(self, mpi, timeout=60.0, check_headers=True):
        super().__init__(mpi.Get_rank(), range(mpi.Get_size()), timeout)
        self.mpi, self.check_headers = mpi, check_headers

    def _tag(self, tag):
        return (self.context * TAGS + tag) * 2

    def isend(self, array, dest, operation="send", tag=0):
        self._check(array, dest)
        request = MPIRequest(self, array, dest, operation, tag, True)
        self.sent.messages += 1
        self.sent.bytes += array.nbytes
        peer, tag, request.header, request.parts = self.ranks[dest], self._tag(tag), None, []
        if self.check_headers:
            request.header = pack_header(self.sent.messages, array, operation)
            request.parts.append(self.mpi.Isend(request.header, peer, tag))
        request.parts.append(self.mpi.Isend(as_bytes(request.host), peer, tag + 1))
        return request

    def irecv(self, array, source, operation="recv", tag=0):
        self._check(array, source)
        request = MPIRequest(self, array, source, operation, tag, False)
        peer, tag, request.header, request.parts = self.ranks[source], self._tag(tag), None, []
        if self.check_headers:
            request.header = np.empty(HEADER.size, np.uint8)
            request.parts.append(self.mpi.Irecv(request.header, peer, tag))
        request.parts.append(self.mpi.Irecv(as_bytes(request.host), peer, tag + 1))
        return request
