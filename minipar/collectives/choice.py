"""Which algorithm `auto` takes: by transport, operation, ranks and size, from a small table of measurements.

`python -m minipar bench --tune FILE` measures one for your machine, and the variable MINIPAR_TUNING names the FILE that
is to be used, the same on every rank. Without it the table below holds, measured on 2 cores.
"""

import json
import os
from functools import lru_cache

from minipar.collectives import direct, halving_doubling, hierarchical, native, ring, shared, tree
from minipar.errors import LaunchError

ALGORITHMS = {
    "all_reduce": {
        "ring": ring.all_reduce,
        "tree": tree.all_reduce,
        "halving_doubling": halving_doubling.all_reduce,
        "hierarchical": hierarchical.all_reduce,
        "shared": shared.all_reduce,
        "native": native.all_reduce,
    },
    "reduce_scatter": {"ring": ring.reduce_scatter, "native": native.reduce_scatter},
    "all_gather": {"ring": ring.all_gather, "native": native.all_gather},
    "broadcast": {"tree": tree.broadcast, "native": native.broadcast},
    "reduce": {"tree": tree.reduce, "native": native.reduce},
    "all_to_all": {"direct": direct.all_to_all, "native": native.all_to_all},
    "gather": {"direct": direct.gather, "native": native.gather},
    "scatter": {"direct": direct.scatter, "native": native.scatter},
}
# transport -> operation -> ranks (the nearest row from below is taken) -> [(up to so many bytes, algorithm)]
TABLE = {
    "MPI": {
        "all_reduce": {"2": [[1 << 19, "shared"], [None, "halving_doubling"]],
                       "3": [[1 << 20, "shared"], [None, "ring"]],
                       "4": [[1 << 21, "shared"], [None, "halving_doubling"]]},
    },
    "threads": {"all_reduce": {"2": [[None, "shared"]]}},
}  # fmt: skip
SMALL = 64 * 1024  # bytes up to which latency is what counts between nodes


def choose(operation, nbytes, comm, algorithm="auto"):
    """The function of ALGORITHMS[operation] to call: the one named `algorithm`, or what is best for that many bytes."""
    return ALGORITHMS[operation][name_of(operation, nbytes, comm, algorithm)]


def name_of(operation, nbytes, comm, algorithm="auto"):
    """The name of that algorithm; ValueError if there is none."""
    algorithm = comm.preferred.get(operation, "auto") if algorithm == "auto" else algorithm
    if algorithm != "auto":
        if algorithm not in ALGORITHMS[operation]:
            raise ValueError(
                f"{operation} has no algorithm {algorithm!r}: choose auto, {', '.join(ALGORITHMS[operation])}."
            )
        return algorithm
    if len(set(comm.nodes)) > 1 and operation == "all_reduce":
        if nbytes <= SMALL:
            return "halving_doubling"
        return "hierarchical" if len(set(comm.nodes)) < comm.size else "ring"
    for limit, name in row(os.environ.get("MINIPAR_TUNING", ""), comm.transport, operation, comm.size):
        if limit is None or nbytes <= limit:
            return name
    return next(iter(ALGORITHMS[operation]))


@lru_cache
def row(path, transport, operation, ranks):
    """[(up to so many bytes, algorithm)] of the table in the file `path`, "" for the built-in one."""
    rows = (load(path) if path else TABLE).get(transport, {}).get(operation, {})
    below = [int(n) for n in rows if int(n) <= ranks]
    return rows[str(max(below))] if below else []


def load(path):
    """The table in a file that `bench --tune` wrote; LaunchError if it is none."""
    try:
        with open(path, encoding="utf-8") as file:
            table = json.load(file)["algorithms"]
        for operations in table.values():
            for operation, rows in operations.items():
                for ranks, limits in rows.items():
                    int(ranks)
                    for limit, name in limits:
                        if name not in ALGORITHMS[operation] or not (limit is None or limit >= 0):
                            raise ValueError(f"{operation} {limit} {name}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LaunchError(f"MINIPAR_TUNING={path} is no table that `minipar bench --tune` wrote: {error!r}.") from error
    return table
