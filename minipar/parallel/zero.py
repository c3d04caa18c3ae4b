"""ZeRO: data parallelism in which no rank keeps what another rank keeps already.

A model of P parameters in mixed precision takes, in bytes (K = 12: weight, mean and square of Adam in float32):

    stage   parameters   gradients   optimizer      on n = 64 ranks, P = 7.5e9        sends, in parameters
      0        2 P          2 P         K P              120   GB                         2 P
      1        2 P          2 P         K P / n           31.4                            2 P
      2        2 P          2 P / n     K P / n           16.6                            2 P
      3        2 P / n      2 P / n     K P / n            1.9                            3 P

The model is cut into units: a layer each, and one for whatever belongs to no layer. The parameters of a unit lie one
after another in one flat array, and every rank owns a piece of it. An all-reduce of gradients is a reduce-scatter and
an all-gather. ZeRO updates its own piece between the two, so what travels is as much as before: gradients are
reduce-scattered to their owners, who do the optimizer's step, and new parameters are all-gathered. Stage 3 gathers a
unit just before it computes, forward and once more backward, and drops it afterwards:

    rank          unit 0      unit 1      unit 2            two memories take turns: while unit 1 computes in one,
    its stream    gather 1    gather 2    gather 3          unit 2 arrives in the other

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", sections 5, 7.
"""

from functools import partial

import numpy as np

from minipar.arrays import array_module
from minipar.autograd import Function, Tensor
from minipar.collectives import all_gather, all_reduce, reduce_scatter, start
from minipar.context import current
from minipar.errors import DTypeError, GraphError, ShapeError
from minipar.nn import Parameter
from minipar.parallel.data import DataParallel, lay_over
from minipar.parallel.shard import Shard


