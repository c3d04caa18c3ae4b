"""What the tests share: `mpi`, which runs a Python program on MPI ranks, or skips where there is no MPI."""

import shutil
from pathlib import Path

import pytest
from hypothesis import settings

from minipar.launch import mpirun, mpirun_path

settings.register_profile("minipar", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("minipar")

PROGRAMS = Path(__file__).parent / "programs"


def pytest_collection_modifyitems(items):
    for item in items:
        if "mpi" in item.fixturenames:
            item.add_marker("mpi")


@pytest.fixture
def mpi(tmp_path):
    """mpi(arguments, ranks=4, timeout=60): the CompletedProcess of `mpirun -n 4 python ARGUMENTS`, run in tmp_path."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    if not shutil.which(mpirun_path()):
        pytest.skip("no mpirun beside this Python or on PATH: pip install 'minipar[mpich]'")

    def launch(arguments, ranks=4, timeout=60, **options):
        return mpirun(arguments, ranks, timeout, cwd=tmp_path, **options)

    return launch


@pytest.fixture
def programs():
    """The folder of the small programs that tests run under MPI."""
    return PROGRAMS
