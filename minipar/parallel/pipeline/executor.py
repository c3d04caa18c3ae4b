"""Pipeline parallelism: each rank has a part of the layers, and does what the schedule says, action by action."""

import itertools
import operator
import time
from contextlib import nullcontext
from functools import partial

import numpy as np

from minipar.arrays import array_module, to_host
from minipar.autograd import Tensor, no_grad
from minipar.autograd.tensor import is_floating
from minipar.collectives import all_gather, all_reduce, broadcast, start
from minipar.context import current
from minipar.errors import CommunicationTimeout, DeadlockError, ScheduleError, ShapeError
from minipar.nn import Module
from minipar.parallel.data import IGNORED, Bucket, fill_buckets, shared_memory
from minipar.parallel.pipeline.mail import DESCRIPTION, Mail, describe, described
from minipar.parallel.pipeline.schedules import Action
from minipar.parallel.pipeline.simulation import SPAN_KINDS, validate


def balance(costs, stages):
    """Cut layers of these costs into consecutive `stages`, none empty: the list of where each ends.

    The costliest stage is as cheap as can be; among such cuts the one whose stages are most alike is taken. Raises
    ShapeError for more stages than layers.
    """
    if not 1 <= stages <= len(costs):
        raise ShapeError(f"{len(costs)} layers cannot be cut into {stages} stages: each needs at least one.")
    total = [0.0, *itertools.accumulate(costs)]

    def solve(weigh, join):
        best = {n: (weigh(total[n]), (n,)) for n in range(1, len(costs) + 1)}  # n layers in the stages so far
        for _ in range(stages - 1):
            best = {
                n: min((join(best[k][0], weigh(total[n] - total[k])), (*best[k][1], n)) for k in best if k < n)
                for n in range(min(best) + 1, len(costs) + 1)
            }
        return best[len(costs)]

    limit = solve(lambda cost: cost, max)[0] * (1 + 1e-9)
    return list(solve(lambda cost: cost * cost if cost <= limit else np.inf, operator.add)[1])


def measure(model, x, targets, comm, rounds=3):
    """Seconds that each layer of `model` takes forward and backward on this batch, for Pipeline's `costs`.

    All ranks of `comm` call it and get the same numbers, the mean of what they measure. The model is left without
    gradients.
    """
    layers, seconds = model.layers(), []
    for i, layer in enumerate(layers):
        times = []
        for _ in range(rounds):
            before = time.perf_counter()
            own = x if i == 0 else Tensor(x, requires_grad=is_floating(x.dtype))
            y = layer.function(own, targets) if layer is layers[-1] else layer.function(own)
            if y.requires_grad:
                y.backward(array_module(y.data).ones_like(y.data))
            times.append(time.perf_counter() - before)
        x = y.data
        seconds.append(min(times))
    model.zero_grad()
    return all_reduce(np.array(seconds), comm, "mean", operation="all_reduce layer times").tolist()