class Unit:
    """Parameters of one dtype that are kept, gathered and reduced together: a bucket, in the sense of DataParallel.

    name: for messages; named: its (name, parameter) pairs; comm: the ranks; stage, master_dtype: as in ZeRO.

    sizes: elements that each rank owns; `own`: this rank's slice. parameters: the flat array of all, None in stage 3
    while nobody needs it; shard: this rank's piece of it. master: the same piece in the optimizer's dtype, which may be
    the same memory. pieces: a Parameter for each parameter, empty ones too: what of it this rank owns.
    """

    def __init__(self, name, named, comm, stage, master_dtype):
        self.name, self.named, self.comm, self.stage = name, named, comm, stage
        dtypes = {p.dtype for _, p in named}
        if len(dtypes) > 1:
            raise DTypeError(f"{name} has parameters of {', '.join(sorted(map(str, dtypes)))}: ZeRO needs one dtype.")
        self.ranks, rank = (comm.size, comm.rank) if stage else (1, 0)
        elements, self.nbytes = sum(p.size for _, p in named), sum(p.data.nbytes for _, p in named)
        piece = -(-elements // self.ranks)
        self.sizes = [max(0, min(piece, elements - r * piece)) for r in range(self.ranks)]
        self.own = slice(sum(self.sizes[:rank]), sum(self.sizes[: rank + 1]))
        xp = self.xp = array_module(named[0][1].data)
        flat = xp.concatenate([p.data.reshape(-1) for _, p in named])
        self.shard = flat[self.own].copy() if stage == 3 else flat[self.own]
        same = master_dtype is None or np.dtype(master_dtype) == flat.dtype
        self.master = self.shard if same else self.shard.astype(master_dtype)
        self.parameters = self.flat = self.arriving = None
        self.empty = {p: xp.broadcast_to(xp.full((), np.nan, p.dtype), p.shape) for _, p in named}
        self.place(None if stage == 3 else flat)
        self.pieces = dict(self._pieces())
        self.published = self._version()

    def _pieces(self):
        begin, own = 0, self.own
        for name, p in self.named:
            first, last = (min(max(own.start, x), own.stop) for x in (begin, begin + p.size))
            data = self.master[first - own.start : last - own.start]
            if self.ranks == 1:
                piece = Parameter(data.reshape(p.shape), p.shard)
            else:
                shard = Shard(0, first - begin, last - begin, p.size, self.comm, p.shape, p.shard)
                piece = Parameter(data, shard)
            piece.data, piece.requires_grad = data.reshape(piece.shape), p.requires_grad
            yield name, piece
            begin += p.size

    # --- parameters: from the owners' pieces to everybody's layers ---

    def place(self, flat):
        """Let the layers find their parameters in `flat`; None: nowhere, so that a use by mistake gives NaN."""
        self.parameters = flat
        views = self.empty if flat is None else lay_over(flat, [p for _, p in self.named])
        for _, p in self.named:
            p.data = views[p]

    def _version(self):
        return sum(piece.version[0] for piece in self.pieces.values())

    def publish(self):
        """After an optimizer's step: round the master weights to the shard, and say that the layers' are new."""
        if self.published == self._version():
            return False
        self.published = self._version()
        if self.master is not self.shard:
            self.shard[...] = self.master
        for _, p in self.named:
            p.changed()
        return True

    def gather(self):
        """Start to fill `parameters` from all ranks."""
        if self.arriving is None:
            options = {"sizes": self.sizes, "out": self.parameters, "operation": f"all_gather {self.name}"}
            self.arriving = start(all_gather, self.shard, self.comm, **options)

    def await_parameters(self):
        """Return when they are there; in stage 3 they go stale with `release`."""
        self.gather()
        if self.arriving is not None:
            self.arriving.wait()

    def release(self):
        self.arriving = None

    # --- gradients: from everybody's layers to the owners' pieces ---

    def watch(self):
        """Take note of which parameters are trained now."""
        self.flat, self.missing = None, set()
        self.views = {p: None for _, p in self.named if p.requires_grad}
        self.owned_sizes, begin = [0] * self.ranks, 0  # elements of `flat`, which has no frozen parameters, by owner
        for _, p in self.named:
            for r in range(self.ranks) if p.requires_grad else ():
                first = sum(self.sizes[:r])
                self.owned_sizes[r] += max(0, min(first + self.sizes[r], begin + p.size) - max(first, begin))
            begin += p.size
        for (_, p), piece in zip(self.named, self.pieces.values(), strict=True):
            piece.requires_grad = p.requires_grad
            piece.grad = piece.grad if p.requires_grad else None

    def take(self, parameter):
        if self.flat is None:
            self.open()
        view = self.views[parameter]
        if parameter.grad is not view:
            view[...] = parameter.grad
            parameter.grad = view

    def open(self):
        trained = list(self.views)
        self.flat = self.xp.empty(sum(p.size for p in trained), self.named[0][1].dtype)
        self.views = lay_over(self.flat, trained)

    def complete(self):
        """As in Bucket; and the layers let go of their gradients, which the owners will have."""
        if self.flat is None:
            self.open()
        used = {p for p in self.views if p.grad is not None}
        for p, view in self.views.items():
            if p not in used:
                view[...] = 0
            p.grad = None
        return used

    def reduce(self, comm, operation):
        """On the stream: every owner's sum of all ranks' gradients. From stage 2 on the others are dropped."""
        if self.ranks == 1:
            return all_reduce(self.flat, comm, out=self.flat, operation=operation)
        owned = reduce_scatter(self.flat, comm, sizes=self.owned_sizes, operation=operation)
        if self.stage > 1:
            self.flat, self.views = None, dict.fromkeys(self.views)
            return owned
        begin = sum(self.owned_sizes[: comm.rank])
        self.flat[begin : begin + owned.size] = owned
        return self.flat[begin : begin + owned.size]

    def close(self, owned, used):
        """Give each piece its gradient; a second one is added to the first."""
        begin = 0
        for (_, p), piece in zip(self.named, self.pieces.values(), strict=True):
            if p not in self.views:
                continue
            grad, begin = owned[begin : begin + piece.size].reshape(piece.shape), begin + piece.size
            if p in used:
                piece.grad = grad if piece.grad is None else piece.grad + grad


class ZeRO(DataParallel):
    """`model` over the ranks of mesh["dp"], without keeping anything twice beyond what `stage` (0 to 3) leaves.

    `loss`, `average`, `no_sync` as in DataParallel. `parameters()` are this rank's pieces: make the optimizer from
    them, which must treat every element by itself (SGD, AdamW); clip_grad_norm and full_state take pieces too. An
    unused or frozen parameter stays as it is; which are frozen may change between steps. stage 0 is DataParallel with
    the interface of the others.

    units: modules of the model that are kept and gathered as one, in the order of use; by default those that stand in
    lists, such as a GPT's blocks. A parameter that two of them share goes with those that belong to no unit. In stage 3
    every forward pass must use each unit once, and all ranks must do all forward passes (GraphError otherwise).
    master_dtype: dtype of the optimizer's own weights where it is not the model's (mixed precision).
    """

    def __init__(self, model, mesh, stage, units=None, master_dtype=None):
        if stage not in (0, 1, 2, 3):
            raise ShapeError(f"ZeRO has the stages 0 to 3, not {stage}.")
        self.stage, self.master_dtype = stage, master_dtype
        self.unit_modules = default_units(model) if units is None else units
        super().__init__(model, mesh, reduce=Unit.reduce)

    def named_parameters(self):
        """(name, this rank's piece), the same names on all ranks; pieces may be empty."""
        return ((name, piece) for unit in self.units for name, piece in unit.pieces.items())

    def zero_grad(self):
        super().zero_grad()
        self.model.zero_grad()

    def allocate(self):
        """Make the units, in the order of the forward pass, the one for the rest first."""
        groups = assign(self.model, self.unit_modules)
        make = partial(Unit, comm=self.comm, stage=self.stage, master_dtype=self.master_dtype)
        self.units = [make(name, named) for name, named in groups if named]
        self.layers = []
        for module in self.unit_modules if self.stage == 3 else ():
            unit = next((unit for unit in self.units if unit.name == module.name), None)
            if unit is not None:
                module.forward = partial(self.compute, len(self.layers), module.forward)
                self.layers.append(unit)
        self.rest = [unit for unit in self.units if unit not in self.layers]
        self.memories, self.called = None, 0

    def lay_out(self, named):
        self.trainable, self.buckets = [p for _, p in named], self.units[::-1]
        for remove in self.removers:
            remove()
        for unit in self.buckets:
            unit.watch()
            self.watch(unit, [(name, p) for name, p in unit.named if p.requires_grad])

    # --- stages 1 and 2 gather after the optimizer's step, stage 3 when a unit is needed ---

    def run(self, function):
        self.publish()
        if self.stage < 3:
            return function()
        opened = self.memories is None
        if opened:
            self.open_memories()
        for unit in self.rest + self.layers[:2]:
            unit.gather()
        for unit in self.rest:
            unit.await_parameters()
        self.called = 0
        result = function()
        if self.called != len(self.layers):
            self.complain("the end")
        for unit in self.units:
            unit.release()
        if opened and not current().grad_enabled:
            self.drop()
        return result

    def publish(self):
        """Bring what an optimizer has changed to all ranks. The next loss does it too."""
        new = [unit for unit in self.units if unit.publish()]
        if self.stage in (1, 2):
            for unit in new:
                unit.gather()
            for unit in new:
                unit.await_parameters()
                unit.release()

    def open_memories(self):
        """One memory for even layers and one for odd ones: what a layer's graph has saved stays where it is."""
        self.memories = []
        for layers in (self.layers[::2], self.layers[1::2]):
            for unit in layers[:1]:
                self.memories.append(unit.xp.empty(max(u.nbytes for u in layers), np.uint8))
            for unit in layers:
                unit.place(self.memories[-1][: unit.nbytes].view(unit.shard.dtype))
        for unit in self.rest:
            unit.place(unit.xp.empty(sum(unit.sizes), unit.shard.dtype))

    def compute(self, i, forward, *inputs):
        """What a layer's forward becomes in stage 3."""
        unit = self.layers[i]
        if self.memories is None or i != self.called:
            self.complain(unit.name)
        self.called += 1
        unit.await_parameters()
        first = next((place for place, x in enumerate(inputs) if isinstance(x, Tensor)), None)
        inputs = [Leave.apply(x, owner=self, i=i) if place == first else x for place, x in enumerate(inputs)]
        y = Enter.apply(forward(*inputs), owner=self, i=i)
        unit.release()
        self.gather_layer(i + 2)
        return y

    def complain(self, came):
        order = ", ".join(layer.name for layer in self.layers)
        raise GraphError(
            f"stage 3 gathers {order} ahead of use, in this order, each once in a forward pass of the ZeRO model; but "
            f"after {self.called} of them came {came}: name units that are used so (units=...)."
        )

    def gather_layer(self, i):
        if 0 <= i < len(self.layers):
            self.layers[i].gather()

    def _start_step(self):
        super()._start_step()
        for unit in self.units:
            for piece in unit.pieces.values():
                piece.grad = None if piece.grad is None else piece.grad.copy()  # its memory will be written again

    def begin(self, table, value):
        scale = super().begin(table, value)
        if self.stage == 3:
            last = len(self.layers) - 1
            for unit in self.rest:
                unit.gather()
            self.gather_layer(last)
            self.gather_layer(last - 1)
            for unit in self.rest:
                unit.await_parameters()
        return scale

    def launch(self):
        if self.stage < 3:
            super().launch()  # in stage 3 a layer is sent when the backward pass leaves it, alike on all ranks

    def leave(self, i):
        """The backward pass has left layer i."""
        self.layers[i].release()
        while self.exchanges and self.layers[i] in self.buckets[len(self.handles) :]:
            self.send()
        self.gather_layer(i - 2)

    def finish(self):
        super().finish()
        if self.stage == 3:
            self.drop()

    def drop(self):
        for unit in self.units:
            unit.release()
            unit.place(None)
        self.memories = None


class Leave(Function):
    """Stands before a layer: identity forward; a backward pass comes here when it is done with the layer."""

    view = True

    @staticmethod
    def forward(ctx, x, owner, i):
        ctx.owner, ctx.i = owner, i
        return x.view()

    @staticmethod
    def backward(ctx, grad):
        ctx.owner.leave(ctx.i)
        return grad


class Enter(Function):
    """Stands behind a layer: identity forward; a backward pass comes here before the layer, and waits for it."""

    view = True

    @staticmethod
    def forward(ctx, x, owner, i):
        ctx.unit, ctx.memories = owner.layers[i], owner.memories
        ctx.owner = owner
        return x.view()

    @staticmethod
    def backward(ctx, grad):
        if ctx.owner.memories is not ctx.memories:
            raise GraphError(f"{ctx.unit.name} was gathered anew since this forward pass: call backward before that.")
        ctx.unit.await_parameters()
        return grad


def fully_shard(model, mesh, **options):
    """ZeRO stage 3; options as there."""
    return ZeRO(model, mesh, stage=3, **options)


def default_units(model):
    """The outermost modules that stand in lists."""
    chosen = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2].isdigit() and not any(name.startswith(f"{outer}.") for outer in chosen):
            chosen[name] = module
    return list(chosen.values())


def assign(model, modules):
    """[(name, (name, parameter) pairs)]: of each module, and before them what belongs to none or to more than one."""
    model.assign_names()
    owners = {}
    for name, module in model.named_modules():
        owner = next((m for m in modules if name == m.name or name.startswith(f"{m.name}.")), None)
        for _, child in module.children():
            if isinstance(child, Parameter):
                owners.setdefault(child, set()).add(owner)
    groups = {None: ("the rest", []), **{module: (module.name, []) for module in modules}}
    for name, p in model.named_parameters():
        owner = next(iter(owners[p])) if len(owners[p]) == 1 else None
        groups[owner][1].append((name, p))
    return list(groups.values())
