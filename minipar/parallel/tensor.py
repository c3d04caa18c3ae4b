"""Tensor parallelism: one layer's matrix products are split over a group of ranks.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.

An MLP is y = gelu(x A) B. Cut A by columns and B by rows:

    rank 0:   x ──f──> x A₀ ──gelu──> h₀ ──> h₀ B₀ ──g──> y          A = [A₀ A₁],   B = [B₀
    rank 1:   x ──f──> x A₁ ──gelu──> h₁ ──> h₁ B₁ ──g──> y                               B₁]

GELU acts on each element of h alone, so nothing moves until the end, where y = h₀ B₀ + h₁ B₁: one all-reduce (g).
Going back, each rank knows only its columns' share of dx: a second all-reduce (f). Attention is split the same way,
by heads. So a layer costs two all-reduces forward and two backward, each of batch x time x width elements.

Pieces need not be equal: 8 heads on 3 ranks are 3, 3 and 2.
"""

from minipar.arrays import array_module, split_bounds, split_sizes
from minipar.autograd import Function
from minipar.autograd import functional as F
from minipar.autograd.fused import check_range
from minipar.collectives import all_gather, all_reduce
from minipar.errors import ShapeError
from minipar.nn import Module, Parameter
from minipar.parallel.shard import Shard

# --- the conjugate operators -----------------------------------------------------------------------------------------


class CopyToTensorParallelRegion(Function):
    """f: identity forward, all-reduce backward: each rank that reads x knows a share of its gradient."""

    view = True

    @staticmethod
    def forward(ctx, x, comm, name):
        ctx.comm, ctx.name = comm, name
        return x.view()

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, ctx.comm, operation=f"all_reduce {ctx.name} backward")


class ReduceFromTensorParallelRegion(Function):
    """g: all-reduce forward, identity backward: each rank holds a summand of y, all need the sum."""

    @staticmethod
    def forward(ctx, x, comm, name):
        return all_reduce(x, comm, operation=f"all_reduce {name} forward")

    @staticmethod
    def backward(ctx, grad):
        return grad


class GatherFromTensorParallelRegion(Function):
    """Joins the ranks' pieces of the last axis, `sizes` long; backward keeps this rank's own piece."""

    @staticmethod
    def forward(ctx, x, comm, sizes, name):
        start = sum(sizes[: comm.rank])
        ctx.own = slice(start, start + sizes[comm.rank])
        return all_gather(x, comm, axis=-1, sizes=sizes, operation=f"all_gather {name} forward")

    @staticmethod
    def backward(ctx, grad):
        return grad[..., ctx.own]


def copy_to_region(x, comm, name):
    return CopyToTensorParallelRegion.apply(x, comm=comm, name=name)


def reduce_from_region(x, comm, name):
    return ReduceFromTensorParallelRegion.apply(x, comm=comm, name=name)


# --- pieces of parameters --------------------------------------------------------------------------------------------


def split_units(units, comm, what):
    """The (start, stop) of this rank's share of `units` heads, columns or rows; ShapeError if a rank would get none."""
    if units < comm.size:
        raise ShapeError(
            f"{units} {what} cannot be split over {comm.size} tensor-parallel ranks: allowed are 1 to {units} ranks."
        )
    return split_bounds(units, comm.size, comm.rank)