class Pipeline(Module):
    """`model`, which says its `layers()`, cut into stages on the ranks of mesh["pp"]; equal to one process.

        schedule = one_f_one_b(4, 8)                      # for 4 ranks and 8 micro-batches
        pipeline = Pipeline(model, DeviceMesh(world, pp=4), schedule)
        loss = pipeline.forward_backward(tokens, targets)
        optimizer.step()                                  # of pipeline.parameters(): those of this rank's stages

    cuts: where stages end, as in [2, 5] for layers 0-1, 2-4 and the rest; by default the layers' costs are balanced:
    those that the layers state, or `costs`, one for each layer, as `measure` gives them.
    recompute: hold each micro-batch's input alone and repeat the forward before the backward (as GPipe does).
    optimizer: for schedules that update within a step: makes one from a list of parameters. check: validate the
    schedule. Raises ScheduleError, and ShapeError where ranks, layers and stages do not fit.
    `peak` says after a step how many micro-batches' activations each of this rank's stages held at most.
    """

    def __init__(self, model, mesh, schedule, cuts=None, costs=None, recompute=False, optimizer=None, check=True):
        self.model, self.schedule, self.comm, self.dp, self.recompute = (
            model,
            schedule,
            mesh["pp"],
            mesh["dp"],
            recompute,
        )
        if len(schedule.ranks) != self.comm.size:
            raise ShapeError(f"the schedule is for {len(schedule.ranks)} ranks, the mesh has pp={self.comm.size}.")
        if check:
            validate(schedule)
        layers = model.layers()
        costs = [layer.cost for layer in layers] if costs is None else costs
        if len(costs) != len(layers):
            raise ShapeError(f"{len(costs)} costs do not fit {len(layers)} layers.")
        cuts = balance(costs, schedule.stages) if cuts is None else [*cuts, len(layers)]
        edges = [0, *cuts]
        if len(cuts) != schedule.stages or any(b <= a for a, b in itertools.pairwise(edges)):
            raise ShapeError(f"cuts {cuts[:-1]} do not make {schedule.stages} stages of {len(layers)} layers.")
        self.split = [range(a, b) for a, b in itertools.pairwise(edges)]  # the layers of each stage
        self.mine = [stage for stage, rank in sorted(schedule.rank_of.items()) if rank == self.comm.rank]
        self.stages = {stage: [layers[i].function for i in self.split[stage]] for stage in self.mine}
        self.own = {stage: _tensors(layers[i] for i in self.split[stage]) for stage in range(schedule.stages)}
        self.xp = array_module(next(iter(model.parameters())).data) if model.parameters() else np
        self.mail = Mail(schedule, self.comm, self.xp)
        self.held, self.waiting, self.peak = {}, {}, {}
        self._share()
        self.optimizers = {}
        if schedule.asynchronous:
            if optimizer is None or self.shared or self.dp.size > 1 or recompute:
                raise ShapeError(
                    f"{schedule.name} updates weights within a step: it needs an optimizer, parameters that belong to "
                    f"one stage alone (not so: {', '.join(self.shared) or 'none'}), dp=1 (here {self.dp.size}) and no "
                    "recomputation, which would take the new weights."
                )
            self.optimizers = {s: optimizer([p for _, p in self._trainable(s)]) for s in self.mine}

    def children(self):
        return self.model.children()

    def _named(self, kind):
        """Those of this rank's stages, under the whole model's names."""
        mine = set().union(*(self.own[stage] for stage in self.mine))
        return ((name, t) for name, t in self.model._named(kind) if t in mine)

    def _share(self):
        """Find the parameters that several stages use, and make all copies of each parameter equal."""
        self.shared = {}  # name -> (parameter, the group of those ranks that have it, None for one rank)
        for name, parameter in self.model.named_parameters():
            stages = [stage for stage, tensors in self.own.items() if parameter in tensors]
            ranks = {self.schedule.rank_of[stage] for stage in stages}
            has_it = self.comm.rank in ranks
            if len(stages) > 1:
                group = self.comm.split(0 if has_it else None) if len(ranks) > 1 else None
                self.shared[name] = parameter, group if has_it else None
                if group is not None:
                    broadcast(parameter.data, group, out=parameter.data, operation=f"broadcast {name}")
        for name, tensor in self._named(Tensor):
            broadcast(tensor.data, self.dp, out=tensor.data, operation=f"broadcast {name}")
        nbytes = sum(p.data.nbytes + 64 for p in self.parameters())
        self.memory = shared_memory(self.dp, nbytes, self.xp) if self.dp.size > 1 else None

    def _trainable(self, stage):
        """(name, parameter) of those that this stage alone uses."""
        own = self.own[stage]
        return [(n, p) for n, p in self.named_parameters() if p in own and p.requires_grad and n not in self.shared]

    # --- one step ---

    def forward_backward(self, x=None, targets=None):
        """Run the schedule on this batch; returns the loss, a float, on every rank. Gradients are added to `grad`.

        x, targets: the batch of this data-parallel rank, along axis 0, cut into the schedule's micro-batches as evenly
        as can be (8 into 3 are 3, 3, 2). Only the rank of stage 0 reads them: labels travel with their micro-batch. The
        loss and its gradients are those of the mean over all targets (but -100) of all micro-batches and data-parallel
        ranks. Raises ShapeError for fewer samples than micro-batches.
        """
        self._begin(x, targets)
        done = set()
        for action in self.schedule.ranks[self.comm.rank]:
            self._check(action, done)
            self.mail.post()
            try:
                self._do(action)
            except (CommunicationTimeout, DeadlockError) as error:
                known = set(self.schedule.needs(action)) - {self.schedule.source(action)}
                error.args = (f"{error} Rank {self.comm.rank}: {self.schedule.why_not(action, known)}",)
                raise
            done.add(action)
        self.mail.end()
        return self._finish()

    def _check(self, action, done):
        """A schedule that was not validated may ask for what this rank has not made."""
        mine = {a for a in self.schedule.needs(action) if a.stage in self.stages}
        if not mine <= done:
            elsewhere = set(self.schedule.needs(action)) - mine
            raise ScheduleError(f"rank {self.comm.rank}: {self.schedule.why_not(action, done | elsewhere)}")

    def _plan(self, x, targets):
        """What the micro-batches of this step are: the ranks of stage 0 have them, and tell the others."""
        m = self.schedule.microbatches
        # This rank's first sample, all samples, all targets; shape of x, of targets; the targets of each micro-batch.
        plan = np.zeros(3 + 2 * DESCRIPTION + m, np.int64)
        if 0 in self.stages:
            if len(x) < m or len(targets) != len(x):
                raise ShapeError(f"{len(x)} samples with {len(targets)} targets cannot be cut into {m} micro-batches.")
            self.x, self.targets = (np.array_split(to_host(a), m) for a in (x, targets))
            counts = np.array([int((t != IGNORED).sum()) for t in self.targets])
            table = all_gather(np.array([[len(x), counts.sum()]]), self.dp, sizes=[1] * self.dp.size)
            plan[:3] = table[: self.dp.rank, 0].sum(), table[:, 0].sum(), table[:, 1].sum()
            plan[3:] = np.concatenate([describe(x), describe(targets), counts])
        return broadcast(plan, self.comm, self.schedule.rank_of[0], operation="broadcast plan of the step")

    def _begin(self, x, targets):
        plan, m = self._plan(x, targets), self.schedule.microbatches
        first, self.samples, self.labelled = map(int, plan[:3])
        (shape, dtype), label = described(plan[3:]), described(plan[3 + DESCRIPTION :])
        self.sizes = [shape[0] // m + (k < shape[0] % m) for k in range(m)]
        self.first = [first + sum(self.sizes[:k]) for k in range(m)]
        self.counts = plan[3 + 2 * DESCRIPTION :]
        labels = [((n, *label[0][1:]), label[1]) for n in self.sizes]
        self.mail.begin([(n, *shape[1:], str(dtype)) for n in self.sizes], labels)
        self.held, self.waiting, self.peak, self.losses, self.handles = {}, {}, dict.fromkeys(self.mine, 0), {}, []
        # What is there already is everybody's sum, and must not be added up again.
        self.earlier = [(p, p.grad.copy()) for p in self.parameters() if p.grad is not None]
        for parameter, _ in self.earlier:
            parameter.grad = None
        self.place = 0

    def _do(self, action):
        kind, stage, k = action
        if kind == "F":
            self._forward(action)
        elif kind in "BI":
            self._backward(action)
        elif kind == "W":
            with self._region(action):
                for function in self.waiting.pop((stage, k)):
                    function()
        elif kind == "STEP":
            self._update(stage)
        elif self.dp.size > 1:
            self._reduce(stage)

    def _region(self, action):
        recorder = current().recorder
        return recorder.region(SPAN_KINDS[action.kind], str(action)) if recorder else nullcontext()

    def _forward(self, action):
        _, stage, k = action
        last = self.schedule.stages - 1
        if stage == 0:
            data = self.xp.asarray(self.x[k])
            if last not in self.stages:
                self.mail.send_labels(self.targets[k], k)
        else:
            data = self.mail.take(action)
        targets = None
        if stage == last:
            own = self.targets[k] if 0 in self.stages else self.mail.take_labels(k)
            targets = self.xp.asarray(own)
        x = data if stage == 0 else Tensor(data, requires_grad=is_floating(data.dtype))
        run = partial(self._run, stage, k, x, targets)
        with self._region(action):
            if self.recompute:
                with no_grad():
                    y = run()
            else:
                y = run()
        # The output of a stage is needed for its graph alone; with recomputation not even that is kept.
        self.held[stage, k] = x, run if self.recompute else y
        held = sum(s == stage for s, _ in [*self.held, *self.waiting])
        self.peak[stage] = max(self.peak[stage], held)
        if stage == last:
            self.losses[k] = y.data
        else:
            self.mail.send(action, y.data)

    def _run(self, stage, k, x, targets):
        """The stage's layers on x; random draws are those of these samples of the whole batch."""
        context = current()
        before, context.samples = context.samples, (self.first[k], self.samples)
        try:
            *functions, final = self.stages[stage]
            for function in functions:
                x = function(x)
            return final(x) if targets is None else final(x, targets)
        finally:
            context.samples = before

    def _backward(self, action):
        kind, stage, k = action
        grad = None if stage == self.schedule.stages - 1 else self.mail.take(action)
        with self._region(action):
            x, y = self.held.pop((stage, k))
            y = y() if self.recompute else y
            if grad is None:
                # The mean over all targets is the sum of the micro-batches' means, each by its share of the targets.
                total = self.counts[k] if self.schedule.asynchronous else self.labelled
                grad = self.xp.full(y.shape, self.counts[k] / max(1, total), y.dtype)
            later = [] if kind == "I" else None
            if y.requires_grad:
                y.backward(grad, later=later)
            if kind == "I":
                self.waiting[stage, k] = later
        if stage > 0:
            self.mail.send(action, self.xp.zeros(x.shape, x.dtype) if x.grad is None else x.grad)

    def _update(self, stage):
        """Weights change at once. Graphs that are still open keep the old array: that is PipeDream's weight stash."""
        for parameter in self.optimizers[stage].params:
            parameter.data, parameter.version = parameter.data.copy(), [0]
        self.optimizers[stage].step()
        self.optimizers[stage].zero_grad()

    def _reduce(self, stage):
        """The stage's gradients are complete: its data-parallel ranks add them up while this one goes on."""
        for group in fill_buckets(reversed(self._trainable(stage)), 4 << 20):
            dtype, nbytes = group[0][1].dtype, sum(p.data.nbytes for _, p in group)
            bucket = Bucket([p for _, p in group], self.memory[self.place : self.place + nbytes].view(dtype))
            self.place += -(-nbytes // 64) * 64
            used = bucket.complete()
            for parameter in used:
                bucket.take(parameter)
            flat, name = bucket.flat, f"reduce {Action('REDUCE_GRAD', stage)}"
            self.handles.append((start(all_reduce, flat, self.dp, out=flat, operation=name), bucket, used))

    def _finish(self):
        """Parameters of several stages, what data parallelism still does, and the loss for everybody."""
        mine = set(self.parameters())
        for name, (parameter, group) in self.shared.items():
            if parameter in mine and parameter.requires_grad:
                grad = self.xp.zeros_like(parameter.data) if parameter.grad is None else parameter.grad
                for comm in filter(None, (group, self.dp)):
                    all_reduce(grad, comm, out=grad, operation=f"all_reduce {name}")
                parameter.grad = grad
        for handle, bucket, used in self.handles:
            bucket.close(handle.wait(), used)
        for parameter, grad in self.earlier:
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        loss = np.zeros(1)
        if self.losses:
            total = self.labelled if not self.schedule.asynchronous else int(self.counts.sum())
            loss[0] = sum(float(value) * int(self.counts[k]) for k, value in self.losses.items()) / max(1, total)
            all_reduce(loss, self.dp, out=loss, operation="all_reduce loss")
        broadcast(
            loss, self.comm, self.schedule.rank_of[self.schedule.stages - 1], out=loss, operation="broadcast loss"
        )
        return float(loss[0])


def _tensors(layers):
    """Parameters and buffers of these layers."""
    modules = [module for layer in layers for module in layer.modules]
    return {t for module in modules for _, t in module._named(Tensor)}
