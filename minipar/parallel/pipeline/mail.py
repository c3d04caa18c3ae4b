"""Messages between stages: receives posted early, sends never waited for, shapes learned once."""

from collections import deque

import numpy as np

from minipar.errors import ShapeError
from minipar.parallel.pipeline.schedules import TAGS
from minipar.parallel.pipeline.simulation import OPEN

LABELS = TAGS  # the tag of the targets
DESCRIPTION = 11  # int64 numbers: dimensions, up to 8 of them, the dtype's name in 16 bytes


def describe(array):
    """Shape and dtype of `array` as DESCRIPTION integers."""
    numbers = np.zeros(DESCRIPTION, np.int64)
    numbers[0] = array.ndim
    numbers[1 : 1 + array.ndim] = array.shape
    numbers[9:] = np.frombuffer(str(array.dtype).encode().ljust(16, b"\0"), np.int64)
    return numbers


def described(numbers):
    """(shape, dtype) that `describe` put into numbers."""
    name = numbers[9:DESCRIPTION].tobytes().rstrip(b"\0").decode()
    return tuple(map(int, numbers[1 : 1 + numbers[0]])), np.dtype(name)


class Mail:
    """This rank's messages of one schedule. A message is named after the action that reads it.

    Messages between two ranks with one tag arrive in the order in which their sender comes to them; up to OPEN receives
    wait there for them. The first micro-batch of a shape is preceded by the shape of its activations; sender and
    receiver then both know it, in later steps too, and a gradient has the shape of its activations.
    """

    def __init__(self, schedule, comm, xp):
        self.schedule, self.comm, self.xp = schedule, comm, xp
        self.shapes = {}  # (stage, micro-batch's signature) -> (shape, dtype) of what the stage reads
        self.lines = [
            line for (source, dest, _), line in schedule.channels.items() if source != dest and dest == comm.rank
        ]

    def begin(self, signatures, label_shapes):
        """A step begins. For each micro-batch, signatures: what is the same if its shape and dtype are the same;
        label_shapes: (shape, dtype) of its targets.
        """
        self.signatures, self.here, self.requests, self.sends = signatures, {}, {}, []
        self.to_come = [deque(line) for line in self.lines]
        self.labels, self.label_shapes = {}, label_shapes
        first = self.schedule.ranks[self.schedule.rank_of[0]]
        self.labels_to_come = deque(a.microbatch for a in first if (a.kind, a.stage) == ("F", 0))

    def send(self, action, array):
        """Hand what `action` made to the action that reads it, on this rank or another."""
        reader = self.schedule.reader(action)
        dest = self.schedule.rank_of[reader.stage]
        if dest == self.comm.rank:
            self.here[reader] = array
            return
        array, key = self.xp.ascontiguousarray(array), self._key(reader)
        if key not in self.shapes:
            self._isend(describe(array), dest, f"shape of {reader}", self._tag(reader))
            self.shapes[key] = array.shape, array.dtype
        if self.shapes[key] != (array.shape, array.dtype):
            raise ShapeError(
                f"{action} made {array.dtype} of shape {array.shape}, but {self.shapes[key][1]} of shape "
                f"{self.shapes[key][0]} from an earlier micro-batch of the same shape."
            )
        self._isend(array, dest, str(reader), self._tag(reader))

    def post(self):
        """Let receives wait for what comes next, as far as its shape is known; forget the sends that have ended."""
        self.sends = [request for request in self.sends if not request.done()]
        for line, whole in zip(self.to_come, self.lines, strict=True):
            waiting = sum(reader in self.requests for reader in whole)
            while line and waiting < OPEN and self._key(line[0]) in self.shapes:
                self._receive(line.popleft())
                waiting += 1

    def take(self, reader):
        """What `reader` reads; waits for it."""
        if reader in self.here:
            return self.here.pop(reader)
        line = next((line for line in self.to_come if reader in line), ())
        while reader not in self.requests:
            if self._key(line[0]) not in self.shapes:
                source = self.schedule.rank_of[self.schedule.source(line[0]).stage]
                numbers = np.empty(DESCRIPTION, np.int64)
                self.comm.recv(numbers, source, f"shape of {line[0]}", self._tag(line[0]))
                self.shapes[self._key(line[0])] = described(numbers)
            self._receive(line.popleft())
        request = self.requests.pop(reader)
        request.wait()
        return request.array

    def end(self):
        """Return when all that this rank has sent is out of its hands."""
        for request in self.sends:
            request.wait()

    def _key(self, reader):
        return reader.stage + (reader.kind != "F"), self.signatures[reader.microbatch]

    def _tag(self, reader):
        return self.schedule.channel(reader)[2]

    def _isend(self, array, dest, operation, tag):
        self.sends.append(self.comm.isend(array, dest, operation, tag))

    def _receive(self, reader):
        shape, dtype = self.shapes[self._key(reader)]
        source = self.schedule.rank_of[self.schedule.source(reader).stage]
        self.requests[reader] = self.comm.irecv(self.xp.empty(shape, dtype), source, str(reader), self._tag(reader))

    def send_labels(self, array, microbatch):
        dest = self.schedule.rank_of[self.schedule.stages - 1]
        self._isend(np.ascontiguousarray(array), dest, f"targets of micro-batch {microbatch}", LABELS)

    def take_labels(self, microbatch):
        """The targets of a micro-batch, which arrive in the order in which stage 0 comes to them."""
        while microbatch not in self.labels:
            k = self.labels_to_come.popleft()
            targets, source = np.empty(*self.label_shapes[k]), self.schedule.rank_of[0]
            self.comm.recv(targets, source, f"targets of micro-batch {k}", LABELS)
            self.labels[k] = targets
        return self.labels.pop(microbatch)
