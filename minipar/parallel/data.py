"""Data parallelism: every rank has the whole model and samples of its own; gradients are added up as they are made.

    rank      ── forward ──┬── backward: last layers ......... first layers ──┬ wait ┬── optimizer
    its stream             │            all-reduce bucket 0   bucket 1        bucket 2

Gradients lie in buckets, in the order in which the backward pass makes them: as soon as the last one of a bucket has
come, one all-reduce carries all of it, while the rank computes the next ones. Few large messages cost less than many
small ones; buckets that are too large have nothing left to hide behind.

Rank r's loss is a mean over n_r targets, and N is their number on all ranks. The gradient of the mean over all N is

    sum over ranks of (n_r / N) x the gradient of rank r's own mean

so each rank scales its loss and a plain sum remains. A rank with an empty batch adds nothing; a mean of the ranks'
means would be wrong wherever they count differently.
Source: Li et al. 2020, "PyTorch Distributed: experiences on accelerating data parallel training", VLDB.
"""

import warnings
from contextlib import contextmanager

import numpy as np

from minipar.arrays import array_module
from minipar.autograd import Function, Tensor
from minipar.autograd.tensor import is_floating
from minipar.collectives import all_gather, all_reduce, broadcast, start
from minipar.comm import SymmetricBuffer
from minipar.context import current
from minipar.errors import GraphError
from minipar.nn import Dropout, Module

IGNORED = -100  # a target that does not count


class GlobalMean(Function):
    """This rank's mean as its part of the mean over all ranks: backward starts the exchange and scales."""

    @staticmethod
    def forward(ctx, local, owner, counts):
        ctx.owner, ctx.counts, ctx.value = owner, counts, array_module(local).array(local)
        return ctx.value

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.owner.begin(ctx.counts.wait(), ctx.value)


class Bucket:
    """Parameters of one dtype, and their gradients one after another in the 1-D array `flat`."""

    def __init__(self, parameters, flat):
        self.flat, self.missing = flat, set()  # missing: whose gradient has yet to come in this backward pass
        self.views = lay_over(flat, parameters)  # parameter -> its place in flat

    def take(self, parameter):
        """Move a gradient that has come to its place, while it is in the cache; from then on it grows there."""
        view = self.views[parameter]
        if parameter.grad is not view:
            view[...] = parameter.grad
            parameter.grad = view

    def complete(self):
        """Put zeros where this rank has no gradient; returns the parameters that have one."""
        for parameter, view in self.views.items():
            if parameter.grad is None:
                view[...] = 0
        return {parameter for parameter in self.views if parameter.grad is not None}

    def close(self, result, used):
        """All ranks' gradients are there; a parameter that no rank used has none, as in one process."""
        for parameter, view in self.views.items():
            parameter.grad = view if parameter in used else None


def lay_over(flat, parameters):
    """{parameter: the next piece of the 1-D array `flat`, in its shape}."""
    views, end = {}, 0
    for parameter in parameters:
        begin, end = end, end + parameter.size
        views[parameter] = flat[begin:end].reshape(parameter.shape)
    return views


def all_reduce_bucket(bucket, comm, operation):
    """What DataParallel does with a bucket unless told otherwise (see minipar.parallel.compression)."""
    return all_reduce(bucket.flat, comm, out=bucket.flat, operation=operation)


