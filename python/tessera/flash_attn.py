# SPDX-License-Identifier: Apache-2.0
"""The functions of flash_attn 2.8 on tessera, with flash-attn's names, order of arguments, defaults and return values.

This module has flash-attn's meaning of an argument or result that tessera defines otherwise:
- causal is bottom-right; a window side of -1 (any negative number) is no limit; softcap <= 0 is none.
- The LSE of a query that sees no key is +inf (tessera: -inf). Its output is 0 in both.
- softcap with dropout is refused. Wrong arguments raise RuntimeError.
Beyond flash-attn: the CPU, float32 and float64, any head_dim up to 256 without padding, another head_dim of v, int64
cu_seqlens, and an LSE that is differentiable. `deterministic` changes nothing: results always have the same bits.
"""
import torch

from . import _native
from .torch import _attention, _dropout_weights
from .torch._operators import Arguments
from .torch._tensors import expect_tensor

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"]


def _side(side):
    side = -1 if side is None else int(side)
    if side >= 2**63:
        raise RuntimeError(f"window_size: expected integers of 64 bits, got {side}")
    return -1 if side < 0 else side


def _number(name, value):
    if value.__class__ is float:
        return value
    try:
        value = _attention.number(name, value)
    except ValueError as error:
        raise RuntimeError(str(error)) from None
    if value is None:
        raise RuntimeError(f"{name}: expected a number, got None")
    return value


def _int(length):
    return int(length) if isinstance(length, torch.Tensor) else length


def _unpacked(name, packed, parts, dim, meaning):
    """The tensors that one packed tensor holds."""
    _expect_tensors(**{name: packed})
    if packed.dim() != dim + 3 or packed.shape[dim] != parts:
        raise RuntimeError(f"{name}: expected shape {meaning}, got {list(packed.shape)}")
    return packed.unbind(dim)


def _window(window_size):
    """(left, right) for the operators: each an integer, -1 for no limit."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise RuntimeError(f"window_size: expected (left, right), got {window_size!r}") from None
    return _side(left), _side(right)


def _expect_tensors(**tensors):
    """Raises RuntimeError unless each is a tensor."""
    for name, tensor in tensors.items():
        try:
            expect_tensor(name, tensor)
        except ValueError as error:
            raise RuntimeError(str(error)) from None


def _run(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
         softcap, alibi_slopes, return_attn_probs):
    softcap, dropout_p = _number("softcap", softcap), _number("dropout_p", dropout_p)
    if softcap > 0 and dropout_p > 0:
        raise RuntimeError("softcap: expected 0 with dropout, as flash-attn has it, got "
                           f"softcap={softcap} and dropout_p={dropout_p}")
    left, right = _window(window_size)
    try:
        if (cu_seqlens_q is cu_seqlens_k is alibi_slopes is None and not return_attn_probs and softcap <= 0.0
                and dropout_p == 0.0):
            return _attention.run_few(q, k, v, 1 if causal else 0, False, softmax_scale, left, right)
        _attention.no_gradient("alibi_slopes", alibi_slopes)
        arguments = Arguments(q, k, v, None, alibi_slopes, cu_seqlens_q, cu_seqlens_k,
                              _attention.seed_tensor(None, dropout_p), _int(max_seqlen_q), _int(max_seqlen_k),
                              1 if causal else 0, left, right, softmax_scale, max(softcap, 0.0), dropout_p)
        result = _attention.run(arguments, return_attn_probs)
    except (ValueError, _native.DeviceUnavailable) as error:
        raise RuntimeError(str(error)) from None
    if not return_attn_probs:
        return result
    o, lse = result
    weights = _dropout_weights.signed_weights(arguments) if dropout_p > 0 else q.new_empty((0,))
    return o, torch.where(lse == float("-inf"), float("inf"), lse), weights


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """Attention of q (batch, seqlen_q, nheads, headdim) over k, v (batch, seqlen_k, nheads_k, headdim).

    nheads is a multiple of nheads_k. alibi_slopes: fp32 (nheads,) or (batch, nheads).
    Returns out (batch, seqlen_q, nheads, headdim), or with return_attn_probs (out, softmax_lse, S_dmask): softmax_lse
        fp32 (batch, nheads, seqlen_q); S_dmask is empty without dropout, else (batch, nheads, seqlen_q and seqlen_k
        rounded up to 128): the weights divided by the largest of their row, negative where dropped.
    Raises RuntimeError that names the argument."""
    return _run(q, k, v, None, None, -1, -1, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                return_attn_probs)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """flash_attn_func with k and v in one tensor kv (batch, seqlen_k, 2, nheads_k, headdim)."""
    k, v = _unpacked("kv", kv, 2, 2, "(batch, seqlen_k, 2, nheads_k, headdim)")
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                           return_attn_probs)


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """flash_attn_func with all three in one tensor qkv (batch, seqlen, 3, nheads, headdim)."""
    q, k, v = _unpacked("qkv", qkv, 3, 2, "(batch, seqlen, 3, nheads, headdim)")
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                           return_attn_probs)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           deterministic=False, return_attn_probs=False, block_table=None):
    """Attention of a ragged batch: q (total_q, nheads, headdim), k, v (total_k, nheads_k, headdim).

    cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), from 0 to the total. max_seqlen_q, max_seqlen_k: bounds.
    block_table (paged keys) is refused. Returns as flash_attn_func does, softmax_lse being (nheads, total_q)."""
    if block_table is not None:
        raise NotImplementedError("block_table: expected None, since tessera has no paged keys yet, got a tensor")
    _expect_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return _run(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                window_size, softcap, alibi_slopes, return_attn_probs)


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                                    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                                    alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """flash_attn_varlen_func with k and v in one tensor kv (total_k, 2, nheads_k, headdim)."""
    k, v = _unpacked("kv", kv, 2, 1, "(total_k, 2, nheads_k, headdim)")
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                     window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False):
    """flash_attn_varlen_func with all three in one tensor qkv (total, 3, nheads, headdim)."""
    q, k, v = _unpacked("qkv", qkv, 3, 1, "(total, 3, nheads, headdim)")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
                                  causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_with_kvcache(*arguments, **keywords):
    """Raises NotImplementedError: tessera has no cache of keys and values."""
    raise NotImplementedError("flash_attn_with_kvcache: tessera has no cache of keys and values yet")
