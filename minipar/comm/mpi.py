"""Ranks that are MPI processes, over mpi4py's buffer interface.

Before its payload every message sends a small header: what it is for, dtype, size, the sender's clock. The receiver
compares it with what it expects, so that a mismatch is an error with two names in it instead of a wrong number.
Waiting is done by testing: first yielding the core at once, then in short sleeps, so that ranks which outnumber the
cores do not take each other's time, and no wait lasts longer than its limit.
"""

import os
import struct
import time
from functools import lru_cache

import numpy as np
from mpi4py import MPI

from minipar.arrays import array_module, to_host
from minipar.comm.communicator import TAGS, Communicator, Request, clock, mismatch
from minipar.context import current
from minipar.errors import CommunicationTimeout

# A header is a stamp and a claim. Both sides make the claim, and it must be the same, byte for byte.
STAMP = struct.Struct("<dq")  # sender's clock, message number
CLAIM = struct.Struct("<q16s88s")  # bytes, dtype, operation

give_way = getattr(os, "sched_yield", lambda: time.sleep(0))  # not every system has it


@lru_cache(maxsize=4096)  # a training step says the same few hundred things again and again
def claim(operation, dtype, nbytes):
    return CLAIM.pack(nbytes, str(dtype).encode(), operation.encode()[:88])


def read_claim(packed):
    nbytes, dtype, operation = CLAIM.unpack(packed)
    return operation.rstrip(b"\0").decode(errors="replace"), dtype.rstrip(b"\0").decode(), nbytes


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
                give_way()
                continue
            waited = clock() - start
            time.sleep(min(1e-3, waited / 20))  # wakes at most 5 % of the wait too late
            if waited > self.comm.timeout:
                raise CommunicationTimeout(f"{self.describe()}; nothing came in {self.comm.timeout:g} s.")

    def _check_header(self):
        comm, source = self.comm, self.comm.ranks[self.peer]
        self.ready, number = STAMP.unpack_from(self.header)
        theirs, ours = self.header[STAMP.size :], claim(self.operation, self.array.dtype, self.array.nbytes)
        if theirs != ours:
            raise mismatch(comm, source, read_claim(theirs), read_claim(ours))
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
