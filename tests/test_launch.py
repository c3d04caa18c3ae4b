"""How ranks are started, and what each gets."""

import os
import subprocess
import sys

import numpy as np
import pytest

import minipar
from minipar.comm.launch import available_cores, blas_threads
from minipar.context import current


def python(code, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "MINIPAR"))} | environment
    return subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, timeout=60)


def test_results_come_in_the_order_of_ranks():
    assert minipar.run(lambda world, a, b: (world.rank, world.size, a + b), 3, 1, 2) == [(r, 3, 3) for r in range(3)]
    assert len(minipar.run(lambda world: None)) == 4


def test_every_rank_has_a_context_of_its_own():
    def main(world):
        current().step = world.rank
        world.barrier()
        return current().step, current().world is world

    assert minipar.run(main, ranks=4) == [(r, True) for r in range(4)]
    assert current().world is None


SHOW = "import minipar, minipar.comm.launch as l; print(minipar.run(lambda w: l.blas_threads(), ranks={})[0])"


def test_blas_threads_are_an_equal_share_whatever_the_environment_says():
    cores = available_cores()
    assert python(SHOW.format(4), OMP_NUM_THREADS="8", OPENBLAS_NUM_THREADS="8").stdout == f"{max(1, cores // 4)}\n"
    assert python(SHOW.format(4), MINIPAR_BLAS_THREADS="2").stdout == "2\n"
    before = blas_threads()
    minipar.run(lambda world: None, ranks=4)
    assert blas_threads() == before  # the caller's own setting is put back


def test_blas_threads_under_mpirun(mpi):
    code = (
        "import os, minipar, minipar.comm.launch as l; minipar.run(lambda w: os.write(1, b'%d\\n' % l.blas_threads()))"
    )
    result = mpi(["-c", code], ranks=2, env={"OMP_NUM_THREADS": "8"})
    assert result.stdout.split() == [str(max(1, available_cores() // 2))] * 2, result.stderr


def test_an_mpi4py_without_a_library_is_explained():
    """mpi4py raises RuntimeError, not ImportError, when it finds no MPI library."""
    code = (
        "import sys, minipar\n"
        "class Finder:\n"
        "    def find_spec(name, *rest):\n"
        "        if name == 'mpi4py.MPI': raise RuntimeError('cannot load MPI library')\n"
        "sys.meta_path.insert(0, Finder)\n"
        "minipar.run(lambda world: None)"
    )
    result = python(code, PMI_SIZE="2", PMI_RANK="0")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "cannot load MPI library" in result.stderr and "minipar[mpich]" in result.stderr


@pytest.mark.parametrize("nbytes", [0, 8, 64 * 1024, 64 * 1024 + 8, 1 << 20])
def test_messages_arrive_in_order_and_whole(nbytes):
    def main(world):
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        arrays = [np.full(nbytes // 8, 10.0 * world.rank + i) for i in range(3)]
        buffers = [np.empty(nbytes // 8) for _ in range(3)]
        requests = [world.isend(a, right, "pass on") for a in arrays]
        requests += [world.irecv(b, left, "pass on") for b in buffers]
        for request in reversed(requests):
            request.wait()
        assert all(request.done() for request in requests)
        for i, b in enumerate(buffers):
            assert (b == 10.0 * left + i).all()

    minipar.run(main, ranks=3)


def test_wrong_use_is_said():
    def main(world):
        for array, peer, message in ((np.ones(3), 2, "rank 2 is not in this group of 2"),
                                     (np.ones((3, 4)).T, 0, "contiguous")):  # fmt: skip
            with pytest.raises(minipar.errors.ShapeError, match=message):
                world.isend(array, peer)
            with pytest.raises(minipar.errors.ShapeError, match=message):
                world.irecv(array, peer)

    minipar.run(main, ranks=2)
