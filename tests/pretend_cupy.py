"""A stand-in for CuPy on machines without a GPU: arrays that refuse what CuPy's refuse.

`ndarray` wraps a NumPy array, it is no subclass: nothing converts it silently, it has no buffer, and operands that live
on the host are turned away with CuPy's words. The module, its linalg and random and the arrays offer only names that
CuPy has (cupy_names.txt, taken from both CuPy 13 and 14). Every wait for the device, float(x) or x.get() for instance,
is counted in `synchronisations`. Stricter than CuPy in places: NumPy's functions on device arrays, and host arrays
written into or indexing device arrays, are refused. What it cannot show: races between streams, CuPy's index wrapping,
kernels that fail to compile.
"""

import numbers
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy

NAMES = frozenset(Path(__file__).with_name("cupy_names.txt").read_text().split())
SCALARS = (numbers.Number, numpy.generic, str, type(None), slice, type(Ellipsis), type, numpy.dtype)
SYNCHRONISING = ("item", "tolist", "tobytes", "tofile", "dump", "dumps")
WITH_AT = ("add", "subtract", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor")
WITH_REDUCE = ("add", "multiply")
synchronisations = 0


def _unwrap(value):
    """The NumPy arrays inside arguments; TypeError where CuPy would give one."""
    if isinstance(value, ndarray):
        return value._host
    if isinstance(value, tuple | list):
        return type(value)(_unwrap(v) for v in value)
    if isinstance(value, SCALARS):
        return value
    raise TypeError(f"Unsupported type {type(value)}")


def _root(host):
    while isinstance(host.base, numpy.ndarray):
        host = host.base
    return host


def _wrap(value, parents=()):
    """A result on the device; if it is a view of one of the `parents`, their owner is its `base`, as in CuPy."""
    if isinstance(value, tuple | list):
        return type(value)(_wrap(v, parents) for v in value)
    if not isinstance(value, numpy.ndarray | numpy.generic):
        return value
    host = numpy.asarray(value)
    for parent in parents:
        if isinstance(parent, ndarray) and parent._host is host:
            return parent
        if isinstance(parent, ndarray) and _root(parent._host) is _root(host):
            return ndarray(host, parent if parent.base is None else parent.base)
    return ndarray(host)


def _call(function, *args, parents=(), **kwargs):
    with numpy.errstate(all="ignore"):  # a GPU does not warn
        result = function(*map(_unwrap, args), **{k: _unwrap(v) for k, v in kwargs.items()})
    return _wrap(result, (*parents, *args, *kwargs.values()))


def _synchronise():
    global synchronisations
    synchronisations += 1


class ndarray:
    """An array on the pretended device. base: the array that owns the memory; None for an owner."""

    __slots__ = ("_host", "base")
    __hash__ = None

    def __init__(self, host, base=None):
        self._host, self.base = host, base

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

    @property
    def data(self):
        return SimpleNamespace(ptr=self._host.ctypes.data)

    def __getattr__(self, name):
        if f"ndarray.{name}" not in NAMES or not hasattr(self._host, name):
            raise AttributeError(f"'cupy.ndarray' object has no attribute {name!r}")
        value = getattr(self._host, name)
        if not callable(value):
            return _wrap(value, (self,))
        if name in SYNCHRONISING:
            _synchronise()
            return value
        return lambda *args, **kwargs: _call(value, *args, parents=(self,), **kwargs)

    def __len__(self):
        return len(self._host)

    def __getitem__(self, index):
        index = _unwrap(index)
        value = self._host[index]
        if isinstance(value, numpy.generic):  # on the device x[0] is a view of no dimensions
            value = self._host[(*index, ...) if isinstance(index, tuple) else (index, ...)]
        return _wrap(value, (self,))

    def __setitem__(self, index, value):
        self._host[_unwrap(index)] = _unwrap(value)

    def __repr__(self):
        _synchronise()
        return f"pretend_cupy.{self._host!r}"


def _operator(name):
    def operate(self, *others):
        if any(isinstance(other, numpy.ndarray) for other in others):
            raise TypeError(f"Unsupported type {numpy.ndarray}")
        if not all(isinstance(other, (ndarray, *SCALARS)) for other in others):
            return NotImplemented
        return _call(getattr(self._host, name), *others, parents=(self,))

    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    for _prefix in ("", "r", "i"):
        if _prefix + _name != "imatmul":
            setattr(ndarray, f"__{_prefix}{_name}__", _operator(f"__{_prefix}{_name}__"))
for _name in ("neg", "pos", "abs", "invert", "lt", "le", "eq", "ne", "gt", "ge"):
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))
ndarray.__hash__ = None


def _to_python(kind):
    def convert(self):
        _synchronise()
        return kind(self._host)

    return convert


for _kind in (float, int, bool, complex):
    setattr(ndarray, f"__{_kind.__name__}__", _to_python(_kind))


class _Ufunc:
    """A NumPy ufunc with those of its methods that CuPy's have; lists are no operands."""

    def __init__(self, ufunc):
        self.ufunc = ufunc
        if ufunc.__name__ in WITH_AT:
            self.at = self._at
        if ufunc.__name__ in WITH_REDUCE:
            self.reduce = lambda x, *args, **kwargs: _call(ufunc.reduce, x, *args, **kwargs)

    def __call__(self, *args, **kwargs):
        if any(isinstance(a, tuple | list) for a in args):
            raise TypeError(f"Unsupported type {list}")
        return _call(self.ufunc, *args, **kwargs)

    def _at(self, target, indices, values):
        self.ufunc.at(target._host, _unwrap(indices), _unwrap(values))


def asarray(value, dtype=None, order="K"):
    """Device array from a host array or a number, the one explicit way in; a device array of that dtype is itself."""
    return array(value, dtype, copy=False, order=order)


def array(value, dtype=None, copy=True, order="K"):
    if isinstance(value, ndarray):
        return _wrap(numpy.array(value._host, dtype=dtype, copy=copy or None, order=order), (value,))
    return ndarray(numpy.array(value, dtype=dtype, order=order))  # always a copy: the device has its own memory


def asnumpy(value):
    return value.get() if isinstance(value, ndarray) else numpy.asarray(value)


def _lookup(module, prefix, name):
    if prefix + name not in NAMES or not hasattr(module, name) or isinstance(getattr(module, name), ModuleType):
        raise AttributeError(f"module 'cupy' has no attribute {prefix + name!r}")
    value = getattr(module, name)
    if isinstance(value, numpy.ufunc):
        return _Ufunc(value)
    if isinstance(value, type) or not callable(value):  # dtypes, pi
        return value
    return lambda *args, **kwargs: _call(value, *args, **kwargs)


class _Namespace:
    def __init__(self, name):
        self.name = name

    def __getattr__(self, name):
        return _lookup(getattr(numpy, self.name), f"{self.name}.", name)


linalg, random = _Namespace("linalg"), _Namespace("random")


def __getattr__(name):
    return _lookup(numpy, "", name)
