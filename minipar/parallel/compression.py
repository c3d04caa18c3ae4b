"""Gradient compression: fewer bytes for each bucket of gradients, and what was left out is added next time.

    exchange        bytes a number, there and back      a rank sends, of 2 (n - 1) / n x 4 S bytes
    Half            2 instead of 4                      1/2
    OneBitSign      1 bit, and 4 bytes for every 512    1/30
    TopK            8, for a share f of the numbers     f n: every rank's choice goes to all others
    PowerSGD        r (a + b) of a b in a matrix        r (a + b) / (a b)

Each is made once and handed to DataParallel(model, mesh, reduce=TopK(0.01)). What a rank has not sent stays behind in
an error array and is added to the next gradient, so nothing is lost, only late:

    sum over ranks of (gradient + error before) = what all get + sum over ranks of error afterwards

All ranks decode the same bytes, so that their gradients are bitwise equal. The errors belong to a run, not to its
checkpoint, and start from zero where the set of trained parameters changes.
Source: Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, "Error feedback fixes SignSGD".
"""

import math
from weakref import WeakKeyDictionary

import numpy as np

from minipar import rng
from minipar.arrays import array_module, split_sizes
from minipar.collectives import all_gather, all_reduce, all_to_all
from minipar.collectives.ring import cut
from minipar.errors import ShapeError


class Exchange:
    """Base of the compressed exchanges: keeps what each bucket has left behind. Subclasses give `run`.

    run(gradient, bucket, comm, operation): gradient: 1-D, this rank's, error included; returns (the sum that all ranks
    get, what of `gradient` this rank has not sent). Both in float32, or float64 where the gradients are.
    """

    def __init__(self):
        self.errors, self.kept = WeakKeyDictionary(), WeakKeyDictionary()  # kept: what else a subclass remembers

    def __call__(self, bucket, comm, operation):
        flat, xp = bucket.flat, array_module(bucket.flat)
        gradient = flat.astype(np.float64 if flat.dtype == np.float64 else np.float32)
        if bucket in self.errors:
            gradient += self.errors[bucket]
        with np.errstate(invalid="ignore"):
            total, error = self.run(gradient, bucket, comm, operation)
        error[~xp.isfinite(error)] = 0  # a gradient that is inf or nan is everybody's at once, and not kept
        self.errors[bucket] = error
        flat[...] = total
        return flat


class InPieces(Exchange):
    """A reduce-scatter and an all-gather of codes: every rank encodes a piece for each of the others, who decodes what
    comes and adds it up; the sum is encoded once more, and its own error kept by the one who has added it up.

    encode(x): float array -> uint8 array of `length(x.size)`; decode(code, x): writes the numbers into x.
    """

    def run(self, gradient, bucket, comm, operation):
        xp, sizes = array_module(gradient), split_sizes(gradient.size, comm.size)
        pieces, decoded = cut(gradient, sizes), xp.empty_like(gradient)
        codes = [self.encode(piece) for piece in pieces]
        for code, piece in zip(codes, cut(decoded, sizes), strict=True):
            self.decode(code, piece)
        error = gradient - decoded
        lengths = [self.length(size) for size in sizes]
        codes = all_to_all(xp.concatenate(codes), comm, sizes=lengths, operation=f"{operation}, pieces")
        total = self.kept.get(bucket, 0) + xp.zeros_like(pieces[comm.rank])
        one = xp.empty_like(total)
        for code in cut(codes, [lengths[comm.rank]] * comm.size):
            self.decode(code, one)
            total += one
        code = self.encode(total)
        self.decode(code, one)
        self.kept[bucket] = xp.where(xp.isfinite(total), total - one, 0)
        codes = all_gather(code, comm, sizes=lengths, operation=f"{operation}, sums")
        for code, piece in zip(cut(codes, lengths), cut(decoded, sizes), strict=True):
            self.decode(code, piece)
        return decoded, error


