# SPDX-License-Identifier: Apache-2.0
"""O of a plain call without gradients, past PyTorch's binding and dispatcher.

Those two take longer than all the rest of a small call. torch_ops/direct.cc is a function for Python that reads q, k and v
where Python has them. Nothing of how PyTorch and Python lay out their objects is assumed: it is looked up in tensors made
for that, once, and where anything is found in no place or in two, calls go by the operator, as they do for all but plain
tensors and wherever somebody listens to the dispatcher (_attention.py)."""
import ctypes
import pathlib
import sys
import sysconfig

import torch

from . import _library
from .. import _native

_FASTCALL = 0x80  # METH_FASTCALL
# PyTorch has a function of its stable ABI since 2.14; before, one that libtorch_python has for C++.
_TO_OBJECT, _WRAP = "torch_tensor_to_pyobject", "_Z16THPVariable_WrapRKN2at10TensorBaseE"
_ADDRESSES = ("PyLong_AsLongLong", "PyFloat_AsDouble", "PyErr_Occurred", "PyErr_Clear", "Py_IncRef",
              "PyEval_SaveThread", "PyEval_RestoreThread")
# Who may listen to the dispatcher.
modes = torch._C._len_torch_dispatch_stack
function_modes = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
profiled = torch._C._autograd._profiler_enabled


class _Table(ctypes.Structure):
    _fields_ = [("type_at", ctypes.c_int64), ("tensor_at", ctypes.c_int64), ("keys_at", ctypes.c_int64),
                ("keys", ctypes.c_uint64 * 2), ("classes", ctypes.c_void_p * 2), ("none", ctypes.c_void_p),
                ("other", ctypes.c_void_p), ("to_object", ctypes.c_void_p), ("wrap", ctypes.c_void_p),
                *((name, ctypes.c_void_p) for name in _ADDRESSES)]


class _Method(ctypes.Structure):
    """PyMethodDef."""
    _fields_ = [("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int),
                ("doc", ctypes.c_char_p)]


def _place(address, size, value):
    """The bytes from `address` to the one word of that value, or None."""
    words = (ctypes.c_uint64 * (size // 8)).from_address(address)
    places = [8 * i for i, word in enumerate(words) if word == value]
    return places[0] if len(places) == 1 else None


def _keys(*names):
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys.raw_repr()


def _plain_keys(device):
    """The dispatch keys of plain tensors of a device, "CPU" or "CUDA", and those that were made in inference mode."""
    return (_keys(device, "ADInplaceOrView", "Autograd" + device, "Autocast" + device),
            _keys(device, "Autocast" + device))


_SMALLEST_IMPL = 192  # bytes of a TensorImpl that are there in every version


def _places():
    """Where an object has its class, a tensor its at::Tensor, and that its keys; None where that can't be told."""
    tensor = torch.empty(2, 3, device="cpu")
    with torch.inference_mode():
        of_inference = torch.empty(2, 3, device="cpu")
    if tuple(torch._C._dispatch_keys(t).raw_repr() for t in (tensor, of_inference)) != _plain_keys("CPU"):
        return None
    found = set()
    for t in (tensor, of_inference, torch.nn.Parameter(tensor), torch._neg_view(tensor)):
        size = type(t).__basicsize__
        found.add((_place(id(t), size, id(type(t))), _place(id(t), size, t._cdata),
                   _place(t._cdata, _SMALLEST_IMPL, torch._C._dispatch_keys(t).raw_repr())))
    places = found.pop()
    # The at::Tensor comes first: where something stands before it, that might say what the word means.
    return None if found or None in places or places[1] != object.__basicsize__ else places


def _address(library, name):
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value if hasattr(library, name) else None


_kept = []  # what the functions point to


def _function(library, device, other):
    """(address, function) of that library's."""
    folder = pathlib.Path(torch.__file__).parent / "lib"
    to_object = _address(ctypes.CDLL(str(folder / "libtorch_cpu.so")), _TO_OBJECT)
    wrap = _address(ctypes.CDLL(str(folder / "libtorch_python.so")), _WRAP)
    places = _places()
    if places is None or (to_object is None and wrap is None):
        return None, None
    classes = (ctypes.c_void_p * 2)(id(torch.Tensor), id(torch.nn.Parameter))
    table = _Table(*places, (ctypes.c_uint64 * 2)(*_plain_keys(device)), classes, id(None), other, to_object, wrap,
                   *(_address(ctypes.pythonapi, name) for name in _ADDRESSES))
    loaded = ctypes.CDLL(str(_native.library_dir() / library))
    loaded.tessera_torch_direct.restype = ctypes.c_void_p
    address = loaded.tessera_torch_direct(ctypes.byref(table))
    method = _Method(b"attention", address, _FASTCALL, None)
    _kept.append(method)
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
        ("PyCFunction_NewEx", ctypes.pythonapi))
    return address, make(ctypes.addressof(method), None, None)


def _found():
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    try:
        address, function = _function(_library.CPU_LIBRARY, "CPU", None)
        if function is not None and _library.status()[_library.CUDA_LIBRARY] is None:
            _, function = _function(_library.CUDA_LIBRARY, "CUDA", address)
        return function
    except (AttributeError, OSError):  # this PyTorch has other names
        return None


# q, k, v, causal, heads_first, scale, window_left, window_right -> O, or None where the operator has to do it.
attention = _found()
# For `doctor`.
WAY = "past PyTorch's dispatcher" if attention is not None else "by the operator: this Python or PyTorch is laid out anew"
