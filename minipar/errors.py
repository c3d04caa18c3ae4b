"""The exceptions of minipar. Each message is one sentence: what was wrong, on which ranks, what is allowed."""


class MiniparError(Exception):
    """Base of every error that minipar raises on purpose."""


class ShapeError(MiniparError, ValueError):
    """Sizes that do not fit together; the message names the sizes and the allowed values."""


class DeviceError(MiniparError, RuntimeError):
    """A device was asked for that this machine does not offer."""


class GraphError(MiniparError, RuntimeError):
    """The autograd graph cannot be walked: already freed, or a saved array was changed in place."""


class LaunchError(MiniparError, RuntimeError):
    """The launcher and the MPI library disagree, or something that is needed to start ranks is missing."""


class CommunicationTimeout(MiniparError, TimeoutError):
    """A wait reached its time limit; the message names the ranks, the operation and the size."""


class MessageMismatch(MiniparError, ValueError):
    """Two ranks meet in a message and disagree on the operation, the dtype or the size."""


class RankFailed(MiniparError, RuntimeError):
    """Another rank has raised; this one was released from its wait."""


class DeadlockError(MiniparError, RuntimeError):
    """Every live rank waits for another one, so none can ever continue."""


class DTypeError(MiniparError, TypeError):
    """A dtype that the operation cannot take; the message names it and the remedy."""


class CheckpointError(MiniparError, RuntimeError):
    """A checkpoint cannot be written or read; the message names the file."""


class ScheduleError(MiniparError, ValueError):
    """A pipeline schedule that cannot run; the message names the action, its rank and what it would wait for."""
