"""A rank's communication stream: a thread that takes collectives in order, while the rank computes on.

On a GPU this is a CUDA stream. A collective that is started here uses messages of its own, so that it never mixes with
one that the rank itself is in.
"""

import contextvars
import queue
import threading
from dataclasses import replace

from minipar.comm.communicator import clock
from minipar.context import activate, current
from minipar.errors import MiniparError


class Handle:
    """A collective under way. Its arrays must stay as they are until `wait` has returned."""

    def __init__(self, comm, name):
        self.comm, self.name = comm, name
        self.finished = threading.Event()
        self.complete, self.result, self.error = False, None, None

    def done(self):
        """Whether `wait` would return at once. Never blocks."""
        return self.complete

    def wait(self):
        """What the collective returns, once it is there; raises what it has raised."""
        if not self.complete:
            recorder, start = current().recorder, clock()
            self.comm.hold(self)
            if recorder:
                recorder.span("wait", self.name, start, clock())
        if self.error:
            raise self.error
        return self.result

    @property
    def peers(self):
        return {self.comm.ranks[self.comm.rank]}

    def describe(self):
        return f"rank {self.comm.ranks[self.comm.rank]} waits for its own {self.name} on the communication stream"


class Stream:
    """The thread, and the collectives that it has yet to do."""

    def __init__(self):
        self.tasks, self.unfinished, self.lock = queue.SimpleQueue(), 0, threading.Lock()
        own = replace(current(), recorder=None, stream=None, after_backward=[])
        thread = threading.Thread(target=contextvars.copy_context().run, args=(self._work, own), daemon=True)
        thread.name = f"{threading.current_thread().name}, communication stream"
        self.thread = thread
        thread.start()

    def submit(self, comm, function, *args, **kwargs):
        handle = Handle(comm, kwargs.get("operation") or function.__name__)
        if not self.thread.is_alive():
            raise MiniparError(f"{handle.name}: this rank's communication stream has ended, after an error or `close`.")
        with self.lock:
            self.unfinished += 1
            comm.begin(handle)
        recorder = current().recorder
        self.tasks.put((handle, recorder and recorder.for_stream(), function, args, kwargs))
        return handle

    def close(self):
        """Let it finish what it has, then end it."""
        self.tasks.put(None)
        self.thread.join()

    def _work(self, context):
        with activate(context):
            while task := self.tasks.get():
                handle, context.recorder, function, args, kwargs = task
                try:
                    handle.result = function(*args, **kwargs)
                except BaseException as error:
                    handle.error = error
                with self.lock:
                    self.unfinished -= 1
                    handle.comm.end(handle, idle=not self.unfinished)
                if handle.error:
                    return


def start(collective, x, comm, *args, **kwargs):
    """Start `collective(x, comm, ...)` on this rank's communication stream; returns a Handle with `wait` and `done`.

    Collectives are done in the order in which they were started, which must be the same on all ranks; several may be
    under way. With one all-reduce a bucket of gradients, they overlap with the rest of the backward pass.
    """
    context = current()
    if context.stream is None or not context.stream.thread.is_alive():
        context.stream = Stream()
    return context.stream.submit(comm, collective, x, comm.for_stream(), *args, **kwargs)
