"""minipar: a distributed-training engine small enough to read and real enough to use."""

from minipar.launch import abort_on_uncaught, run

__all__ = ["run"]
__version__ = "0.1.0"

abort_on_uncaught()
