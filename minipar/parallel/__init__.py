"""Ways to spread a model over ranks, each a function that rewrites a plain one."""

from minipar.parallel.compression import Half, OneBitAdam, OneBitSign, PowerSGD, TopK
from minipar.parallel.data import DataParallel, joined
from minipar.parallel.mesh import DeviceMesh
from minipar.parallel.pipeline import Pipeline
from minipar.parallel.shard import clip_grad_norm, full_state, load_full_state
from minipar.parallel.tensor import tensor_parallel
from minipar.parallel.verify import Equivalence, equivalent, replicas_equal
from minipar.parallel.zero import ZeRO, fully_shard

__all__ = [
    "DataParallel",
    "DeviceMesh",
    "Equivalence",
    "Half",
    "OneBitAdam",
    "OneBitSign",
    "Pipeline",
    "PowerSGD",
    "TopK",
    "ZeRO",
    "clip_grad_norm",
    "equivalent",
    "full_state",
    "fully_shard",
    "joined",
    "load_full_state",
    "replicas_equal",
    "tensor_parallel",
]
