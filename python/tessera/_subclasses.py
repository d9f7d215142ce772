# SPDX-License-Identifier: Apache-2.0
"""Subclasses of array types whose memory need not hold their numbers.

A subclass may override a protocol of its base class and so give its objects a meaning of its own: PyTorch's CausalBias
has uninitialised memory, and NumPy's masked arrays hide some of their elements. tessera does not read such memory.
"""


def overridden(cls, base, hooks, allowed=()):
    """The first method of `hooks` that `cls` has and `base` has not, or None; `allowed`: implementations that count as
    those of `base`."""
    for name in hooks:
        own, default = (_function(getattr(c, name, None)) for c in (cls, base))
        if own is not default and own not in allowed:
            return name
    return None


def _function(method):
    return getattr(method, "__func__", method)
