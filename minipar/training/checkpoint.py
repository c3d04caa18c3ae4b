"""Checkpoints: all of a run's state in one file, from which any number of ranks can go on.

What ranks hold in pieces is put together first, so nothing in the file tells how many there were:

    parameters/NAME           parameters and buffers
    optimizer/KIND/NAME       what the optimizer keeps of each parameter, such as its mean and square
    steps                     how many steps it has done
    more/NAME                 what else the program needs: its place in the data, a learning rate, ...

It is a NumPy .npz file without pickles: reading one runs no code. It takes the whole model's memory on every rank.
"""

import io
import zipfile

import numpy as np

from minipar.context import current
from minipar.errors import CheckpointError
from minipar.parallel import full_state, load_full_state
from minipar.trace.perfetto import write_atomically


def save_checkpoint(path, model, optimizer=None, **more):
    """Write the state of `model` and `optimizer` to the file `path`; all ranks must call it, and rank 0 writes.

    more: numbers, strings or arrays to keep with it. It returns once the file is there, on all ranks; an earlier file
    stays until then. Raises CheckpointError where it cannot be written.
    """
    world, state = current().world, full_state(model, optimizer)
    if world is None or world.rank == 0:
        file = io.BytesIO()
        np.savez(file, **dict(_flat({**state, "more": more})))
        try:
            write_atomically(path, file.getbuffer())
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint can be written to {str(path)!r}: {error.strerror or error}."
            ) from error
    if world is not None:
        world.barrier("save_checkpoint")


def load_checkpoint(path, model, optimizer=None):
    """Go on from what save_checkpoint has written, on any number of ranks; returns its `more`.

    Every rank reads the file. Raises CheckpointError for a file that is missing or not whole, ShapeError for one of
    another model; then nothing has changed.
    """
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            found = {key: file[key] for key in file.files}
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {str(path)!r}.") from error
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{str(path)!r} is no whole checkpoint: {error}.") from error
    state = {"parameters": {}, "optimizer": {}, "more": {}}
    for key, array in found.items():
        *folders, name = key.split("/")
        place = state
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = array if array.ndim else array.item()
    if optimizer is not None and "steps" not in state:
        raise CheckpointError(f"the checkpoint {str(path)!r} has no optimizer's state: it was saved without one.")
    load_full_state(model, state, optimizer)
    return state["more"]


def _flat(tree, prefix=""):
    """(path, array) of every leaf. Types that NumPy does not know, such as bfloat16, go as float32, which is exact."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
            continue
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise CheckpointError(
                f"{prefix}{name} is of type {type(value).__name__}: only numbers, strings and arrays can be saved."
            )
        yield f"{prefix}{name}", array.astype(np.float32) if array.dtype.kind == "V" else array
