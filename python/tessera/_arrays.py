# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries as tensors of the C ABI: NumPy's by its array interface, all others by DLPack.

NumPy's DLPack refuses bfloat16 of ml_dtypes and, in older versions, read-only arrays; its array interface has both.
A DLPack capsule is borrowed for the length of the call: it keeps its name, so its own destructor frees it.
"""
import ctypes
import functools
import sys

from . import _native
from ._subclasses import overridden

_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_HOST, _DLPACK_CUDA_MANAGED = 1, 2, 3, 13
_DLPACK_INT, _DLPACK_FLOAT, _DLPACK_BFLOAT, _DLPACK_BOOL = 0, 2, 4, 6
DLPACK_CUDA = (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED)
_READ_ONLY = 1
_VERSION = (1, 0)

BOOL = -1  # of masks: no tensor of the C ABI has it
NAMES = {_native.FP64: "float64", _native.FP32: "float32", _native.FP16: "float16", _native.BF16: "bfloat16",
         _native.INT32: "int32", _native.INT64: "int64", _native.INT8: "int8", BOOL: "bool"}
FLOATING = (_native.FP64, _native.FP32, _native.FP16, _native.BF16)
DTYPES = {name: code for code, name in NAMES.items()}
ITEM_SIZE = {_native.FP64: 8, _native.FP32: 4, _native.FP16: 2, _native.BF16: 2, _native.INT32: 4, _native.INT64: 8,
             _native.INT8: 1}


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned up to the tensor."""
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _DLTensor)]


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class Array:
    """A borrowed array: the fields of the C ABI's tensor, and the objects that keep its memory alive.

    shape, strides: tuples, strides in elements. dtype: a code of _native, or BOOL. device: (_native.CPU or CUDA,
    index).
    """
    __slots__ = ("name", "source", "data", "dtype", "shape", "strides", "device", "read_only", "_keep")

    def __init__(self, name, source, data, dtype, shape, strides, device, read_only, keep):
        self.name, self.source, self.data, self.dtype = name, source, data, dtype
        self.shape, self.strides, self.device = tuple(shape), tuple(strides), device
        self.read_only, self._keep = read_only, keep

    def tensor(self, order=None) -> _native.Tensor:
        """The C struct, with the dimensions in this order."""
        rank = len(self.shape)
        if rank == 0:  # rank 0 tells the C ABI that a tensor is not given
            expect(self.name, f"1..{_native.MAX_RANK} dimensions", 0)
        order = range(rank) if order is None else order
        tensor = _native.Tensor(data=self.data, dtype=self.dtype, rank=rank, device_type=self.device[0],
                                device_index=self.device[1])
        for place, dimension in enumerate(order):
            tensor.shape[place] = self.shape[dimension]
            tensor.strides[place] = self.strides[dimension]
        return tensor

    def padded(self):
        """The array with leading dimensions of size 1 up to four, as NumPy broadcasts."""
        missing = _native.MAX_RANK - len(self.shape)
        return Array(self.name, self.source, self.data, self.dtype, (1,) * missing + self.shape,
                     (0,) * missing + self.strides, self.device, self.read_only, self._keep)


def expect(name, expected, got):
    raise ValueError(f"{name}: expected {expected}, got {got}")


def borrow(name, source, stream=None, written=False) -> Array:
    """Reads an array without a copy.

    stream: the consumer's stream, for __dlpack__ of an array in CUDA memory; None: its library's choice.
    written: the array is an output.
    Raises ValueError naming the argument: it is no array, has a dtype or rank that no tensor of tessera has, lies on
    another kind of device, or is a read-only output. Subclasses that give their memory another meaning are refused too.
    """
    _expect_memory(name, source)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(source, numpy.ndarray):
        array = _of_numpy(name, source)
    elif hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__"):
        array = _of_dlpack(name, source, stream)
    else:
        expect(name, "a NumPy array or one with __dlpack__", f"a {type(source).__name__}")
    expect_bool_of_masks(array)
    if len(array.shape) > _native.MAX_RANK:
        expect(name, f"at most {_native.MAX_RANK} dimensions", len(array.shape))
    if written and array.read_only:
        expect(name, "an array that may be written", "one that is read-only")
    return array


def expect_bool_of_masks(array):
    """Raises ValueError for a mask that is not bool, and for any other array that is."""
    if (array.dtype == BOOL) != (array.name == "mask"):
        expect(array.name, f"dtype {dtypes_of(array.name)}", NAMES[array.dtype])


@functools.lru_cache(maxsize=64)
def _code_of_numpy(dtype):
    """The code of a NumPy dtype, or None. Cached, since NumPy computes a dtype's name at each access."""
    return DTYPES.get(dtype.name) if dtype.isnative else None


