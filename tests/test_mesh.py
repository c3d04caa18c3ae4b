"""The grid of ranks: who is whose neighbour, and what is said where sizes do not fit."""

import numpy as np
import pytest

import minipar
from minipar.collectives import all_reduce
from minipar.errors import ShapeError
from minipar.parallel import DeviceMesh


def test_tensor_parallel_neighbours_are_next_to_one_another():
    def main(world):
        mesh = DeviceMesh(world, dp=2, pp=2, tp=2)
        return {axis: mesh[axis].ranks for axis in ("dp", "pp", "tp")}, mesh.coordinates

    results = minipar.run(main, ranks=8)
    assert results[5] == (
        {"dp": (1, 5), "pp": (5, 7), "tp": (4, 5)},
        {"dp": 1, "pp": 0, "tp": 1},
    )


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (1, {}),
        (2, {"tp": 2}),
        (3, {"pp": 3}),
        (4, {"dp": 2, "tp": 2}),
        (6, {"tp": 3}),
        (6, {"dp": 1, "pp": 2, "tp": 3}),
        (8, {"pp": 2, "tp": 2}),
    ],
)
def test_every_axis_is_a_group_of_its_own(ranks, sizes):
    def main(world):
        mesh = DeviceMesh(world, **sizes)
        places = tuple(mesh.coordinates[axis] for axis in ("dp", "pp", "tp"))
        assert world.rank == np.ravel_multi_index(places, tuple(mesh.shape.values()))
        for axis, size in mesh.shape.items():
            group = mesh[axis]
            assert (group.size, group.rank) == (size, mesh.coordinates[axis])
            assert group.ranks[group.rank] == world.rank
            assert all_reduce(np.array(world.rank), group) == sum(group.ranks)
        # Summing along every axis in turn is summing over the world.
        x = np.array(10**world.rank)
        for axis in mesh.shape:
            x = all_reduce(x, mesh[axis])
        assert x == int("1" * ranks)
        return mesh.shape

    shapes = minipar.run(main, ranks=ranks)
    assert all(shape == shapes[0] for shape in shapes) and np.prod(list(shapes[0].values())) == ranks


@pytest.mark.parametrize("start", [lambda: DeviceMesh(None), lambda: DeviceMesh(None, dp=1, pp=1, tp=1)])
def test_without_a_world_it_is_one_rank(start):
    mesh = start()
    assert repr(mesh) == "DeviceMesh(dp=1, pp=1, tp=1)"
    assert mesh.coordinates == {"dp": 0, "pp": 0, "tp": 0}
    x = np.arange(3.0)
    np.testing.assert_array_equal(all_reduce(x, mesh["tp"]), x)


def test_one_rank_sends_nothing():
    def main(world):
        DeviceMesh(world)
        return world.sent.messages

    assert minipar.run(main, ranks=1) == [0]


@pytest.mark.parametrize(
    ("ranks", "sizes", "message"),
    [
        (6, {"tp": 4}, "dp=any, pp=1, tp=4 does not fit a world of 6 ranks"),
        (2, {"tp": 4}, "dp=any, pp=1, tp=4 does not fit a world of 2 ranks"),
        (4, {"dp": 2, "tp": 4}, "dp=2, pp=1, tp=4 does not fit a world of 4 ranks: dp x pp x tp must be 4"),
        (4, {"dp": 2}, "dp=2, pp=1, tp=1"),
        (4, {"tp": 0}, "each at least 1"),
        (4, {"dp": -1, "pp": -4}, "each at least 1"),
    ],
)
def test_tp2_sizes_that_do_not_fit_are_named(ranks, sizes, message):
    with pytest.raises(ShapeError, match=message):
        minipar.run(lambda world: DeviceMesh(world, **sizes), ranks=ranks)
    with pytest.raises(ValueError, match="a world of 1 ranks"):
        DeviceMesh(None, tp=2)
