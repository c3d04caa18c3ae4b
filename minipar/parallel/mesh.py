"""The grid of ranks: one axis for each way to split the work."""

from minipar.errors import ShapeError

AXES = ("dp", "pp", "tp")  # outermost first: tensor-parallel neighbours talk most, so they are next to one another


class DeviceMesh:
    """`world` arranged as dp x pp x tp ranks; mesh["tp"] is this rank's group along that axis.

    dp None: whatever is left over. Every rank of `world` must make the same mesh. coordinates: axis -> this rank's
    place on it. Raises ShapeError where the sizes do not multiply to the number of ranks.
    """

    def __init__(self, world, dp=None, pp=1, tp=1):
        if dp is None and pp * tp:
            dp = world.size // (pp * tp)
        self.shape = {"dp": dp, "pp": pp, "tp": tp}
        if min(self.shape.values()) < 1 or dp * pp * tp != world.size:
            sizes = " x ".join(f"{axis}={size}" for axis, size in self.shape.items())
            raise ShapeError(f"a mesh of {sizes} does not have the world's {world.size} ranks.")
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
