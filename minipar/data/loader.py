"""Batches that are there when they are needed: fetched on threads, some steps ahead.

Threads, because a process that is forked after MPI has started may crash or hang. Reading files, decompressing and
NumPy's larger operations let other threads run meanwhile; pure Python does not.
"""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import islice

from minipar.context import current
from minipar.errors import ShapeError


class Loader:
    """Iterate over it for fetch(share) of each Share of the sampler's epoch, in its order.

    workers: threads that call `fetch`, which must not need the calling rank's context. ahead: batches that are fetched
    while the latest one is used. The sampler's position counts those that were handed out, so a checkpoint taken
    between two of them is right. An exception of `fetch` is raised where its batch would have come. A wait is recorded
    as "next batch": a rank that has many of these is starved.
    """

    def __init__(self, sampler, fetch, workers=1, ahead=2):
        if min(workers, ahead) < 1:
            raise ShapeError(f"a Loader with {workers} workers and {ahead} batches ahead: both must be at least 1.")
        self.sampler, self.fetch, self.workers, self.ahead = sampler, fetch, workers, ahead

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        upcoming, fetched = self.sampler.ahead(), deque()
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="loader")
        try:
            while True:
                for share, position in islice(upcoming, self.ahead + 1 - len(fetched)):
                    fetched.append((pool.submit(self.fetch, share), position))
                if not fetched:
                    return
                future, position = fetched.popleft()
                recorder = None if future.done() else current().recorder
                with recorder.region("wait", "next batch") if recorder else nullcontext():
                    batch = future.result()
                self.sampler.position = position
                yield batch
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
