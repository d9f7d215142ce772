# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the operators: PyTorch makes each of them a RuntimeError, the text begins with tessera's code."""
import re

import torch

from .. import _native
from . import _library

_PATTERN = re.compile(r"tessera (\d+): (.*)", re.DOTALL)
_CLASSES = {_native.INVALID_ARGUMENT: ValueError, _native.UNSUPPORTED: _native.Unsupported,
            _native.OUT_OF_MEMORY: MemoryError, _native.DEVICE_UNAVAILABLE: _native.DeviceUnavailable}


# What PyTorch says of an argument that is not what an operator's schema has.
_SCHEMA = re.compile(r"(?:tessera|aten)::\w+\(\) Expected a value of type '(?:Optional\[)?(\w+)\]?' for argument '(\w+)' "
                     r"but instead found type '(.+?)'")
# The functions' names where the operators have others.
_NAMES = {"dropout": "dropout_p", "window_left": "window", "window_right": "window"}


def translated(error: Exception) -> Exception:
    """The exception that `error` stands for: ValueError for a wrong argument; `error` itself if it isn't tessera's."""
    match = _PATTERN.match(str(error))
    if match is not None:
        name, colon, text = match[2].partition(": ")
        return _CLASSES.get(int(match[1]), RuntimeError)(_NAMES.get(name, name) + colon + text)
    match = _SCHEMA.match(str(error))
    if match is not None:
        return ValueError(f"{_NAMES.get(match[2], match[2])}: expected {match[1]}, got a value of type {match[3]}")
    return error


def of_the_place(q, k, v) -> Exception:
    """Why there is no operator for tensors like these."""
    for name, tensor in zip(("q", "k", "v"), (q, k, v)):
        if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type not in ("cpu", "cuda"):
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            return ValueError(f"{name}: expected a strided tensor on the CPU or a CUDA device, got one that is {kind} "
                              f"on {tensor.device}")
        if tensor.is_quantized:
            return ValueError(f"{name}: expected dtype float32, bfloat16, float16 or float64, got {tensor.dtype}")
    reason = _library.status()[_library.CUDA_LIBRARY]
    return _native.DeviceUnavailable("q: expected a tensor on the CPU, since no operators for CUDA are loaded: "
                                     f"{reason}")
