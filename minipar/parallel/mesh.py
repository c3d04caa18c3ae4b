"""The grid of ranks: one axis for each way to split the work."""

import math

from minipar.comm import NullCommunicator
from minipar.errors import ShapeError

AXES = ("dp", "pp", "tp")  # outermost first: tensor-parallel neighbours talk most, so they are next to one another


class DeviceMesh:
    """`world` arranged as dp x pp x tp ranks; mesh["tp"] is this rank's group along that axis.

    dp=2, tp=2:            tp 0    tp 1
                   dp 0   rank 0  rank 1     rank = (dp * size of pp + pp) * size of tp + tp
                   dp 1   rank 2  rank 3

    world: a Communicator, or None for a mesh of one rank that never communicates. dp None: whatever the other axes
    leave over. shape: axis -> size; coordinates: axis -> this rank's place on it. Every rank of `world` must make the
    same mesh. Raises ShapeError where the sizes do not multiply to the number of ranks.
    """

    def __init__(self, world, dp=None, pp=1, tp=1):
        world = NullCommunicator(0, 1) if world is None else world
        self.shape = {"dp": world.size // max(1, pp * tp) if dp is None else dp, "pp": pp, "tp": tp}
        if min(self.shape.values()) < 1 or math.prod(self.shape.values()) != world.size:
            raise ShapeError(
                f"a mesh of dp={'any' if dp is None else dp}, pp={pp}, tp={tp} does not fit a world of {world.size} "
                f"ranks: dp x pp x tp must be {world.size}, and each at least 1."
            )
        self.coordinates, self.groups, inner = {}, {}, 1
        for axis in reversed(AXES):
            size = self.shape[axis]
            place = world.rank // inner % size
            self.coordinates[axis] = place
            # Ranks that differ on this axis alone share what is left of their number without it.
            self.groups[axis] = world.split(world.rank - place * inner, key=place)
            inner *= size

    def __getitem__(self, axis):
        return self.groups[axis]

    def __repr__(self):
        return f"DeviceMesh({', '.join(f'{axis}={size}' for axis, size in self.shape.items())})"
