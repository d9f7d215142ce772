# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that the functions of flash_attn and flash_attn_3 share. They raise RuntimeError, as flash-attn
does, that names the argument."""
from __future__ import annotations

from torch import Tensor

from .torch import _attention
from .torch._tensors import expect_tensor


# The operators' names of arguments and flash-attn's.
NAMES = {"scale": "softmax_scale", "cu_seqlens_kv": "cu_seqlens_k"}


def side(given):
    """A side of a window for the operators: an integer, -1 for no limit."""
    side = -1 if given is None else _attention._integer(given)
    if side is None:
        raise RuntimeError(f"window_size: expected two integers, negative for no limit, got {given!r}")
    if side >= 2**63:
        raise RuntimeError(f"window_size: expected integers of 64 bits, got {side}")
    return -1 if side < 0 else side


def number(name, value):
    if value.__class__ is float:
        return value
    try:
        value = _attention.number(name, value)
    except ValueError as error:
        raise RuntimeError(str(error)) from None
    if value is None:
        raise RuntimeError(f"{name}: expected a number, got None")
    return value


def bound(name, length):
    """max_seqlen for the operators: an integer, -1 for None."""
    if length is None:
        return -1
    number = int(length) if isinstance(length, Tensor) else _attention._integer(length)
    if number is None or number < 0 or isinstance(number, int) and number >= 2**63:
        raise RuntimeError(f"{name}: expected an integer from 0 on, got {length!r}")
    return number


def unpacked(name, packed, parts, dim, meaning):
    """The tensors that one packed tensor holds."""
    expect_tensors(**{name: packed})
    if packed.dim() != dim + 3 or packed.shape[dim] != parts:
        raise RuntimeError(f"{name}: expected shape {meaning}, got {list(packed.shape)}")
    return packed.unbind(dim)


def window(window_size):
    """(left, right) for the operators: each an integer, -1 for no limit."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise RuntimeError(f"window_size: expected (left, right), got {window_size!r}") from None
    return side(left), side(right)


def expect_tensors(**tensors):
    """Raises RuntimeError unless each is a tensor."""
    for name, tensor in tensors.items():
        try:
            expect_tensor(name, tensor)
        except ValueError as error:
            raise RuntimeError(str(error)) from None
