"""Under MPI: `mistakes.py HOW`, a program whose ranks do not agree, each in its own way."""

import os
import sys
import time

import numpy as np

import minipar
from minipar.collectives import all_reduce, broadcast, start
from minipar.comm import SymmetricBuffer


def main(world):
    how, odd, x = sys.argv[1], world.rank == 1, np.ones(40_000)
    os.write(1, f"rank {world.rank} has pid {os.getpid()}\n".encode())
    world.barrier()
    if how == "shape":
        all_reduce(x[:3] if odd else x[:4], world)
    elif how == "size":  # by which `auto` takes different algorithms
        all_reduce(np.ones(4_000_000) if odd else x[:4], world)
    elif how == "op":
        all_reduce(x, world, op="max" if odd else "sum", algorithm="native")
    elif how == "order":
        calls = [lambda: all_reduce(x, world), lambda: broadcast(x, world)]
        for call in reversed(calls) if odd else calls:
            call()
    elif how == "place":
        array = SymmetricBuffer(world, 1 << 20).array(40_000, np.float64, offset=64 * odd)
        world.check_headers = False
        all_reduce(array, world, out=array, algorithm="shared")
    elif how == "buffer":
        SymmetricBuffer(world, 4096 if odd else 8192)
    elif how == "native":  # one rank never comes: nothing inside the library ends the wait
        all_reduce(x, world, algorithm="native")
        time.sleep(30) if odd else all_reduce(x, world, algorithm="native")
    elif how == "started":
        handle = start(all_reduce, x, world, op="average" if odd else "sum")
        time.sleep(30)
        handle.wait()
    elif how == "silent":
        all_reduce(x[:3], world)
        time.sleep(30) if odd else all_reduce(x[:3], world)
    world.barrier()


minipar.run(main, timeout=float(sys.argv[2]))