class DataParallel(Module):
    """`model` on every rank of mesh["dp"], each with a part of the global batch; equal to one process with all of it.

    Every rank calls `loss` on its own samples, as many or few as it has, and `backward` on what that gives; gradients
    are then those of the mean over all labelled targets of all ranks, bitwise the same everywhere. Parameters and
    buffers are rank 0's at first. A parameter that some ranks do not use counts as zero there; one that no rank uses
    keeps the gradient None and is named in `unused` and in a warning. Which parameters are frozen may change between
    steps, on all ranks alike. Floating buffers become their mean over the ranks after each exchange.

    bucket_bytes: a bucket is sent once it has so many. reduce(bucket, comm, operation): what is done with one, on the
    communication stream.
    """

    def __init__(self, model, mesh, bucket_bytes=4 << 20, reduce=all_reduce_bucket):
        self.model, self.comm, self.bucket_bytes, self.reduce = model, mesh["dp"], bucket_bytes, reduce
        self.sync, self.unused = True, []
        self.buckets, self.trainable, self.removers, self.warned = [], None, [], False
        self.micro_batches = []  # since the last exchange: (this rank's mean, its targets, table of all ranks' counts)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            broadcast(tensor.data, self.comm, out=tensor.data, operation=f"broadcast {name}")
        self.memory = self.allocate()

    def children(self):
        return self.model.children()  # so that every name is the model's own

    def forward(self, x):
        """The model's forward on this rank's samples x; all ranks must call it, with as many as they have."""
        with self._own_samples(self._exchange_counts(0, x.shape[0])):
            return self.run(lambda: self.model(x))

    def run(self, function):
        """function(), which computes with the parameters."""
        return function()

    def loss(self, tokens, targets):
        """Mean loss of the labelled targets on all ranks; tokens, targets: this rank's own samples, or none.

        Until its backward has ended, the value is this rank's own mean; then that of all ranks. Inside no_grad it is
        that of all ranks at once.
        """
        labelled = int((targets != IGNORED).sum())
        return self.average(lambda: self.model.loss(tokens, targets), len(tokens), labelled)

    def average(self, function, samples, count):
        """Like `loss` for any function() that gives a mean over `count` things in this rank's `samples` samples.

        Everything that depends on parameters belongs inside it, penalties too.
        """
        counts = self._exchange_counts(count, samples)
        with self._own_samples(counts):
            local = self.run(function)
        if local.requires_grad:
            return GlobalMean.apply(local, owner=self, counts=counts)
        total = all_reduce(np.array(local.item() * count), self.comm, operation="all_reduce loss")
        mean = total / max(1, counts.wait()[:, 0].sum())
        return Tensor(array_module(local.data).asarray(mean, dtype=local.dtype))

    @contextmanager
    def no_sync(self):
        """Backward passes inside the `with` block only accumulate; the next one outside exchanges all of them.

        The result is the gradient of the mean over all targets of all these micro-batches.
        """
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    # --- how many samples and targets the others have ---

    def _exchange_counts(self, count, samples):
        row = np.array([[count, samples]], np.int64)
        return start(all_gather, row, self.comm, sizes=[1] * self.comm.size, operation="all_gather counts")

    @contextmanager
    def _own_samples(self, counts):
        """Tell layers that draw random numbers which samples of the global batch these are."""
        context = current()
        before = context.samples
        if any(isinstance(m, Dropout) and m.p and m.training for _, m in self.named_modules()):
            samples = counts.wait()[:, 1]
            earlier = sum(int(table[:, 1].sum()) for _, _, table in self.micro_batches)
            first = earlier + int(samples[: self.comm.rank].sum())
            context.samples = first, earlier + int(samples.sum())
        try:
            yield
        finally:
            context.samples = before

    # --- one backward pass: begin, a gradient arrives, finish ---

    def begin(self, table, value):
        """A backward pass comes to a loss of ours; returns what to scale it with."""
        context = current()
        if self.finish not in context.after_backward:
            context.after_backward.append(self.finish)
            if not self.micro_batches:
                self._start_step()
            self.exchanges, self.handles, self.used = self.sync, [], []
            for bucket in self.buckets:
                bucket.missing = set(bucket.views)
        else:
            raise GraphError("a backward pass comes to a second loss of these ranks: add them up inside `average`.")
        own, total = int(table[self.comm.rank, 0]), int(table[:, 0].sum())
        self.micro_batches.append((value, own, table))
        self.labelled += total
        # All of a step's micro-batches are scaled by the first one's count, and corrected once when all are known.
        self.reference = self.reference or max(1, total)
        return own / self.reference

    def _start_step(self):
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        if [p for _, p in named] != self.trainable:
            self.lay_out(named)
        self.labelled = self.reference = 0
        # What an earlier exchange left is already everybody's sum, and must not be added up again.
        self.carried = [(p, p.grad.copy()) for p in self.trainable if p.grad is not None]
        for parameter, _ in self.carried:
            parameter.grad = None

    def arrived(self, bucket, name, parameter):
        """The hook of every parameter: its gradient is complete in this backward pass."""
        if self.finish not in current().after_backward:
            raise GraphError(f"the gradient of {name} is no part of the ranks' mean: call backward on loss or average.")
        if parameter not in bucket.missing:
            raise GraphError(f"the gradient of {name} came after its bucket was sent.")
        bucket.take(parameter)
        bucket.missing.discard(parameter)
        self.launch()

    def launch(self):
        """Send the buckets that are complete, in the same order on all ranks whatever each of them uses."""
        while self.exchanges and len(self.handles) < len(self.buckets) and not self.next_bucket.missing:
            self.send()

    @property
    def next_bucket(self):
        return self.buckets[len(self.handles)]

    def send(self):
        bucket = self.next_bucket
        used, bucket.missing = bucket.complete(), set()
        self.used += [p in used for p in bucket.views]
        if self.reference != max(1, self.labelled):
            bucket.flat *= self.reference / max(1, self.labelled)
        self.handles.append(start(self.reduce, bucket, self.comm, operation=f"reduce bucket {len(self.handles)}"))

    def finish(self):
        """The backward pass has ended."""
        if not self.exchanges:
            return
        while len(self.handles) < len(self.buckets):
            self.send()
        means = [float(value) * own for value, own, _ in self.micro_batches]
        numbers = np.array([*means, *self.used], np.float64)
        sums = start(all_reduce, numbers, self.comm, operation="all_reduce loss and use")
        results = [handle.wait() for handle in self.handles]
        sums = sums.wait()
        for (value, _, table), total in zip(self.micro_batches, sums, strict=False):
            value[...] = total / max(1, table[:, 0].sum())
        flags = dict(zip((p for bucket in self.buckets for p in bucket.views), sums[len(means) :] > 0, strict=True))
        used = {p for p, flag in flags.items() if flag}
        for bucket, result in zip(self.buckets, results, strict=True):
            bucket.close(result, used)
        self._carry()
        self._report([name for name, p in self.model.named_parameters() if p in flags and p not in used])
        self._average_buffers()
        self.micro_batches = []

    def _carry(self):
        for parameter, earlier in self.carried:
            if parameter.grad is None:
                parameter.grad = earlier
            else:
                parameter.grad += earlier

    def _report(self, unused):
        self.unused = unused
        if unused and not self.warned and self.comm.rank == 0:
            warnings.warn(f"no rank has used {', '.join(unused)}: no gradient there.", stacklevel=2)
            self.warned = True

    def _average_buffers(self):
        for name, buffer in self.model.named_buffers():
            if is_floating(buffer.dtype):
                all_reduce(buffer.data, self.comm, "mean", out=buffer.data, operation=f"all_reduce {name}")
            else:
                broadcast(buffer.data, self.comm, out=buffer.data, operation=f"broadcast {name}")
            buffer.changed()

    # --- buckets ---

    def allocate(self):
        """Memory for the gradients of all parameters, of any mix of dtypes."""
        parameters = self.model.parameters()
        xp = array_module(parameters[0].data) if parameters else np
        return shared_memory(self.comm, sum(p.data.nbytes + 64 for p in parameters), xp)

    def lay_out(self, named):
        """Cut these parameters into buckets, last ones first; all ranks have the same."""
        for remove in self.removers:
            remove()
        for parameter in self.model.parameters():
            parameter.grad = None if parameter not in {p for _, p in named} else parameter.grad
        self.trainable, self.buckets, self.removers = [p for _, p in named], [], []
        begin = 0
        for group in fill_buckets(reversed(named), self.bucket_bytes):
            dtype, nbytes = group[0][1].dtype, sum(p.data.nbytes for _, p in group)
            bucket = Bucket([p for _, p in group], self.memory[begin : begin + nbytes].view(dtype))
            begin += -(-nbytes // 64) * 64
            self.buckets.append(bucket)
            self.watch(bucket, group)

    def watch(self, bucket, named):
        for name, parameter in named:
            hook = lambda leaf, bucket=bucket, name=name: self.arrived(bucket, name, leaf)  # noqa: E731
            self.removers.append(parameter.register_hook(hook))


def fill_buckets(named, bucket_bytes):
    """Lists of consecutive (name, parameter) of one dtype, each closed before it would exceed `bucket_bytes`."""
    groups, open_groups = [], {}
    for name, parameter in named:
        group, size = open_groups.get(parameter.dtype, (None, 0))
        if group is None or size + parameter.data.nbytes > bucket_bytes:
            group, size = [], 0
            groups.append(group)
        group.append((name, parameter))
        open_groups[parameter.dtype] = group, size + parameter.data.nbytes
    return groups


def shared_memory(comm, nbytes, xp):
    """`nbytes` for this rank, zero at first; where the ranks are processes of one node, all of them can reach it."""
    alone = comm.size == 1 or comm.moves_nothing or comm.sees_objects
    if xp is np and not alone and len(set(comm.nodes)) == 1:
        return SymmetricBuffer(comm, nbytes).own
    return xp.zeros(nbytes, np.uint8)


def joined(batches, comm, empty):
    """Yield this rank's `batches`, and then `empty`, a batch of no samples, until all ranks of `comm` have run out.

    So every rank does the same number of steps, and the mean over all targets stays right.
    """
    batches = iter(batches)
    while True:
        batch = next(batches, None)
        if not all_reduce(np.array([batch is not None]), comm, "max", operation="all_reduce more batches")[0]:
            return
        yield empty if batch is None else batch
