"""Ways to spread a model over ranks, each a function that rewrites a plain one."""

from minipar.parallel.mesh import DeviceMesh
from minipar.parallel.tensor import tensor_parallel
from minipar.parallel.verify import Equivalence, equivalent, replicas_equal

__all__ = ["DeviceMesh", "Equivalence", "equivalent", "replicas_equal", "tensor_parallel"]