def shard_parameter(parameter, axis, comm, what, unit=1):
    """This rank's piece of a whole parameter, cut along `axis` between groups of `unit` elements."""
    size = parameter.shape[axis]
    start, stop = (unit * bound for bound in split_units(size // unit, comm, what))
    piece = parameter.data[(slice(None),) * axis + (slice(start, stop),)].copy()
    return Parameter(piece, Shard(axis, start, stop, size, comm))


# --- layers ----------------------------------------------------------------------------------------------------------


class ColumnParallelLinear(Module):
    """x @ A + b with A (inputs, outputs) cut by columns: every rank has all of x and gets its columns of the result.

    linear: the whole nn.Linear. unit: how many columns stay together (a head's, say).
    """

    def __init__(self, linear, comm, what="columns", unit=1):
        self.comm = comm
        self.weight = shard_parameter(linear.weight, 1, comm, what, unit)
        self.bias = None if linear.bias is None else shard_parameter(linear.bias, 0, comm, what, unit)

    def forward(self, x):
        return F.linear(copy_to_region(x, self.comm, self.name), self.weight, self.bias)


class RowParallelLinear(Module):
    """x @ B + b with B (inputs, outputs) cut by rows: every rank has its columns of x and gets the whole result.

    The bias is whole on every rank and added once, after the all-reduce.
    """

    def __init__(self, linear, comm, what="rows", unit=1):
        self.comm = comm
        self.weight = shard_parameter(linear.weight, 0, comm, what, unit)
        self.bias = linear.bias

    def forward(self, x):
        y = reduce_from_region(F.linear(x, self.weight, None), self.comm, self.name)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(Module):
    """An embedding whose rows are spread over the ranks: each looks up its own, and an all-reduce fills in the rest."""

    def __init__(self, embedding, comm):
        self.comm = comm
        self.weight = shard_parameter(embedding.weight, 0, comm, "vocabulary rows")

    def forward(self, ids):
        shard = self.weight.shard
        check_range(ids, shard.size, "id", "embedding")
        own = (ids >= shard.start) & (ids < shard.stop)
        local = array_module(ids).where(own, ids - shard.start, 0)
        return reduce_from_region(F.embedding(self.weight, local) * own[..., None], self.comm, self.name)


class VocabParallelCrossEntropy(Function):
    """Cross-entropy of logits whose columns are spread over the ranks; the logits are never gathered.

    logits (..., this rank's classes), targets (...,) of the whole vocabulary, `start`: first class of this rank. Three
    numbers a row travel instead of the vocabulary: the largest logit, the sum of exponentials, the target's logit.
    Ignored targets as in fused.CrossEntropy.
    """

    @staticmethod
    def forward(ctx, logits, targets, comm, start, vocabulary, name, ignore_index=-100):
        xp = array_module(logits)
        ctx.shape, classes = logits.shape, logits.shape[-1]
        if targets.shape != ctx.shape[:-1]:
            raise ShapeError(f"logits of shape {ctx.shape} need targets of {ctx.shape[:-1]}, not {targets.shape}.")
        z, t = logits.reshape(-1, classes), targets.reshape(-1)
        labelled = t != ignore_index
        check_range(xp.where(labelled, t, 0), vocabulary, "target", "classes")
        ctx.own = labelled & (t >= start) & (t < start + classes)
        ctx.targets = xp.where(ctx.own, t - start, 0)
        peak = all_reduce(z.max(axis=1), comm, op="max", operation=f"all_reduce {name} largest logit")
        probs = z - peak[:, None]
        sums = xp.empty((2, len(z)), z.dtype)
        sums[1] = xp.where(ctx.own, probs[xp.arange(len(z)), ctx.targets], 0)
        xp.exp(probs, out=probs)
        sums[0] = probs.sum(axis=1)
        sums = all_reduce(sums, comm, out=sums, operation=f"all_reduce {name} sum of exponentials")
        probs /= sums[0][:, None]
        losses = xp.where(labelled, xp.log(sums[0]) - sums[1], 0)
        count = max(1, int(labelled.sum()))
        ctx.weight = (labelled / count).astype(z.dtype)
        ctx.save_for_backward(probs)
        return xp.asarray((losses.sum(dtype=z.dtype) / count).astype(z.dtype))

    @staticmethod
    def backward(ctx, grad):
        (probs,) = ctx.saved
        weight = ctx.weight * grad
        dlogits = probs * weight[:, None]
        dlogits[array_module(probs).arange(len(probs)), ctx.targets] -= weight * ctx.own
        return dlogits.reshape(ctx.shape), None


class VocabParallelHead(Module):
    """nn.Head with the vocabulary spread over the ranks; its weight is split as a VocabParallelEmbedding's."""

    def __init__(self, weight, comm):
        self.weight, self.comm = weight, comm

    def local_logits(self, x):
        return F.linear(copy_to_region(x, self.comm, self.name), self.weight.T, None)

    def forward(self, x):
        sizes = split_sizes(self.weight.shard.size, self.comm.size)
        return GatherFromTensorParallelRegion.apply(self.local_logits(x), comm=self.comm, sizes=sizes, name=self.name)

    def loss(self, x, targets):
        shard = self.weight.shard
        targets = array_module(x.data).asarray(targets)
        return VocabParallelCrossEntropy.apply(
            self.local_logits(x), targets, comm=self.comm, start=shard.start, vocabulary=shard.size, name=self.name
        )


# --- the whole model -------------------------------------------------------------------------------------------------


def tensor_parallel(model, mesh):
    """Split the nn.GPT `model` over the "tp" axis of `mesh`, in place; returns it.

    Every rank calls it with the same whole model and keeps its pieces: heads of each attention, hidden units of each
    MLP, rows of the vocabulary. Layer norms, position embeddings and the biases of row-split layers stay whole.
    Raises ShapeError, before anything is changed, where there are more ranks than heads, hidden units or tokens.
    """
    comm = mesh["tp"]
    config = model.config
    if isinstance(model.head, VocabParallelHead):
        raise ShapeError("this model has been split already: start from a whole one.")
    split_units(config.heads, comm, "heads")
    split_units(config.vocab_size, comm, "vocabulary rows")
    for block in model.blocks:
        _split_attention(block.attn, comm)
        block.mlp.fc = ColumnParallelLinear(block.mlp.fc, comm, "hidden units")
        block.mlp.proj = RowParallelLinear(block.mlp.proj, comm, "hidden units")
    whole = model.wte.weight
    model.wte = VocabParallelEmbedding(model.wte, comm)
    tied = model.head.weight is whole
    weight = model.wte.weight if tied else shard_parameter(model.head.weight, 0, comm, "vocabulary rows")
    model.head = VocabParallelHead(weight, comm)
    model.assign_names()
    return model


def _split_attention(attention, comm):
    heads, depth = attention.heads, attention.depth
    start, stop = split_units(heads, comm, "heads")
    attention.qkv = ColumnParallelLinear(attention.qkv, comm, "heads", unit=3 * depth)
    attention.proj = RowParallelLinear(attention.proj, comm, "heads", unit=depth)
    attention.heads = stop - start
    # Probabilities are dropped inside the split region: each rank draws its heads' part of the whole mask.
    attention.drop.shard = {1: (start, heads)}
