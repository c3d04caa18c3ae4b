"""The engine uses only what CuPy has, and the stand-in for CuPy refuses what CuPy refuses."""

import ast
import json
import re
from pathlib import Path

import numpy as np
import pretend_cupy
import pytest

import minipar
from minipar import arrays, nn, optim
from minipar.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from minipar.errors import DeviceError
from minipar.parallel import DeviceMesh, Pipeline, equivalent, tensor_parallel
from minipar.parallel.pipeline import make
from minipar.parallel.verify import relative_error

ENGINE = Path(minipar.__file__).parent
ON_DEVICE = ("autograd", "nn", "optim", "collectives", "parallel")
HOST_ONLY = {  # NumPy functions that these files call on host data: shapes, sizes, weights as drawn, digests
    "autograd/fused.py": set(),
    "autograd/ops.py": {"cumsum"},
    "autograd/operators.py": {"result_type", "dtype"},
    "autograd/tensor.py": {"asarray", "generic"},
    "nn/gpt.py": {"float64", "zeros_like"},
    "nn/layers.py": {"zeros", "ones"},
    "nn/module.py": set(),
    "collectives/__init__.py": {"array", "full", "int64", "dtype", "float32", "ndarray"},
    "collectives/native.py": {"ndarray", "add"},
    "parallel/compression.py": {
        "float64",
        "float32",
        "float16",
        "uint8",
        "uint16",
        "uint32",
        "int32",
        "int64",
        "errstate",
    },
    "parallel/data.py": {"array", "int64", "float64", "uint8", "concatenate"},
    "parallel/pipeline/executor.py": {"array_split", "array", "zeros", "concatenate", "int64", "inf"},
    "parallel/pipeline/mail.py": {"zeros", "int64", "frombuffer", "dtype", "empty", "ascontiguousarray"},
    "parallel/shard.py": {"array", "float64"},
    "parallel/zero.py": {"dtype", "nan", "uint8"},
    "parallel/verify.py": {"float64", "abs", "uint8", "frombuffer", "array"},
}


