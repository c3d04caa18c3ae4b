"""Starting ranks: threads or MPI processes, their share of the cores, and time limits."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import minipar
from minipar.context import current
from minipar.launch import available_cores, blas_limit, blas_threads


def python(code, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "MINIPAR"))} | environment
    return subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, timeout=60)


def test_run_returns_one_value_a_rank():
    assert minipar.run(lambda world, a, b: (world.rank, world.size, a + b), 3, 10, 20) == [(r, 3, 30) for r in range(3)]
    assert len(minipar.run(lambda world: None)) == 4


def test_ranks_have_contexts_of_their_own():
    def main(world):
        current().seed = world.rank
        world.barrier()
        return current().seed, current().world is world

    assert minipar.run(main, ranks=4) == [(r, True) for r in range(4)]


def test_mp5_blas_threads_are_a_share_of_the_cores(monkeypatch):
    with threadpool_limits(available_cores(), "blas"):
        before = blas_threads()
        assert minipar.run(lambda world: blas_threads(), ranks=available_cores()) == [1] * available_cores()
        assert minipar.run(lambda world: blas_threads(), ranks=1) == [before]
        assert blas_threads() == before
    assert blas_limit(10 * available_cores()) == 1
    monkeypatch.setenv("MINIPAR_BLAS_THREADS", "3")
    assert blas_limit(4) == 3


SHOW = "import minipar, minipar.launch as l; print(minipar.run(lambda w: l.blas_threads(), ranks={})[0])"


def test_blas_threads_are_an_equal_share_whatever_the_environment_says():
    cores = available_cores()
    assert python(SHOW.format(4), OMP_NUM_THREADS="8", OPENBLAS_NUM_THREADS="8").stdout == f"{max(1, cores // 4)}\n"
    assert python(SHOW.format(4), MINIPAR_BLAS_THREADS="2").stdout == "2\n"
    before = blas_threads()
    minipar.run(lambda world: None, ranks=4)
    assert blas_threads() == before  # the caller's own setting is put back


def test_blas_threads_under_mpirun(mpi):
    code = "import os, minipar, minipar.launch as l; minipar.run(lambda w: os.write(1, b'%d\\n' % l.blas_threads()))"
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


def test_an_error_leaves_no_trace_for_the_next_run():
    with pytest.raises(ZeroDivisionError):
        minipar.run(lambda world: 1 // world.rank, ranks=3)
    assert minipar.run(lambda world: world.rank, ranks=3) == [0, 1, 2]


def test_sys_exit_of_a_thread_rank_reaches_the_caller():
    with pytest.raises(SystemExit) as caught:
        minipar.run(lambda world: sys.exit(3) if world.rank == 1 else world.recv(np.empty(1), 1), ranks=2)
    assert caught.value.code == 3


@pytest.mark.slow
def test_mpirun_runs_python_on_every_rank(mpi, tmp_path):
    code = "import minipar, os; minipar.run(lambda world: os.write(1, f'{world.rank}/{world.size}\\n'.encode()))"
    result = mpi(["-c", code], ranks=3)
    assert sorted(result.stdout.split()) == ["0/3", "1/3", "2/3"] and result.returncode == 0


@pytest.mark.slow
def test_mpirun_ends_at_its_time_limit(mpi):
    start = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        mpi(["-c", "import time; time.sleep(60)"], ranks=2, timeout=1)
    assert time.monotonic() - start < 8


@pytest.mark.slow
def test_mp3_another_number_of_ranks_is_refused_once(mpi):
    result = mpi(["-c", "import minipar; minipar.run(print, ranks=3)"], ranks=2)
    assert result.returncode == 1
    assert result.stderr.count("3 ranks were asked for, but mpirun started 2") == 1
    assert "Traceback" not in result.stderr
