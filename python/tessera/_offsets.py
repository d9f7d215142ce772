# SPDX-License-Identifier: Apache-2.0
"""Offsets of ragged batches whose rows are not all in use, for the functions of flash-attn's two versions."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling


def _expect_used(name, used, offsets):
    """Raises RuntimeError unless `used` has a length for each sequence, which the sequence has on the CPU."""
    if used.dtype not in (torch.int32, torch.int64) or offsets.dim() != 1 or used.shape != offsets[1:].shape:
        raise RuntimeError(f"{name}: expected int32 [{max(offsets.numel() - 1, 0)}], got "
                           f"{str(used.dtype).removeprefix('torch.')} {list(used.shape)}")
    if is_compiling() or type(used) is not Tensor or used.device.type != "cpu" or offsets.device.type != "cpu":
        return
    wrong = ((used < 0) | (used > offsets.diff())).nonzero().flatten().tolist()
    if wrong:
        raise RuntimeError(f"{name}: expected lengths from 0 to those of cu_seqlens, got {int(used[wrong[0]])} for "
                           f"sequence {wrong[0]}")


def used_members(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
    """cu_seqlens with three sequences for each one: the rows in use, keys without a query, queries without a key."""
    for name, used, offsets in (("seqused_q", seqused_q, cu_seqlens_q), ("seqused_k", seqused_k, cu_seqlens_k)):
        if used is not None:
            _expect_used(name, used, offsets)
    begins_q, ends_q, begins_k, ends_k = cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:]
    used_q = ends_q if seqused_q is None else begins_q + seqused_q
    used_k = ends_k if seqused_k is None else begins_k + seqused_k
    of_q, of_k = torch.stack([begins_q, used_q, used_q], 1), torch.stack([begins_k, used_k, ends_k], 1)
    return torch.cat([of_q.flatten(), cu_seqlens_q[-1:]]), torch.cat([of_k.flatten(), cu_seqlens_k[-1:]])


def up_to_the_last_offset(tensors, cu_seqlens):
    """The rows that belong to a sequence, which need not be all of them: servers pad their batches. On the CPU alone,
    where reading an offset waits for nothing."""
    if (is_compiling() or type(cu_seqlens) is not Tensor or cu_seqlens.device.type != "cpu" or cu_seqlens.dim() != 1
            or not len(cu_seqlens)):
        return tensors
    total = int(cu_seqlens[-1])
    return tuple(t[:total] if t.dim() and 0 <= total < len(t) else t for t in tensors)