def _expect_memory(name, source):
    """Raises ValueError for an array of a subclass that gives its memory a meaning of its own, or has none."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    cls, hook = type(source), None
    if numpy is not None and isinstance(source, numpy.ndarray):
        if cls is not numpy.ndarray and isinstance(source, numpy.ma.MaskedArray):
            hook = "its mask"
        elif cls is not numpy.ndarray:
            hook = overridden(cls, numpy.ndarray, ("__array_ufunc__", "__array_function__"))
    elif torch is not None and isinstance(source, torch.Tensor) and cls is not torch.Tensor:
        hook = overridden(cls, torch.Tensor, ("__torch_function__", "__torch_dispatch__"),
                          (torch._C._disabled_torch_function_impl,))
    if hook is not None:
        expect(name, "an array whose memory holds its numbers", f"a {cls.__name__}, whose meaning depends on {hook}")


def dtypes_of(name) -> str:
    """The dtypes that an argument may have, in words."""
    if name.startswith("cu_seqlens") or name in ("slot_mapping", "positions", "q_positions"):
        return "int32 or int64"
    if name in ("kv_lengths", "page_table", "cache_batch_index", "left_padding"):
        return "int32"
    if name == "mask":
        return "bool, True where the key takes part"
    return "int8" if name == "o_residual" else "float32, bfloat16, float16 or float64"


def _of_numpy(name, source) -> Array:
    dtype = _code_of_numpy(source.dtype)
    if dtype is None:
        order = "" if source.dtype.isnative else " in the machine's byte order"
        expect(name, f"dtype {dtypes_of(name)}{order}", source.dtype)
    item = source.dtype.itemsize
    address = source.__array_interface__["data"][0]
    if any(stride % item for stride in source.strides) or address % item:
        expect(name, f"elements aligned to their {item} bytes", f"strides {source.strides} in bytes")
    return Array(name, source, address, dtype, source.shape, (s // item for s in source.strides),
                 (_native.CPU, 0), not source.flags.writeable, source)


def dlpack_device(name, source) -> tuple:
    """(type, index) of an array's device, as DLPack numbers them. Raises ValueError when its library can't say."""
    try:
        kind, index = source.__dlpack_device__()
        return int(kind), int(index)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise _dlpack_error(name, error) from error


def _dlpack_error(name, error):
    return ValueError(f"{name}: expected an array that its library can export by DLPack, got the error: {error}")


def _capsule(source, device_type, stream):
    """The capsule of an array, also from producers older than DLPack 1.0."""
    asked = {"stream": stream} if device_type in DLPACK_CUDA and stream is not None else {}
    try:
        return source.__dlpack__(max_version=_VERSION, **asked)
    except TypeError:  # written before max_version
        return source.__dlpack__(**asked)


def _tensor_of(name, capsule):
    """(DLTensor, read_only) of a capsule."""
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if managed.major != _VERSION[0]:
            expect(name, f"DLPack {_VERSION[0]}", f"{managed.major}.{managed.minor}")
        return managed.tensor, bool(managed.flags & _READ_ONLY)
    if _is_valid(capsule, b"dltensor"):
        return _DLTensor.from_address(_get_pointer(capsule, b"dltensor")), False
    expect(name, "a DLPack capsule that nobody has used", "another object from __dlpack__")


def _dtype_of(name, tensor) -> int:
    kinds = {(_DLPACK_FLOAT, 64): _native.FP64, (_DLPACK_FLOAT, 32): _native.FP32, (_DLPACK_FLOAT, 16): _native.FP16,
             (_DLPACK_BFLOAT, 16): _native.BF16, (_DLPACK_INT, 32): _native.INT32, (_DLPACK_INT, 64): _native.INT64,
             (_DLPACK_INT, 8): _native.INT8, (_DLPACK_BOOL, 8): BOOL}
    dtype = kinds.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        expect(name, f"dtype {dtypes_of(name)}",
               f"DLPack type code {tensor.code} with {tensor.bits} bits and {tensor.lanes} lanes")
    return dtype


def _of_dlpack(name, source, stream) -> Array:
    if hasattr(source, "is_neg") and source.is_neg():  # for a view -x PyTorch's DLPack has the memory of x
        expect(name, "an array whose numbers lie in memory (PyTorch's resolve_neg() gives one)", "a lazily negated one")
    device_type, _ = dlpack_device(name, source)
    try:
        capsule = _capsule(source, device_type, stream)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise _dlpack_error(name, error) from error
    tensor, read_only = _tensor_of(name, capsule)
    devices = {_DLPACK_CPU: _native.CPU, _DLPACK_CUDA_HOST: _native.CPU, _DLPACK_CUDA: _native.CUDA,
               _DLPACK_CUDA_MANAGED: _native.CUDA}
    if tensor.device_type not in devices:
        expect(name, "memory of the host or of a CUDA device", f"DLPack device type {tensor.device_type}")
    device = devices[tensor.device_type]
    shape = tuple(tensor.shape[:tensor.ndim])
    strides = tuple(tensor.strides[:tensor.ndim]) if tensor.strides else dense_strides(shape)
    return Array(name, source, (tensor.data or 0) + tensor.byte_offset, _dtype_of(name, tensor), shape, strides,
                 (device, tensor.device_id if device == _native.CUDA else 0), read_only, capsule)


def dense_strides(shape):
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))
