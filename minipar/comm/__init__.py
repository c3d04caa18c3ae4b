"""Ranks and messages: threads of one process, or MPI processes."""

from minipar.comm.communicator import Communicator, NullCommunicator, Request, Traffic
from minipar.comm.memory import SymmetricBuffer
from minipar.comm.stream import start
from minipar.comm.thread import ThreadCommunicator

__all__ = ["Communicator", "NullCommunicator", "Request", "SymmetricBuffer", "ThreadCommunicator", "Traffic", "start"]
