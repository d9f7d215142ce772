# SPDX-License-Identifier: Apache-2.0
"""Results and workspace of a call, allocated by the library of the caller's arrays on its current stream.

NumPy, PyTorch, CuPy and JAX are recognized by type, without importing them; any other library by __array_namespace__ of
the Python array API standard.
"""
import contextlib
import ctypes
import mmap
import sys

from . import _native
from ._arrays import ITEM_SIZE, NAMES, Array, borrow, expect


def _numpys_dtype(like: Array, dtype):
    """NumPy has no name for bfloat16: the dtype of the input, of ml_dtypes, stands for it."""
    return like.source.dtype if dtype == like.dtype else NAMES[dtype]


class _NumPy:
    @staticmethod
    def empty(like: Array, shape, dtype):
        return sys.modules["numpy"].empty(shape, _numpys_dtype(like, dtype))

    @staticmethod
    def masked(like, mask, numbers, dtype):
        return _masked(sys.modules["numpy"], mask, numbers, _numpys_dtype(like, dtype))

    @staticmethod
    def summed(like, array, dims, shape):
        """`array`, summed in fp64 over the dimensions `dims`, in this shape and the dtype of `like`."""
        total = array.sum(axis=dims, keepdims=True, dtype="float64") if dims else array
        return total.reshape(shape).astype(like.source.dtype)

    @staticmethod
    def finish(like, result):
        return result


def _masked(numpy, mask, numbers, dtype):
    """An array of NumPy or CuPy: `numbers`, None for 0, where the mask is True, and -inf elsewhere."""
    numbers = 0 if numbers is None else numbers
    return numpy.where(mask, numpy.asarray(numbers, dtype), numpy.asarray(float("-inf"), dtype))


class _Torch:
    @staticmethod
    def stream(device):
        return sys.modules["torch"].cuda.current_stream(device).cuda_stream

    @staticmethod
    def on(device, stream):
        torch = sys.modules["torch"]
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device))

    @staticmethod
    def empty(like, shape, dtype):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, NAMES[dtype]), device=like.source.device)

    @staticmethod
    def masked(like, mask, numbers, dtype):
        torch = sys.modules["torch"]
        dtype = getattr(torch, NAMES[dtype])
        numbers = mask.new_zeros((), dtype=dtype) if numbers is None else numbers.to(dtype)
        return torch.where(mask, numbers, float("-inf"))

    @staticmethod
    def summed(like, array, dims, shape):
        total = array.sum(dims, keepdim=True, dtype=sys.modules["torch"].float64) if dims else array
        return total.reshape(shape).to(like.source.dtype)

    finish = _NumPy.finish


class _CuPy:
    @staticmethod
    def stream(device):
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device):
            return cupy.cuda.get_current_stream().ptr

    @staticmethod
    @contextlib.contextmanager
    def on(device, stream):
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device), cupy.cuda.ExternalStream(stream):
            yield

    @staticmethod
    def empty(like, shape, dtype):
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(like.device[1]):
            return cupy.empty(shape, _numpys_dtype(like, dtype))

    @staticmethod
    def masked(like, mask, numbers, dtype):
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(like.device[1]):
            return _masked(cupy, mask, numbers, _numpys_dtype(like, dtype))

    summed, finish = _NumPy.summed, _NumPy.finish


class _Jax:
    """JAX's arrays are immutable: kernels write to NumPy's, which finish() turns into JAX's."""
    @staticmethod
    def empty(like, shape, dtype):
        if like.device[0] != _native.CPU:
            expect(like.name, "an array of the host; tessera.jax computes on devices", f"one on {like.source.device}")
        import numpy
        return numpy.empty(shape, _numpys_dtype(like, dtype))

    @staticmethod
    def masked(like, mask, numbers, dtype):
        import numpy
        return _masked(numpy, numpy.asarray(mask), numbers, _numpys_dtype(like, dtype))

    summed = _NumPy.summed

    @staticmethod
    def finish(like, result):
        import jax
        return jax.device_put(result, like.source.device)


class _ArrayApi:
    @staticmethod
    def empty(like, shape, dtype):
        namespace = getattr(like.source, "__array_namespace__", None)
        if namespace is None:
            expect("out", f"arrays for the results, since a {type(like.source).__name__} does not tell how to make "
                   "one (it has no __array_namespace__)", "None")
        arrays = namespace()
        return arrays.empty(shape, dtype=getattr(arrays, NAMES[dtype]), device=like.source.device)

    @staticmethod
    def masked(like, mask, numbers, dtype):
        namespace = getattr(mask, "__array_namespace__", None)
        if namespace is None:
            expect("mask", "an array of a library whose arrays have __array_namespace__", f"a {type(mask).__name__}")
        arrays = namespace()
        kind = dict(dtype=getattr(arrays, NAMES[dtype]), device=mask.device)
        numbers = arrays.zeros((), **kind) if numbers is None else arrays.astype(numbers, kind["dtype"])
        return arrays.where(mask, numbers, arrays.full((), float("-inf"), **kind))

    @staticmethod
    def summed(like, array, dims, shape):
        arrays = array.__array_namespace__()
        total = arrays.sum(array, axis=dims, keepdims=True, dtype=arrays.float64) if dims else array
        return arrays.astype(arrays.reshape(total, shape), like.source.dtype)

    finish = _NumPy.finish


def library_of(source):
    """The class above that allocates arrays like this one."""
    for module, type_name, library in (("numpy", "ndarray", _NumPy), ("torch", "Tensor", _Torch),
                                       ("cupy", "ndarray", _CuPy), ("jax", "Array", _Jax)):
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(source, getattr(loaded, type_name, ())):
            return library
    return _ArrayApi


def stream_of(source, stream):
    """The cudaStream_t, as a number, of a call on this array in CUDA memory: `stream` or the current one of its
    library."""
    if stream is not None:
        return stream
    library = library_of(source)
    return library.stream(int(source.__dlpack_device__()[1])) if hasattr(library, "stream") else 0


def dlpack_stream(stream: int) -> int:
    """A cudaStream_t in DLPack's numbering, in which the default stream is 1."""
    return stream or 1


def working_on(array: Array, stream):
    """A context in which the array's library allocates for work on this stream."""
    library = library_of(array.source)
    if stream is None or array.device[0] != _native.CUDA or not hasattr(library, "on"):
        return contextlib.nullcontext()
    return library.on(array.device[1], stream)


def output(name, given, like: Array, shape, dtype, stream) -> Array:
    """The array for a result: the caller's, or a new one of the library of `like`."""
    if given is None:
        given = library_of(like.source).empty(like, tuple(shape), dtype)
    return borrow(name, given, None if stream is None else dlpack_stream(stream), written=True)


def finished(result: Array, like: Array, given):
    return result.source if given is not None else library_of(like.source).finish(like, result.source)


class Workspace:
    """`size` bytes for a call on the device of `like`: pages of the host, or an array of its library."""

    def __init__(self, size: int, like: Array, stream):
        self.size = size
        self.address = None
        if size == 0:
            return
        if like.device[0] == _native.CPU:
            try:
                self._memory = mmap.mmap(-1, size)  # a page is aligned to more than WORKSPACE_ALIGNMENT
            except (OSError, ValueError, OverflowError) as error:
                raise MemoryError(f"workspace: could not allocate {size} bytes") from error
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            return
        alignment = _native.WORKSPACE_ALIGNMENT
        count = (size + alignment) // ITEM_SIZE[_native.INT32] + 1
        self._memory = output("workspace", None, like, (count,), _native.INT32, stream)
        self.address = -(-self._memory.data // alignment) * alignment
