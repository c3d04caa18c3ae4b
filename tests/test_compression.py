"""Compressed gradients: programs/compression.py on threads and under MPI; 1-bit Adam's optimizer; what is refused."""

import numpy as np
import pytest
from programs import compression

import minipar
from minipar.errors import ShapeError
from minipar.nn import Parameter
from minipar.optim import AdamW
from minipar.parallel import Half, PowerSGD, TopK

QUICK = [check for check in compression.CHECKS if check is not compression.check_training]


@pytest.mark.parametrize("check", QUICK, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.slow)])  # 1, 3 and 4 run under MPI
def test_on_threads(check, ranks):
    minipar.run(check, ranks)


@pytest.mark.slow
def test_training():
    minipar.run(compression.check_training, 3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_under_mpi(mpi, programs, ranks):
    result = mpi([programs / "compression.py"], ranks, timeout=170)
    assert (result.returncode, result.stdout) == (0, "ok\n" * ranks), result.stderr


def test_adam_with_frozen_squares():
    """By hand: after step 2 the square, and its bias correction, stay."""
    p = Parameter(np.array([1.0, -2.0]))
    optimizer = AdamW([p], lr=0.1, weight_decay=0.0, freeze_after=2)
    data, mean, square = p.data.copy(), 0.0, 0.0
    for step in range(1, 5):
        grad = np.array([step, -1.0])
        p.grad = grad.copy()
        optimizer.step()
        mean = 0.9 * mean + 0.1 * grad
        square = 0.999 * square + 0.001 * grad**2 if step <= 2 else square
        data -= 0.1 * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999 ** min(step, 2))) + 1e-8)
        np.testing.assert_allclose(p.data, data, rtol=1e-12)


def test_what_is_refused():
    for make, told in (
        (lambda: Half("float8"), "float16 or bfloat16, not float8"),
        (lambda: TopK(0), "a fraction above 0 and up to 1 of the numbers, not 0"),
        (lambda: TopK(1.5), "not 1.5"),
        (lambda: PowerSGD(0), "a rank of at least 1, not 0"),
    ):
        with pytest.raises(ShapeError, match=told):
            make()
