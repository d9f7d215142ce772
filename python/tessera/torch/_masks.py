# SPDX-License-Identifier: Apache-2.0
"""A bool mask, a bias and a CausalBias as the kernels take them: a bias of 4 dimensions and a causal alignment."""
from __future__ import annotations

import torch

from . import _distributed, _shapes
from ._tensors import CausalBias, alignment_of, expect_tensor

CAUSAL = {None: 0, False: 0, "bottom-right": 1, "top-left": 2}
_BLOCKED = float("-inf")


def causal_number(causal):
    number = CAUSAL.get(causal) if causal is None or isinstance(causal, (str, bool)) else None
    if number is None:
        raise ValueError(f"causal: expected None, 'bottom-right' or 'top-left', got {causal!r}")
    return number


def once(mask):
    """The mask with a dimension of 1 where it repeats elements (stride 0)."""
    return mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]


def as_bias(mask, dtype):
    """0 where a bool mask is True, -inf elsewhere. Elements that it repeats are there once."""
    return torch.where(once(mask), mask.new_zeros((), dtype=dtype), _BLOCKED)  # allocates nothing but its result


def causal_and_bias(q, k, causal, bias, mask, heads_first):
    """The causal alignment and the bias, of 4 dimensions or None, that `causal`, `bias` and `mask` stand for."""
    expect_tensor("q", q)
    expect_tensor("k", k)
    if isinstance(bias, CausalBias):
        if causal_number(causal) != 0:
            raise ValueError(f"bias: expected no CausalBias with causal={causal!r}, got one")
        length = 2 if heads_first else 1
        causal, bias = alignment_of("bias", bias, q.shape[length], k.shape[length]), None
    elif bias is not None:
        expect_tensor("bias", bias)
        if bias.dtype == torch.bool:
            raise ValueError("bias: expected float32 or the dtype of q, numbers that are added to the scores, got "
                             "bool; mask= takes one, True where the key takes part")
        bias = bias[(None,) * (4 - bias.dim())]
    return causal, bias if mask is None else _masked(q, k, bias, mask, heads_first)


def _masked(q, k, bias, mask, heads_first):
    """The bias, 0 without one, and -inf where the mask is False. Raises ValueError naming the mask or the bias. Other
    tensors that are wrong are left to the call, which names them."""
    expect_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise ValueError("mask: expected dtype bool, True where the key takes part, got "
                         f"{str(mask.dtype).removeprefix('torch.')}")
    if _distributed.are_in((q,)) != _distributed.are_in((mask,)):
        raise ValueError(f"mask: expected a {type(q).__name__}, as q is, got a {type(mask).__name__}")
    if mask.device != q.device:
        raise ValueError(f"mask: expected a tensor on {q.device}, where q is, got one on {mask.device}")
    if mask.dim() > 4:
        raise ValueError(f"mask: expected at most 4 dimensions, got {mask.dim()}")
    if q.dim() != 4 or k.dim() != 4 or q.dtype not in _shapes.FLOATING:
        return bias
    heads, length = (1, 2) if heads_first else (2, 1)
    full = q.shape[0], q.shape[heads], q.shape[length], k.shape[length]
    mask = mask[(None,) * (4 - mask.dim())]
    _expect_broadcasts("mask", mask, full)
    if bias is None:
        return as_bias(mask, q.dtype)
    _expect_broadcasts("bias", bias, full)
    if (bias.dtype not in (torch.float32, q.dtype) or bias.device != q.device
            or _distributed.are_in((bias,)) != _distributed.are_in((mask,))):
        return bias
    mask = once(mask)
    shared = any(size == 1 != wanted for size, wanted in zip(bias.shape, mask.shape))
    if shared and bias.requires_grad and bias.dtype in (torch.float16, torch.bfloat16):
        bias = bias.float()  # its gradient is a sum over the sizes of the mask, which is rounded once
    return torch.where(mask, bias, _BLOCKED)


def _expect_broadcasts(name, tensor, full):
    if tensor.dim() != 4 or any(size not in (1, wanted) for size, wanted in zip(tensor.shape, full)):
        raise ValueError(f"{name}: expected {list(full)}, any size also 1, got {list(tensor.shape)}")
