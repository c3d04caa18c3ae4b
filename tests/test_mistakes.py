"""What ranks that do not agree are told under MPI. (On threads: test_collectives.py.)"""

import re
import time

import pytest

from minipar.comm.mpi import check_room
from minipar.errors import LaunchError

pytestmark = pytest.mark.timeout(90)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "limit", "said"),
    [
        (
            "shape",
            60,
            r"rank 0 called all_reduce \(sum, float64, \(4,\).*rank 1 called all_reduce \(sum, float64, \(3,\)",
        ),
        ("size", 60, r"rank 0 called all_reduce .*\(4,\).*rank 1 called all_reduce .*\(4000000,\)"),
        ("op", 60, r"rank 0 called all_reduce \(sum, .*rank 1 called all_reduce \(max, "),
        ("order", 60, r"rank 0 called all_reduce .*rank 1 called broadcast from 0"),
        ("place", 60, r"all_reduce: the arrays of ranks \(0, 1, 2\) must all lie at the same place of one Symmetric"),
        (
            "buffer",
            60,
            r"rank \d called SymmetricBuffer of (4096|8192) bytes.*rank \d called SymmetricBuffer of (4096|8192) bytes",
        ),
        (
            "native",
            3,
            r"rank \d is in the MPI library's all_reduce \(320000 bytes\) with ranks \(0, 1, 2\), which has not",
        ),
        ("started", 60, r"op 'average' is unknown"),
        (
            "silent",
            3,
            r"rank \d waits in all_reduce for rank 1; nothing came in 3 s. Meanwhile .*rank 1 waits for nobody",
        ),
    ],
)
def test_ranks_that_disagree_end_in_seconds_and_are_told(mpi, programs, how, limit, said):
    start = time.monotonic()
    result = mpi([programs / "mistakes.py", how, limit], ranks=3)
    assert result.returncode != 0 and re.search(said, result.stderr, re.DOTALL), result.stderr
    assert time.monotonic() - start < 15
    assert result.stderr.count("Traceback") <= 2, result.stderr


def test_too_little_shared_memory_is_said_before_it_kills():
    check_room(0)
    with pytest.raises(LaunchError, match=r"bytes of shared memory are needed, but /dev/shm has [\d,]+ left"):
        check_room(1 << 60)
