"""The training loop's surroundings."""

from minipar.training.checkpoint import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
