"""A stand-in for CuPy on machines without a GPU: arrays that refuse what CuPy's refuse.

`ndarray` wraps a NumPy array, it is no subclass: nothing converts it silently, it has no buffer, and operands that live
on the host are turned away with CuPy's words. The module offers only names that CuPy has (cupy_names.txt, taken from
CuPy 13 and 14). Every wait for the device, float(x) or x.get() for instance, is counted in `synchronisations`. What it
cannot show: races between streams, CuPy's index wrapping, kernels that fail to compile.
"""

import functools
import numbers
from pathlib import Path

import numpy

NAMES = frozenset(Path(__file__).with_name("cupy_names.txt").read_text().split())
synchronisations = 0
float16, float32, float64 = numpy.float16, numpy.float32, numpy.float64
int32, int64, bool_ = numpy.int32, numpy.int64, numpy.bool_
SCALARS = (numbers.Number, numpy.generic, str, type(None), slice, type(Ellipsis), type, numpy.dtype)


def _unwrap(value):
    """The NumPy arrays inside arguments; TypeError where CuPy would give one."""
    if isinstance(value, ndarray):
        return value._host
    if isinstance(value, tuple | list):
        return type(value)(_unwrap(v) for v in value)
    if isinstance(value, SCALARS):
        return value
    raise TypeError(f"Unsupported type {type(value)}")


def _wrap(value):
    if isinstance(value, numpy.ndarray | numpy.generic):
        return ndarray(numpy.asarray(value))
    if isinstance(value, tuple):
        return tuple(map(_wrap, value))
    return value


def _call(function, *args, **kwargs):
    out = kwargs.get("out")
    with numpy.errstate(all="ignore"):  # a GPU does not warn
        result = function(*map(_unwrap, args), **{k: _unwrap(v) for k, v in kwargs.items()})
    return out if isinstance(out, ndarray) else _wrap(result)


def _synchronise():
    global synchronisations
    synchronisations += 1


class ndarray:
    """An array on the pretended device."""

    __slots__ = ("_host",)
    __array_priority__ = 100

    def __init__(self, host):
        self._host = host

    def __array__(self, *args, **kwargs):
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if method != "__call__" or any(isinstance(x, numpy.ndarray) for x in inputs):
            return NotImplemented
        return _call(ufunc, *inputs, **kwargs)

    def get(self):
        _synchronise()
        return self._host.copy()

    def item(self):
        _synchronise()
        return self._host.item()

    def __getattr__(self, name):
        if name in ("__array_interface__", "__array_struct__", "__buffer__", "__dlpack__", "tobytes_", "__len__"):
            raise AttributeError(name)
        value = getattr(self._host, name)
        if callable(value):
            return lambda *args, **kwargs: _call(value, *args, **kwargs)
        return _wrap(value)

    @property
    def base(self):
        return None if self._host.base is None else ndarray(_root(self._host))

    @property
    def T(self):
        return ndarray(self._host.T)

    def __len__(self):
        return len(self._host)

    def __getitem__(self, index):
        return ndarray(numpy.asarray(self._host[_unwrap(index)]))

    def __setitem__(self, index, value):
        self._host[_unwrap(index)] = _unwrap(value)

    def __repr__(self):
        return f"pretend_cupy.{self._host!r}"


def _root(host):
    while isinstance(host.base, numpy.ndarray):
        host = host.base
    return host


def _operator(name):
    def operate(self, *others):
        if any(isinstance(other, numpy.ndarray) for other in others):
            raise TypeError(f"Unsupported type {numpy.ndarray}")
        if not all(isinstance(other, (ndarray, *SCALARS)) for other in others):
            return NotImplemented
        result = _call(getattr(self._host, name), *others)
        if name.startswith("__i") and name not in ("__invert__",):
            return self
        return result

    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    for _prefix in ("", "r", "i"):
        setattr(ndarray, f"__{_prefix}{_name}__", _operator(f"__{_prefix}{_name}__"))
for _name in ("neg", "pos", "abs", "invert", "lt", "le", "eq", "ne", "gt", "ge"):
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))
ndarray.__hash__ = None


def _to_python(kind):
    def convert(self):
        _synchronise()
        return kind(self._host)

    return convert


for _kind in (float, int, bool):
    setattr(ndarray, f"__{_kind.__name__}__", _to_python(_kind))


class _Ufunc:
    """A NumPy ufunc with those of its methods that CuPy's have."""

    def __init__(self, ufunc):
        self.ufunc = ufunc

    def __call__(self, *args, **kwargs):
        return _call(self.ufunc, *args, **kwargs)

    def at(self, target, indices, values):
        self.ufunc.at(target._host, _unwrap(indices), _unwrap(values))


def asarray(value, dtype=None):
    """Device array from a device array, a host array or a number: the one explicit way in."""
    return ndarray(numpy.array(value._host if isinstance(value, ndarray) else value, dtype=dtype, copy=True))


def array(value, dtype=None, copy=True, order="K"):
    return ndarray(
        numpy.array(value._host if isinstance(value, ndarray) else value, dtype=dtype, copy=copy, order=order)
    )


def __getattr__(name):
    if name not in NAMES or not hasattr(numpy, name):
        raise AttributeError(f"module 'cupy' has no attribute {name!r}")
    function = getattr(numpy, name)
    if isinstance(function, numpy.ufunc):
        return _Ufunc(function)
    return functools.partial(_call, function) if callable(function) else function
