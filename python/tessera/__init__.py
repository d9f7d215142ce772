# SPDX-License-Identifier: Apache-2.0
"""Exact attention by tiles, on arrays of any library that speaks DLPack.

Importing this module imports no other package and loads no library: that happens at the first call.
"""
from ._native import DeviceUnavailable, Unsupported

__all__ = ["DeviceUnavailable", "Unsupported"]


def __getattr__(name):
    if name == "__version__":
        from . import _native
        return _native.library().tessera_version().decode()
    raise AttributeError(f"module 'tessera' has no attribute {name!r}")
