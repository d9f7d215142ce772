# SPDX-License-Identifier: Apache-2.0
"""Tells plan() whether a CUDA kernel reads q, k and v in their layout, or copies them first."""
from __future__ import annotations

from . import _native

_NEEDS_ALIGNED_ROWS = "cuda.fa3."  # TMA reads 16 bytes at a time
_ALIGNMENT = 16
_FLOP_PER_BYTE = 295  # of an H100; copies_pay() of python/torch_ops/call.hpp has the reasons


def _is_aligned(tensor: _native.Tensor) -> bool:
    """Whether TMA can address [batch, len, heads, head_dim] or [total, heads, head_dim] of 16-bit elements."""
    last = tensor.rank - 1
    if (tensor.data or 0) % _ALIGNMENT != 0 or (tensor.shape[last] > 1 and tensor.strides[last] != 1):
        return False
    return all(tensor.shape[d] == 1 or (tensor.strides[d] > 0 and tensor.strides[d] * 2 % _ALIGNMENT == 0)
               for d in range(last))


def copies_pay(problem, backward: bool) -> bool:
    """Whether tessera.torch copies rows that are not aligned: copies_pay() of python/torch_ops/call.hpp."""
    if problem.ragged:
        return True
    width = problem.window_left + problem.window_right + 1
    keys = min(problem.len_kv, width)
    if problem.causal and width >= problem.len_kv:
        keys /= 2
    rows = problem.len_q * (2 if backward else 1) + 2 * problem.len_kv
    return (10 if backward else 4) * problem.len_q * keys >= _FLOP_PER_BYTE * 4 * rows


def remark(call, kernel: str, following: str | None) -> str:
    """A sentence about tensors that `kernel` does not read in their layout; "" if it reads all. following: the kernel that
    would be chosen next, or None."""
    if not kernel.startswith(_NEEDS_ALIGNED_ROWS):
        return ""
    names = [name for name in ("q", "k", "v") if not _is_aligned(call.inputs[name])]
    if not names:
        return ""
    where = f"{kernel} needs contiguous rows aligned to 16 bytes, and those of {', '.join(names)} are not"
    if call.options.kernel or following is None:
        return f"{where}: the call is refused, since no other kernel may run"
    if copies_pay(call.problem, call.backward):
        return (f"{where}: tessera.torch copies them, which takes less time than {following}; tessera.attention, which "
                f"copies nothing, runs {following}")
    return f"{where}: {following} runs, since copies would take longer than it"
