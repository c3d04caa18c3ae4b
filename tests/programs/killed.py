"""The rank that is named on the command line is killed as soon as it runs."""

import os
import signal
import sys

import numpy as np

import minipar
from minipar.collectives import all_reduce


def main(world):
    if world.rank == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        all_reduce(np.ones(1000), world)


minipar.run(main)
