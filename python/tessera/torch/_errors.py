# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the operators: PyTorch makes each of them a RuntimeError, the text begins with tessera's code."""
import re

from .. import _native

_PATTERN = re.compile(r"tessera (\d+): (.*)", re.DOTALL)
_CLASSES = {_native.INVALID_ARGUMENT: ValueError, _native.UNSUPPORTED: _native.Unsupported,
            _native.OUT_OF_MEMORY: MemoryError, _native.DEVICE_UNAVAILABLE: _native.DeviceUnavailable}


def translated(error: Exception) -> Exception:
    """The exception that `error` stands for: ValueError for a wrong argument; `error` itself if it isn't tessera's."""
    match = _PATTERN.match(str(error))
    if match is None:
        return error
    return _CLASSES.get(int(match[1]), RuntimeError)(match[2])
