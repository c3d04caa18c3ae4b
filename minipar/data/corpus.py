"""Text to train on, as bytes: a vocabulary of 256 that needs no tokenizer and no download."""

import sysconfig
from pathlib import Path

import numpy as np

from minipar import rng
from minipar.errors import ShapeError

LIMIT = 4 << 20  # bytes of the default corpus: more than a lesson ever reads


class ByteCorpus:
    """The bytes of `text` (a path), or of Python's own standard library, cut into training and held-out parts.

    The last `held_out` share of the bytes is for evaluation and never trained on. Samples depend on `seed`, the step
    and their number in the global batch alone, so any number of ranks reads the same data.
    """

    def __init__(self, text=None, held_out=0.1, seed=0):
        if not 0 <= held_out < 1:
            raise ShapeError(f"held_out is a share of the text, at least 0 and below 1, not {held_out}.")
        self.seed = seed
        data = np.frombuffer(standard_library() if text is None else read(text), np.uint8)
        cut = len(data) - int(len(data) * held_out)
        self.training, self.held_out = data[:cut], data[cut:]

    def batch(self, step, samples, context):
        """(tokens, targets), int64 (samples, context): random pieces of the training part, targets one byte on."""
        places = len(self.training) - context
        if places < 1:
            raise ShapeError(
                f"a text with {len(self.training)} training bytes is too short for a context of {context}: "
                f"it needs at least {context + 1}."
            )
        return _windows(self.training, rng.integers(places, samples, self.seed, "batch", step), context)

    def windows(self, context):
        """How many pieces of `context` tokens the training part has, beside one another: the samples of an epoch."""
        return max(0, len(self.training) - 1) // context

    def take(self, indices, context):
        """(tokens, targets) like `batch`: the pieces with these numbers, 0 to windows(context) - 1."""
        return _windows(self.training, np.asarray(indices, np.int64) * context, context)

    def held_out_batch(self, samples, context):
        """(tokens, targets) like `batch`: evenly spread pieces of the held-out part, the same at every call."""
        places = len(self.held_out) - context
        if places < 1:
            raise ShapeError(
                f"a text with {len(self.held_out)} held-out bytes is too short for a context of {context}: "
                f"it needs at least {context + 1}."
            )
        return _windows(self.held_out, np.linspace(0, places - 1, samples).astype(np.int64), context)


def _windows(data, starts, context):
    pieces = data[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return pieces[:, :-1], pieces[:, 1:]


def read(path):
    """The bytes of a file; ShapeError in a sentence if it cannot be read or is empty."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ShapeError(f"the text {str(path)!r} cannot be read: {error.strerror}.") from error
    if not data:
        raise ShapeError(f"the text {str(path)!r} is empty.")
    return data


def standard_library():
    """Sources of the modules of Python's standard library, in the order of their names, up to LIMIT bytes."""
    folder, parts, size = Path(sysconfig.get_paths()["stdlib"]), [], 0
    for path in sorted(folder.glob("[!_]*.py")):  # without _sysconfigdata, which differs from build to build
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size > LIMIT:
            break
    if not parts:
        raise ShapeError(f"no sources of the standard library lie in {folder}: name a text of your own with --text.")
    return b"".join(parts)[:LIMIT]
