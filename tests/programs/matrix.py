"""Every collective by every algorithm against NumPy, with drawn sizes: on thread ranks, and as a program under MPI.

Hypothesis is derandomised, so that all MPI ranks draw the same cases in step.
"""

import os
import sys

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import minipar
from minipar import collectives
from minipar.collectives import ALGORITHMS
from minipar.comm import SymmetricBuffer, start

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int8", "bool"]
NUMPY = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
LAYOUTS = ["plain", "transposed", "reversed", "every other"]


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def values(rank, shape, dtype, seed=0):
    """Rank's numbers: small integers, so that sums and products are exact in every dtype."""
    drawn = np.random.default_rng([seed, rank]).integers(-2, 3, size=shape)
    return np.asarray(drawn).astype(dtype_of(dtype))


def strided(array, how):
    """The same values in another memory layout."""
    if how == "transposed":
        return array.T.copy().T
    if how == "reversed":
        backwards = (slice(None, None, -1),) * array.ndim
        return array[backwards].copy()[backwards] if array.ndim else array
    if how == "every other":
        spread = np.zeros((*array.shape, 2), array.dtype)
        spread[..., 0] = array
        return spread[..., 0]
    return array


def reduced(arrays, op):
    total = arrays[0].astype(np.float32) if arrays[0].dtype.itemsize == 2 else arrays[0].copy()
    for array in arrays[1:]:
        total = NUMPY[op](total, array)
    if op == "mean":
        total = total / np.asarray(len(arrays), total.dtype)
    return total.astype(arrays[0].dtype)


def same(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape, (found, expected)
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes(), (found, expected)


@st.composite
def cases(draw, ranks, native):
    kind = draw(st.sampled_from(list(ALGORITHMS)))
    algorithms = [a for a in ALGORITHMS[kind] if native or a != "native"]
    dtype = draw(st.sampled_from(DTYPES))
    algorithm = draw(st.sampled_from(["auto", *algorithms]))
    if algorithm == "native" and dtype in ("bool", "float16", "bfloat16"):
        dtype = "float32"
    ops = [op for op in NUMPY if op != "mean" or dtype.startswith(("float", "bfloat"))]
    row = draw(st.lists(st.integers(0, 3), max_size=2).map(tuple))
    return {
        "kind": kind,
        "algorithm": algorithm,
        "dtype": dtype,
        "op": draw(st.sampled_from(ops)),
        "row": row,
        "rows": draw(st.integers(0, 9)),
        "scalar": draw(st.booleans()),
        "sizes": draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks)),
        "known": draw(st.booleans()),
        "root": draw(st.integers(0, ranks - 1)),
        "layouts": draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 2)),
        "place": draw(st.sampled_from(["new", "in place", "other", "symmetric"])),
        "nodes": draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks)),
        "started": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
    }


def check(world, case):
    """Do the collective of `case` on all ranks of `world`, and compare with NumPy, bit by bit."""
    kind, root, rank, n = case["kind"], case["root"], world.rank, world.size
    if case["algorithm"] == "hierarchical":
        world.nodes = tuple(case["nodes"])
    options = {"algorithm": case["algorithm"]}

    def call(function, x, *args, **kwargs):
        if case["started"] and function is not collectives.scatter:
            return start(function, x, world, *args, **options, **kwargs).wait()
        return function(x, world, *args, **options, **kwargs)

    shape = () if case["scalar"] and kind in ("all_reduce", "reduce", "broadcast") else (case["rows"], *case["row"])
    everyone = [values(r, shape, case["dtype"], case["seed"]) for r in range(n)]
    x = strided(everyone[rank].copy(), case["layouts"][rank % 2])
    pieces = [values(r, (case["sizes"][r], *case["row"]), case["dtype"], case["seed"]) for r in range(n)]
    sizes = case["sizes"] if case["known"] else None
    try:
        if kind == "all_reduce":
            expected = reduced(everyone, case["op"])
            out = {"new": None, "in place": x, "other": strided(np.zeros(shape, x.dtype), case["layouts"][0])}.get(
                case["place"]
            )
            if case["place"] == "symmetric" and world.transport == "MPI":
                x = out = symmetric(world, x)
            x.flags.writeable = out is x
            result = call(collectives.all_reduce, x, op=case["op"], out=out)
            assert out is None or result is out
            same(result, expected)
            if out is not x:
                same(x, everyone[rank])
        elif kind == "reduce":
            x.flags.writeable = False
            result = call(collectives.reduce, x, op=case["op"], root=root)
            same(result, reduced(everyone, case["op"])) if rank == root else None
            assert (result is None) == (rank != root)
        elif kind == "reduce_scatter":
            whole = [values(r, (sum(case["sizes"]), *case["row"]), case["dtype"], case["seed"]) for r in range(n)]
            x = strided(whole[rank].copy(), case["layouts"][rank % 2])
            x.flags.writeable = False
            first = sum(case["sizes"][:rank])
            result = call(collectives.reduce_scatter, x, op=case["op"], sizes=case["sizes"])
            same(result, reduced(whole, case["op"])[first : first + case["sizes"][rank]])
            bounds = np.cumsum([0, *minipar.arrays.split_sizes(x.size, n)])
            result = call(collectives.reduce_scatter, x, op=case["op"])
            same(result, reduced(whole, case["op"]).reshape(-1)[bounds[rank] : bounds[rank + 1]])
        elif kind == "all_gather":
            axis = case["seed"] % pieces[0].ndim
            turned = [np.moveaxis(piece, 0, axis) for piece in pieces]
            same(call(collectives.all_gather, turned[rank], axis=axis, sizes=sizes), np.concatenate(turned, axis))
        elif kind == "broadcast":
            same(call(collectives.broadcast, x, root=root), everyone[root])
            same(x, everyone[rank])
        elif kind == "gather":
            result = call(collectives.gather, pieces[rank], root=root, sizes=sizes)
            same(result, np.concatenate(pieces)) if rank == root else None
            assert (result is None) == (rank != root)
        elif kind == "scatter":
            out = np.empty_like(pieces[rank])
            whole = strided(np.concatenate(pieces), case["layouts"][0]) if rank == root else None
            same(collectives.scatter(whole, out, world, root=root, **options), pieces[rank])
        elif kind == "all_to_all":
            tables = [np.roll(case["sizes"], r).tolist() for r in range(n)]  # every rank has other sizes
            theirs = [values(r, (sum(tables[r]), *case["row"]), case["dtype"], case["seed"]) for r in range(n)]
            cuts = [np.split(x, np.cumsum(table)[:-1]) for x, table in zip(theirs, tables, strict=True)]
            result = call(collectives.all_to_all, theirs[rank], sizes=tables[rank])
            same(result, np.concatenate([cut[rank] for cut in cuts]))
    finally:
        world.nodes = (0,) * n


def symmetric(world, x):
    """A copy of x in a SymmetricBuffer, of which there is one for all cases."""
    if not world.buffers:
        SymmetricBuffer(world, 1 << 20)
    array = world.buffers[0].array(x.shape, x.dtype)
    array[...] = x
    return array


def main(world):
    @settings(max_examples=int(sys.argv[1]), deadline=None, derandomize=True, database=None)
    @given(cases(world.size, native=True))
    def all_cases(case):
        check(world, case)

    all_cases()
    world.barrier()
    return "ok"


if __name__ == "__main__":
    os.write(1, b"%s\n" % minipar.run(main)[0].encode())
