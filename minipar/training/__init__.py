"""The training loop's surroundings."""

from minipar.training.checkpoint import load_checkpoint, save_checkpoint
from minipar.training.memory import held_bytes

__all__ = ["held_bytes", "load_checkpoint", "save_checkpoint"]
