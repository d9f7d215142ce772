# SPDX-License-Identifier: Apache-2.0
"""Turns the operators' exceptions into tessera's. PyTorch turns each one into a RuntimeError; its text begins with
tessera's code (python/torch_ops/call.hpp)."""
import re

import torch

from .. import _native
from . import _library

_PATTERN = re.compile(r"tessera (\d+): (.*)", re.DOTALL)
_CLASSES = {_native.INVALID_ARGUMENT: ValueError, _native.UNSUPPORTED: _native.Unsupported,
            _native.OUT_OF_MEMORY: MemoryError, _native.DEVICE_UNAVAILABLE: _native.DeviceUnavailable}


# Matches PyTorch's message for an argument whose type is not the one in the operator's schema.
_SCHEMA = re.compile(r"tessera::\w+\(\) Expected a value of type '(?:Optional\[)?(\w+)\]?' for argument '(\w+)' "
                     r"but instead found type '(.+?)'")
# The names that the public functions have for arguments of the operators, if they differ.
_NAMES = {"dropout": "dropout_p", "window_left": "window", "window_right": "window"}


def translated(error: Exception) -> Exception:
    """The exception that `error` stands for (ValueError for a wrong argument), or `error` itself if it is not
    tessera's."""
    match = _PATTERN.match(str(error))
    if match is not None:
        name, colon, text = match[2].partition(": ")
        return _CLASSES.get(int(match[1]), RuntimeError)(_NAMES.get(name, name) + colon + text)
    match = _SCHEMA.match(str(error))
    if match is not None:
        return ValueError(f"{_NAMES.get(match[2], match[2])}: expected {match[1]}, got a value of type {match[3]}")
    return error


def renamed(error: Exception, names: dict) -> str:
    """The text of an error with the caller's name of the argument that it begins with. names: ours -> the caller's."""
    name, colon, text = str(error).partition(":")
    return names.get(name, name) + colon + text


def without_kernel(tensors: dict) -> Exception:
    """Why the dispatcher found no kernel for these tensors (argument -> tensor or None)."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return ValueError(f"{name}: expected a torch.Tensor or a subclass that implements tessera's operators, got a "
                              f"{type(tensor).__name__}, which does not implement them")
        if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type not in ("cpu", "cuda"):
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            return ValueError(f"{name}: expected a strided tensor on the CPU or a CUDA device, got one that is {kind} "
                              f"on {tensor.device}")
        if tensor.is_quantized:
            return ValueError(f"{name}: expected dtype float32, bfloat16, float16 or float64, got {tensor.dtype}")
    reason = _library.status()[_library.CUDA_LIBRARY]
    if reason is None:
        return NotImplementedError("tessera: PyTorch found no kernel for these tensors: "
                                   + ", ".join(f"{name} on {t.device}" for name, t in tensors.items() if t is not None))
    return _native.DeviceUnavailable("q: expected a tensor on the CPU, since no operators for CUDA are loaded: "
                                     f"{reason}")