def attributes(path, name):
    """Every X in `name.X` in a source file, and every `linalg.X` in `name.linalg.X`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if re.fullmatch(rf"{name}(\.\w+)+", dotted):
                yield dotted.partition(".")[2]


def test_every_array_function_exists_in_cupy_13_and_14():
    used = {
        (path.name, a)
        for folder in ON_DEVICE
        for path in (ENGINE / folder).rglob("*.py")
        for a in attributes(path, "xp")
    }
    used |= {("arrays.py", a) for a in attributes(ENGINE / "arrays.py", "xp")}
    assert len(used) > 30
    for file, name in used:
        if name not in pretend_cupy.NAMES:
            ufunc, method = name.split(".")  # xp.add.at
            assert hasattr(getattr(pretend_cupy, ufunc), method), f"{file}: xp.{name}"


def test_numpy_is_used_on_host_data_only():
    for folder in ON_DEVICE:
        for path in (ENGINE / folder).rglob("*.py"):
            allowed = HOST_ONLY.get(path.relative_to(ENGINE).as_posix(), set())
            assert set(attributes(path, "np")) <= allowed, path


x, host = pretend_cupy.asarray(np.arange(3.0)), np.arange(3.0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: np.asarray(x),
        lambda: x + host,
        lambda: host + x,
        lambda: x @ host,
        lambda: np.concatenate([x, x]),
        lambda: pretend_cupy.where(x > 0, x, host),
        lambda: x.__setitem__(0, host[0:1]),
        lambda: host.__setitem__(slice(None), x),
        lambda: x.__iadd__(host),
        lambda: memoryview(x),
        lambda: pretend_cupy.errstate(),
        lambda: pretend_cupy.nditer(x),
        lambda: pretend_cupy.linalg.multi_dot([x, x]),
        lambda: pretend_cupy.add([1.0, 2.0, 3.0], x),
        lambda: pretend_cupy.multiply.at(x, 0, 1.0),
        lambda: pretend_cupy.maximum.reduce(x),
        lambda: x.ctypes,
        lambda: x.__array_interface__,
        lambda: x.__dlpack__,
        lambda: range(x[0]),
        lambda: x[np.array([0])],
        lambda: json.dumps(x),
        lambda: np.save("/dev/null", x),
    ],
)
def test_the_stand_in_refuses(wrong):
    with pytest.raises((TypeError, AttributeError)):
        wrong()


def test_the_stand_in_counts_synchronisations():
    before = pretend_cupy.synchronisations
    total = (x * 2).sum()
    assert isinstance(total, pretend_cupy.ndarray) and pretend_cupy.synchronisations == before
    assert float(total) == 6 and total.item() == 6 and bool(total > 1) and (x.get() == host).all()
    assert pretend_cupy.synchronisations == before + 4
    assert arrays.array_module(x) is pretend_cupy and arrays.array_module(host) is np


def test_the_stand_in_shares_memory_where_cupy_does():
    a = pretend_cupy.asarray(np.arange(6.0).reshape(2, 3))
    assert a.base is None and pretend_cupy.asarray(a) is a
    for view in (
        a[0],
        a.T,
        a.reshape(3, 2)[1:],
        pretend_cupy.broadcast_to(a, (4, 2, 3)),
        pretend_cupy.ascontiguousarray(a),
    ):
        assert view is a or view.base is a
    for copy in (a + 1, a[[0]], a.sum(), a.astype("float64"), pretend_cupy.array(a), a.get()):
        assert copy.base is None
    first = a[0, 0]
    first += 7
    assert float(a[0, 0]) == 7 and a.data.ptr == a[0].data.ptr
    out = pretend_cupy.zeros((2, 3))
    assert pretend_cupy.add(a, 1, out=out) is out and float(pretend_cupy.add.reduce(out, axis=None)) == 28
    pretend_cupy.add.at(out, [0, 0], pretend_cupy.ones((2, 3)))
    assert out.get()[0].tolist() == [10, 4, 5]


def test_collectives_on_device_arrays():
    def main(world):
        x = pretend_cupy.asarray(np.arange(7.0) + world.rank)
        total = all_reduce(x, world)
        np.testing.assert_array_equal(total.get(), 3 * np.arange(7.0) + 3)
        np.testing.assert_array_equal(all_gather(reduce_scatter(x, world), world).get(), total.get())
        np.testing.assert_array_equal(broadcast(x, world, 2).get(), np.arange(7.0) + 2)

    minipar.run(main, ranks=3)


@pytest.mark.parametrize("ranks", [1, 3])
def test_tensor_parallel_training_on_device_arrays(ranks):
    config = nn.GPTConfig(vocab_size=11, context=6, width=12, layers=1, heads=3, dropout=0.2, dtype="float64")
    tokens = np.random.default_rng(0).integers(11, size=(2, 7))

    def main(world):
        parallel = tensor_parallel(nn.GPT(config), DeviceMesh(world, tp=ranks)).to(pretend_cupy)
        assert all(isinstance(p.data, pretend_cupy.ndarray) for p in parallel.parameters())
        return equivalent(nn.GPT(config), parallel, (tokens[:, :-1], tokens[:, 1:]), world, optimizer=optim.AdamW)

    result = minipar.run(main, ranks=ranks)[0]
    assert result.loss_relative_error < 1e-10 and result.gradient_relative_error < 1e-10 and result.replicated_equal


@pytest.mark.parametrize(("schedule", "pp", "dp"), [("1f1b", 2, 2), ("zb-v", 2, 1), ("gpipe", 1, 1)])
def test_pipelines_on_device_arrays(schedule, pp, dp):
    config = nn.GPTConfig(vocab_size=11, context=6, width=12, layers=3, heads=3, dropout=0.2, dtype="float64")
    tokens = np.random.default_rng(0).integers(11, size=(8, 7))
    x, y = tokens[:, :-1], tokens[:, 1:]
    whole = nn.GPT(config)
    loss = whole.loss(x, y)
    loss.backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}

    def main(world):
        mesh = DeviceMesh(world, pp=pp, dp=dp)
        pipeline = Pipeline(nn.GPT(config).to(pretend_cupy), mesh, make(schedule, pp, 4), recompute=pp == 1)
        own = slice(8 // dp * mesh.coordinates["dp"], 8 // dp * (mesh.coordinates["dp"] + 1))
        value = pipeline.forward_backward(x[own], y[own])
        assert all(isinstance(p.grad, pretend_cupy.ndarray) for p in pipeline.parameters())
        errors = [relative_error(p.grad, expected[name], 1e-6) for name, p in pipeline.named_parameters()]
        return abs(value - float(loss.data)), max(errors)

    assert np.max(minipar.run(main, ranks=pp * dp)) < 1e-10


def test_cuda_works_or_says_why_not():
    try:
        assert arrays.device("cuda").__name__ == "cupy"
    except DeviceError as error:
        assert "CuPy" in str(error) and str(error).count("\n") == 0
    with pytest.raises(DeviceError, match="choose 'cpu' or 'cuda'"):
        arrays.device("tpu")
