"""Counter-based random numbers: a draw depends on what it is for, never on who draws it or in which order.

A key such as (seed, "dropout", layer name, step) selects a stream of the Philox generator, and an element's global
index selects the position in it. So a weight, a dropout mask or a sample is the same on one rank and on sixty-four.
Drawn on the host, so that a GPU gives the CPU's numbers.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import hashlib
import math

import numpy as np


def philox(*key, offset=0):
    """A Philox bit generator for `key` (strings and integers), `offset` blocks of four 64-bit words into its stream."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    generator = np.random.Philox(key=np.frombuffer(digest, np.uint64))
    return generator.advance(offset) if offset else generator


def normal(shape, dtype, *key):
    """Standard normal numbers of `shape`; float64 draws rounded to `dtype`, so that dtypes agree with one another."""
    return np.random.Generator(philox(*key)).standard_normal(shape).astype(dtype)


def integers(high, count, *key):
    """`count` int64 numbers, uniform in [0, high)."""
    return np.random.Generator(philox(*key)).integers(high, size=count)


def permutation(n, *key):
    """The numbers 0 to n - 1 in a random order, int64."""
    return np.random.Generator(philox(*key)).permutation(n)


def keep_mask(p, shape, *key, block=None):
    """Booleans of `shape`, False (dropped) with probability `p`, which is rounded to a multiple of 2**-16.

    `block` = (full shape, start of each axis) says that `shape` is a block of a larger array; the mask is then that
    block of the larger array's mask, whatever the other blocks are.
    """
    full, start = block or (shape, (0,) * len(shape))
    mask = np.empty(shape, bool)
    if not mask.size:
        return mask
    # Trailing axes that are whole, and the one before them, are contiguous in the larger array: draw them as one run.
    whole = len(shape)
    while whole > 0 and shape[whole - 1] == full[whole - 1]:
        whole -= 1
    lead = max(whole - 1, 0)
    strides = [math.prod(full[axis + 1 :]) for axis in range(len(full))]
    inside = sum(s * stride for s, stride in zip(start[lead:], strides[lead:], strict=True))
    rows = mask.reshape(-1, math.prod(shape[lead:]))
    for row, index in zip(rows, np.ndindex(*shape[:lead]), strict=True):
        first = inside + sum((s + i) * stride for s, i, stride in zip(start, index, strides, strict=False))
        row[:] = _lanes(first, row.size, key) >= round(p * 65536)
    return mask


def keep_scale(p):
    """What kept elements are multiplied with, so that the expectation stays: 1 / (1 - p) for the rounded p."""
    return 65536 / (65536 - round(p * 65536))


def _lanes(first, count, key):
    """Elements `first` to `first + count` of the stream of 16-bit numbers; a Philox block of 256 bits holds 16."""
    block, skip = divmod(first, 16)
    words = philox(*key, offset=block).random_raw(4 * -(-(skip + count) // 16))
    return words.astype("<u8", copy=False).view("<u2")[skip : skip + count]
