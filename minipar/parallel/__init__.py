"""Ways to spread a model over ranks, each a function that rewrites a plain one."""

from minipar.parallel.data import DataParallel, joined
from minipar.parallel.mesh import DeviceMesh
from minipar.parallel.shard import clip_grad_norm, full_state, load_full_state
from minipar.parallel.tensor import tensor_parallel
from minipar.parallel.verify import Equivalence, equivalent, replicas_equal

__all__ = [
    "DataParallel",
    "DeviceMesh",
    "Equivalence",
    "clip_grad_norm",
    "equivalent",
    "full_state",
    "joined",
    "load_full_state",
    "replicas_equal",
    "tensor_parallel",
]
