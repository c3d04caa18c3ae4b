"""NumPy or CuPy: the little that the engine must know about where an array lives."""

import sys

import numpy as np

from minipar.errors import DeviceError, DTypeError


def array_module(x):
    """The module whose array type `x` is: `numpy`, `cupy`, or a stand-in for it in tests."""
    name = type(x).__module__.partition(".")[0]
    if name == "builtins":
        raise DTypeError(f"an array of NumPy or CuPy is needed here, not a {type(x).__name__}.")
    return sys.modules[name]


def device(name):
    """The array module for `name`: "cpu" is NumPy, "cuda" is CuPy.

    Raises DeviceError, which says in one sentence why there is no GPU to use.
    """
    if name == "cpu":
        return np
    if name != "cuda":
        raise DeviceError(f"device {name!r} is unknown: choose 'cpu' or 'cuda'.")
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            'device "cuda" needs CuPy, which is not installed: pip install "minipar[cuda12]" (or cuda13).'
        ) from error
    if not cupy.cuda.is_available():
        raise DeviceError('device "cuda" needs an NVIDIA GPU and its driver, and CuPy finds none on this machine.')
    return cupy


def to_host(x):
    """`x` as a NumPy array: itself on the CPU, an explicit copy from a GPU."""
    return x if isinstance(x, np.ndarray) else x.get()


def split_sizes(n, parts):
    """Sizes that cut `n` elements into `parts` pieces as evenly as can be; the first `n % parts` get one more."""
    return [n // parts + (i < n % parts) for i in range(parts)]


def split_bounds(n, parts, index):
    """The (start, stop) of piece `index` when `n` elements are cut by `split_sizes`."""
    base, extra = divmod(n, parts)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


def scatter_add(target, indices, values):
    """target[indices[i]] += values[i] for every i, repeated indices included.

    target (rows, ...), indices (n,) of integers in [0, rows), values (n, ...).
    """
    xp = array_module(target)
    if xp is not np:
        xp.add.at(target, indices, values)  # atomic adds on a GPU
    elif indices.size:
        # Sorting and adding runs of equal indices is ten times faster than np.add.at on rows.
        order = np.argsort(indices, kind="stable")
        rows, starts = np.unique(indices[order], return_index=True)
        target[rows] += np.add.reduceat(values[order], starts, axis=0)
