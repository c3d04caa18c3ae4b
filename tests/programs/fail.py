"""Goes wrong on rank 2 in the way that is named on the command line; `mpirun -n 4 python fail.py HOW`."""

import os
import signal
import sys
import threading
import time

import numpy as np

import minipar
from minipar.collectives import all_reduce, broadcast
from minipar.launch import launched_rank

how = sys.argv[1]
if how in ("import", "early") and launched_rank() == 2:
    raise ImportError("planted")
if how == "early":
    time.sleep(30)  # the other ranks do not start MPI for a long time


def main(world):
    x = np.ones(100_000, np.float32)
    os.write(1, f"rank {world.rank} has pid {os.getpid()}\n".encode())  # one write, so that lines are not torn
    for round in range(1_000_000):
        if round == 20 and (world.rank == 2 or how == "everywhere"):
            go_wrong()
        if how == "more" and round == 20:  # small enough that its sender waits for nobody
            return broadcast(x[:1], world, root=2) if world.rank == 2 else None
        all_reduce(x, world, out=x)
        x[:] = 1


def go_wrong():
    if how in ("raise", "everywhere"):
        raise ValueError("planted")
    if how == "exit":
        sys.exit(3)
    if how == "done":
        sys.exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "thread":
        threading.Thread(target=lambda: [][0]).start()
    if how in ("thread", "silent"):
        time.sleep(30)


minipar.run(main, timeout=float(sys.argv[2]) if len(sys.argv) > 2 else 60)