class Half(InPieces):
    """Two bytes a number: dtype "float16" or "bfloat16". What is too large for float16 is cut to 65504, and the rest
    comes with the next ones; sums are made in float32."""

    def __init__(self, dtype="bfloat16"):
        super().__init__()
        if dtype not in ("float16", "bfloat16"):
            raise ShapeError(f"Half sends float16 or bfloat16, not {dtype}.")
        self.dtype = dtype

    def length(self, size):
        return 2 * size

    def encode(self, x):
        xp = array_module(x)
        if self.dtype == "float16":
            return xp.where(xp.isinf(x), x, xp.clip(x, -65504, 65504)).astype(np.float16).view(np.uint8)
        bits = x.astype(np.float32).view(np.uint32)  # bfloat16 is its upper half, rounded to nearest, ties to even
        bits = xp.where(xp.isnan(x), 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits >> 16).astype(np.uint16).view(np.uint8)

    def decode(self, code, x):
        if self.dtype == "float16":
            x[...] = code.view(np.float16)
        else:
            x[...] = (code.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


class OneBitSign(InPieces):
    """The sign of each number, and for every 512 of them the mean of their absolute values, which fits them best."""

    block = 512

    def length(self, size):
        return 4 * -(-size // self.block) + -(-size // 8)

    def encode(self, x):
        xp, whole = array_module(x), x.size // self.block * self.block
        scales = xp.abs(x[:whole]).reshape(-1, self.block).mean(axis=1)
        if x.size > whole:
            scales = xp.concatenate([scales, xp.abs(x[whole:]).mean(keepdims=True)])
        return xp.concatenate([scales.astype(np.float32).view(np.uint8), xp.packbits(x >= 0)])

    def decode(self, code, x):
        xp, bits = array_module(x), 4 * -(-x.size // self.block)
        scales = xp.repeat(code[:bits].copy().view(np.float32), self.block)[: x.size]
        x[...] = xp.where(xp.unpackbits(code[bits:])[: x.size], scales, -scales)


class OneBitAdam(OneBitSign):
    """The signs of Adam's mean, after `warm_up` plain steps: with AdamW(..., freeze_after=warm_up), whose square stays.

    Its mean m is what is exchanged: a rank encodes its part of beta1 m + (1 - beta1) gradient, and the optimizer gets
    the gradient that makes its mean the decoded one. So the gradients must reach it as they are, not clipped, and from
    the first step on; and the warm-up must have given every number a gradient (see AdamW). Signs of gradients
    themselves would give small and large ones the same say in the square.
    Source: Tang et al. 2021, "1-bit Adam: communication efficient large-scale training", algorithm 1.
    """

    def __init__(self, warm_up, beta1=0.9):
        super().__init__()
        self.warm_up, self.beta1, self.means = warm_up, beta1, WeakKeyDictionary()

    def run(self, gradient, bucket, comm, operation):
        xp = array_module(gradient)
        steps, mean = self.means.get(bucket, (0, xp.zeros_like(gradient)))
        if steps < self.warm_up:
            total = all_reduce(gradient, comm, operation=operation)
            new, error = self.beta1 * mean + (1 - self.beta1) * total, xp.zeros_like(gradient)
        else:
            # What error feedback has added to the gradient is a part of the mean, not of the gradient.
            error = self.errors.get(bucket, 0)
            part = self.beta1 / comm.size * mean + (1 - self.beta1) * (gradient - error) + error
            new, error = super().run(part, bucket, comm, operation)
            total = (new - self.beta1 * mean) / (1 - self.beta1)
        self.means[bucket] = steps + 1, new
        return total, error


class TopK(Exchange):
    """The `fraction` of the numbers that are largest in absolute value, at least one, with their places (int32).

    Source: Stich et al. 2018, "Sparsified SGD with memory".
    """

    def __init__(self, fraction):
        super().__init__()
        if not 0 < fraction <= 1:
            raise ShapeError(f"TopK sends a fraction above 0 and up to 1 of the numbers, not {fraction}.")
        self.fraction = fraction

    def count(self, size):
        """How many of `size` numbers are sent."""
        return math.ceil(self.fraction * size)

    def run(self, gradient, bucket, comm, operation):
        xp, size = array_module(gradient), gradient.size
        k = self.count(size)
        order = xp.argpartition(xp.abs(gradient), size - k) if 0 < k < size else xp.arange(size)
        places = xp.sort(order[size - k :]).astype(np.int32 if size < 1 << 31 else np.int64)
        values = gradient[places].astype(bucket.flat.dtype)
        sizes, total = [k] * comm.size, xp.zeros_like(gradient)
        all_places = all_gather(places, comm, sizes=sizes, operation=f"{operation}, places")
        all_values = all_gather(values, comm, sizes=sizes, operation=f"{operation}, values")
        for where, what in zip(cut(all_places, sizes), cut(all_values, sizes), strict=True):
            total[where] += what  # a rank names no place twice
        gradient[places] -= values
        return total, gradient


class PowerSGD(Exchange):
    """Each matrix M (a, b) as P Q^T, of rank `rank`, by one step of the power method from the last exchange's Q.

    P = M Q summed over the ranks and made orthonormal, Q = M^T P summed: (a + b) rank numbers for a b. What is not a
    matrix, or too small to gain, goes as it is.
    Source: Vogels, Karimireddy, Jaggi 2019, "PowerSGD: practical low-rank gradient compression", algorithm 1.
    """

    def __init__(self, rank):
        super().__init__()
        if rank < 1:
            raise ShapeError(f"PowerSGD needs a rank of at least 1, not {rank}.")
        self.rank = rank

    def sizes(self, shape):
        """(a, b, r) of the matrix that an array of that shape is taken for, or None if it goes as it is."""
        a, b = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
        return (a, b, self.rank) if (a + b) * self.rank < a * b else None

    def run(self, gradient, bucket, comm, operation):
        xp, shapes = array_module(gradient), [view.shape for view in bucket.views.values()]
        pieces = cut(gradient, [math.prod(shape) for shape in shapes])
        cuts = [self.sizes(shape) for shape in shapes]
        matrices = [piece.reshape(c[:2]) for piece, c in zip(pieces, cuts, strict=True) if c]
        rest = [piece for piece, c in zip(pieces, cuts, strict=True) if not c]
        r = self.rank
        if bucket not in self.kept:  # the same numbers on all ranks
            keys = [("PowerSGD", operation, i) for i in range(len(matrices))]
            self.kept[bucket] = [
                xp.asarray(rng.normal((m.shape[1], r), gradient.dtype, *key))
                for m, key in zip(matrices, keys, strict=True)
            ]
        left = self._sum([m @ q for m, q in zip(matrices, self.kept[bucket], strict=True)] + rest, comm, operation)
        rest_sums = left[len(matrices) :]
        left = [xp.linalg.qr(p)[0] for p in left[: len(matrices)]]
        own = [m.T @ p for m, p in zip(matrices, left, strict=True)]
        right = self._sum(own, comm, f"{operation}, Q")
        total = xp.empty_like(gradient)
        sums = iter(rest_sums), iter(zip(matrices, left, own, right, strict=True))
        for piece, target, c in zip(pieces, cut(total, [p.size for p in pieces]), cuts, strict=True):
            if c is None:
                target[...] = next(sums[0])
                piece[...] = 0
            else:
                m, p, q, q_sum = next(sums[1])
                xp.matmul(p, q_sum.T, out=target.reshape(m.shape))
                m -= p @ q.T
        if all(bool(xp.isfinite(q).all()) for q in right):
            self.kept[bucket] = right
        return total, gradient

    def _sum(self, arrays, comm, operation):
        """The sums of several arrays over the ranks, in one message."""
        if not arrays:
            return []
        flat = array_module(arrays[0]).concatenate([a.reshape(-1) for a in arrays])
        all_reduce(flat, comm, out=flat, operation=operation)
        return [piece.reshape(a.shape) for piece, a in zip(cut(flat, [a.size for a in arrays]), arrays, strict=True)]
