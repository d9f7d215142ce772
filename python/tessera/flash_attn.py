# SPDX-License-Identifier: Apache-2.0
"""The functions of flash_attn 2.8 on tessera, with flash-attn's names, order of arguments, defaults and return values.

This module has flash-attn's meaning of an argument or result that tessera defines otherwise:
- causal is bottom-right; a window side of -1 (any negative number) is no limit; softcap <= 0 is none.
- The LSE of a query that sees no key is +inf (tessera: -inf). Its output is 0 in both.
- softcap with dropout is refused. Wrong arguments raise RuntimeError.
Beyond flash-attn: the CPU, float32 and float64, any head_dim up to 256 without padding, another head_dim of v, int64
cu_seqlens, and an LSE that is differentiable. `deterministic` changes nothing: results always have the same bits.

The functions with a leading underscore are one pass each, without autograd, as code for context parallelism calls them.
"""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _flash_arguments as _arguments, _kvcache, _native
from ._offsets import up_to_the_last_offset, used_members
from .torch import _attention, _dropout_weights, _errors, _operators, _sinks
from .torch._operators import Arguments

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"]


def _run(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
         softcap, alibi_slopes, return_attn_probs, s_aux=None):
    softcap, dropout_p = _arguments.number("softcap", softcap), _arguments.number("dropout_p", dropout_p)
    if softcap > 0 and dropout_p > 0:
        raise RuntimeError("softcap: expected 0 with dropout, as flash-attn has it, got "
                           f"softcap={softcap} and dropout_p={dropout_p}")
    left, right = _arguments.window(window_size)
    try:
        if (cu_seqlens_q is cu_seqlens_k is alibi_slopes is s_aux is None and not return_attn_probs and softcap <= 0.0
                and dropout_p == 0.0):
            return _attention.run_few(q, k, v, 1 if causal else 0, False, softmax_scale, left, right)
        _attention.no_gradient("alibi_slopes", alibi_slopes)
        arguments = Arguments(q, k, v, None, alibi_slopes, cu_seqlens_q, cu_seqlens_k,
                              _attention.seed_tensor(None, dropout_p), _arguments.bound("max_seqlen_q", max_seqlen_q),
                              _arguments.bound("max_seqlen_k", max_seqlen_k), 1 if causal else 0, left, right, softmax_scale,
                              max(softcap, 0.0), dropout_p)
        result = _sinks.run(arguments, s_aux, return_attn_probs, name="s_aux")
    except (ValueError, _native.DeviceUnavailable) as error:
        raise RuntimeError(_errors.renamed(error, _arguments.NAMES)) from None
    if not return_attn_probs:
        return result
    o, lse = result
    weights = _dropout_weights.signed_weights(arguments) if dropout_p > 0 else q.new_empty((0,))
    return o, torch.where(lse == float("-inf"), float("inf"), lse), weights


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False
                    ) -> Any:
    """Attention of q (batch, seqlen_q, nheads, headdim) over k, v (batch, seqlen_k, nheads_k, headdim).

    nheads is a multiple of nheads_k. A tensor (batch, nheads, seqlen, headdim) often fits these shapes too, but then the
        heads of each token attend to one another: transpose(1, 2) puts seqlen first, and tessera.torch.attention has
        layout="bhsd" for it. alibi_slopes: fp32 (nheads,) or (batch, nheads).
    Returns out (batch, seqlen_q, nheads, headdim), or with return_attn_probs (out, softmax_lse, S_dmask): softmax_lse
        fp32 (batch, nheads, seqlen_q); S_dmask is empty without dropout, else (batch, nheads, seqlen_q and seqlen_k
        rounded up to 128): the weights divided by the largest of their row, negative where dropped.
    Raises RuntimeError that names the argument."""
    return _run(q, k, v, None, None, None, None, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                return_attn_probs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                             causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                             alibi_slopes: Tensor | None = None, deterministic: bool = False,
                             return_attn_probs: bool = False) -> Any:
    """flash_attn_func with k and v in one tensor kv (batch, seqlen_k, 2, nheads_k, headdim); seqlen comes before nheads
    in both."""
    k, v = _arguments.unpacked("kv", kv, 2, 2, "(batch, seqlen_k, 2, nheads_k, headdim)")
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                           return_attn_probs)


def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                              causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                              alibi_slopes: Tensor | None = None, deterministic: bool = False,
                              return_attn_probs: bool = False) -> Any:
    """flash_attn_func with all three in one tensor qkv (batch, seqlen, 3, nheads, headdim); seqlen comes before
    nheads."""
    q, k, v = _arguments.unpacked("qkv", qkv, 3, 2, "(batch, seqlen, 3, nheads, headdim)")
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                           return_attn_probs)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                           max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                           alibi_slopes: Tensor | None = None, deterministic: bool = False,
                           return_attn_probs: bool = False, block_table: Tensor | None = None,
                           seqused_k: Tensor | None = None, s_aux: Tensor | None = None, out: Tensor | None = None,
                           num_splits: int = 1) -> Any:
    """Attention of a ragged batch: q (total_q, nheads, headdim), k, v (total_k, nheads_k, headdim).

    cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), from 0 to the total. On the CPU rows past the last offset belong
        to no sequence: they are not read, and their output is 0. max_seqlen_q, max_seqlen_k: bounds.
    block_table: int32 (batch, pages of a sequence); k and v are then pages (pages, page_size, nheads_k, headdim) in
        place, the lengths are those of cu_seqlens_k, or seqused_k, and there is neither dropout nor a gradient. The
        environment variable TESSERA_PROMPT_KERNEL names the kernel from max_seqlen_q 64 on (docs/python.md).
    Beyond flash-attn 2.8, as vLLM's fork has them: seqused_k, int32 (batch,), the keys of each sequence that are in
        use. s_aux: (nheads,), sinks: logits that take part in the softmax as keys without a value. out: a tensor of the
        output's shape and dtype that gets it and is returned in its place, without a gradient. num_splits changes
        nothing.
    Returns as flash_attn_func does, softmax_lse being (nheads, total_q)."""
    if block_table is not None:
        result = _run_on_pages(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_k, dropout_p, block_table,
                               return_attn_probs, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
                               softcap=softcap, alibi_slopes=alibi_slopes, s_aux=s_aux)
        return _written(out, result)
    _arguments.expect_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    rows, (k, v) = len(q), up_to_the_last_offset((k, v), cu_seqlens_k)
    q, = up_to_the_last_offset((q,), cu_seqlens_q)
    if seqused_k is not None:
        _arguments.expect_tensors(seqused_k=seqused_k)
        cu_seqlens_q, cu_seqlens_k = used_members(cu_seqlens_q, cu_seqlens_k, None, seqused_k)
    result = _run(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                  window_size, softcap, alibi_slopes, return_attn_probs, s_aux)
    if len(q) < rows:
        result = _padded(result, rows - len(q))
    return _written(out, result)


def _padded(result, rows):
    """The result, followed by so many rows that belong to no sequence."""
    if isinstance(result, Tensor):
        return F.pad(result, (0, 0, 0, 0, 0, rows))
    o, lse, weights = result
    return F.pad(o, (0, 0, 0, 0, 0, rows)), F.pad(lse, (0, rows), value=float("inf")), weights


def _written(out, result):
    """The result, its first tensor in `out` if that is given."""
    if out is None:
        return result
    _arguments.expect_tensors(out=out)
    o = result if isinstance(result, Tensor) else result[0]
    if out.shape != o.shape or out.dtype != o.dtype or out.device != o.device:
        raise RuntimeError(f"out: expected {list(o.shape)}, {str(o.dtype).removeprefix('torch.')} on {o.device}, got "
                           f"{list(out.shape)}, {str(out.dtype).removeprefix('torch.')} on {out.device}")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride())):
        raise RuntimeError(f"out: expected elements that are all distinct, got strides {list(out.stride())}")
    if o.requires_grad or out.requires_grad:
        raise RuntimeError("out: expected a call without gradients, since a result that is written elsewhere has none, "
                           "got tensors with requires_grad; torch.no_grad() does without")
    out.copy_(o)
    return out if isinstance(result, Tensor) else (out, *result[1:])


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                                    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                                    softmax_scale: float | None = None, causal: bool = False,
                                    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                    alibi_slopes: Tensor | None = None, deterministic: bool = False,
                                    return_attn_probs: bool = False) -> Any:
    """flash_attn_varlen_func with k and v in one tensor kv (total_k, 2, nheads_k, headdim)."""
    k, v = _arguments.unpacked("kv", kv, 2, 1, "(total_k, 2, nheads_k, headdim)")
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
                                     softmax_scale: float | None = None, causal: bool = False,
                                     window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                     alibi_slopes: Tensor | None = None, deterministic: bool = False,
                                     return_attn_probs: bool = False) -> Any:
    """flash_attn_varlen_func with all three in one tensor qkv (total, 3, nheads, headdim)."""
    q, k, v = _arguments.unpacked("qkv", qkv, 3, 1, "(total, 3, nheads, headdim)")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
                                  causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def _scores_of_cache(softmax_scale, causal, window_size, softcap, alibi_slopes=None, s_aux=None):
    """The keywords of Cache.attend()."""
    if s_aux is not None:
        _arguments.expect_tensors(s_aux=s_aux)
        if not s_aux.is_floating_point():
            raise RuntimeError(f"s_aux: expected a floating dtype, got {str(s_aux.dtype).removeprefix('torch.')}")
        s_aux = s_aux.float()  # servers keep them in the dtype of the model
    return dict(scale=None if softmax_scale is None else _arguments.number("softmax_scale", softmax_scale),
                causal=bool(causal),
                window=_arguments.window(window_size), softcap=max(_arguments.number("softcap", softcap), 0.0),
                tensors=(("alibi_slopes", "alibi", alibi_slopes), ("sinks", "sinks", s_aux)))


def _run_on_pages(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_k, dropout_p, block_table,
                  return_attn_probs, **scores):
    if _arguments.number("dropout_p", dropout_p) != 0:
        raise NotImplementedError(f"dropout_p: expected 0 with block_table, got {dropout_p}")
    _arguments.expect_tensors(q=q, cu_seqlens_q=cu_seqlens_q)
    if seqused_k is None:
        _arguments.expect_tensors(cu_seqlens_k=cu_seqlens_k)
    try:
        batch = len(_kvcache.offsets("cu_seqlens_q", cu_seqlens_q)) - 1
        seqused_k = _kvcache.offsets("cu_seqlens_k", cu_seqlens_k, batch).diff() if seqused_k is None else seqused_k
        cache = _kvcache.Cache(k, v, batch, seqused_k, block_table,
                               names=("k", "v", "block_table", "seqused_k"))
        o, lse = cache.attend(q, cu_seqlens_q, max_seqlen_q=max_seqlen_q, **_scores_of_cache(**scores))
    except ValueError as error:
        raise RuntimeError(str(error)) from None
    if not return_attn_probs:
        return o
    return o, torch.where(lse == float("-inf"), float("inf"), lse), q.new_empty((0,))


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None,
                            v: Tensor | None = None, rotary_cos: Tensor | None = None,
                            rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
                            cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None,
                            block_table: Tensor | None = None, softmax_scale: float | None = None,
                            causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                            rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
                            return_softmax_lse: bool = False, s_aux: Tensor | None = None) -> Any:
    """Attention of q (batch, seqlen_q, nheads, headdim) over a cache, without a gradient.

    A cache or q with nheads before seqlen often fits too, and means something else: transpose(1, 2) is its view.
    k_cache, v_cache: (slots, capacity, nheads_k, headdim) of any strides; with block_table, int32 (batch, pages of a
        sequence), (pages, page_size, nheads_k, headdim) of any page_size. They may share memory.
    k, v: new rows (batch, seqlen_new, nheads_k, headdim), written into the cache at cache_seqlens before attention
        reads it. A row at a negative position, past the capacity or on no page is not written.
    rotary_cos, rotary_sin: (positions, rotary_dim / 2), with k alone: new keys are rotated by their position, queries
        by cache_seqlens plus their index with causal or a window, and by cache_seqlens without.
    cache_seqlens: the keys in the cache, an integer or int32 (batch,); None: all. Entries of block_table past the
        length may be anything, and a sequence without keys gets output 0. cache_batch_idx: int32 (batch,), the slot of
        each sequence. cache_leftpad: int32 (batch,), the first row that counts.
    s_aux, beyond flash-attn 2.8: (nheads,), sinks. num_splits changes nothing. On CUDA nothing is read on the host.
    The environment variable TESSERA_PROMPT_KERNEL names the kernel of calls with 64 queries and more (docs/python.md).
    Returns out, or with return_softmax_lse (out, softmax_lse), fp32 (batch, nheads, seqlen_q). Raises RuntimeError that
    names the argument."""
    _arguments.expect_tensors(q=q)
    try:
        cache = _kvcache.Cache(k_cache, v_cache, len(q), cache_seqlens, block_table, cache_batch_idx, cache_leftpad)
        o, lse = _kvcache.with_kvcache(q, cache, k, v, rotary_cos, rotary_sin, rotary_interleaved,
                                       **_scores_of_cache(softmax_scale, causal, window_size, softcap, alibi_slopes,
                                                          s_aux))
    except ValueError as error:
        raise RuntimeError(str(error)) from None
    return (o, torch.where(lse == float("-inf"), float("inf"), lse)) if return_softmax_lse else o


def _pass_arguments(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                    window_size_left, window_size_right, softcap, alibi_slopes, seed):
    """The operators' Arguments of one pass. seed: a tensor, or None without dropout."""
    softcap, dropout_p = _arguments.number("softcap", softcap), _arguments.number("dropout_p", dropout_p)
    return Arguments(q, k, v, None, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seed if dropout_p > 0 else None,
                     _arguments.bound("max_seqlen_q", max_seqlen_q), _arguments.bound("max_seqlen_k", max_seqlen_k),
                     1 if causal else 0, _arguments.side(window_size_left), _arguments.side(window_size_right),
                     softmax_scale, max(softcap, 0.0), dropout_p)


def _refuse_pages(**arguments):
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name}: expected None, since a single pass reads no cache of keys "
                                      "(flash_attn_with_kvcache does), got a tensor")


@torch.no_grad()
def _forward_pass(return_softmax, *settings):
    seed = _attention.seed_tensor(None, settings[7])
    arguments = _pass_arguments(*settings, seed)
    try:
        o, lse = _attention.run(arguments)
    except (ValueError, _native.DeviceUnavailable) as error:
        raise RuntimeError(_errors.renamed(error, _arguments.NAMES)) from None
    weights = _dropout_weights.signed_weights(arguments) if return_softmax and seed is not None else None
    return o, torch.where(lse == float("-inf"), float("inf"), lse), weights, seed


@torch.no_grad()
def _backward_pass(dout, out, softmax_lse, gradients, rng_state, *settings):
    """Writes dq, dk and dv into `gradients`, (name, tensor) each, and returns softmax_d."""
    if settings[7] > 0 and rng_state is None:
        raise RuntimeError("rng_state: expected the one that the forward returned, since there is dropout, got None")
    _arguments.expect_tensors(dout=dout, out=out, softmax_lse=softmax_lse, **dict(gradients))
    for (name, gradient), of in zip(gradients, settings):
        if isinstance(of, Tensor) and gradient.shape != of.shape:
            raise RuntimeError(f"{name}: expected shape {list(of.shape)}, got {list(gradient.shape)}")
    arguments = _pass_arguments(*settings, rng_state)
    lse = torch.where(softmax_lse == float("inf"), float("-inf"), softmax_lse)
    try:
        _attention.expect_arguments(arguments)
        found = _operators.gradients(_operators.backward, (*arguments[:_operators.TENSORS], out, lse),
                                     arguments[_operators.TENSORS:], dout, None, False)
    except RuntimeError as error:
        raise RuntimeError(_errors.renamed(_attention._explained(error, arguments), _arguments.NAMES)) from None
    for (_, gradient), value in zip(gradients, found):
        gradient.copy_(value)
    delta = (dout.float() * out.float()).sum(-1)
    return delta.transpose(-1, -2)


def _flash_attn_forward(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
                        window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
                        return_softmax: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The forward of flash_attn_func, without autograd, of tensors of its shapes. Returns (out, softmax_lse, S_dmask,
    rng_state): S_dmask is None unless asked for with dropout, and rng_state is tessera's seed, int64 (1,) in host
    memory, None without dropout."""
    return _forward_pass(return_softmax, q, k, v, None, None, None, None, dropout_p, softmax_scale, causal,
                         window_size_left, window_size_right, softcap, alibi_slopes)


def _flash_attn_varlen_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                               max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float | None,
                               causal: bool, window_size_left: int = -1, window_size_right: int = -1,
                               softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
                               block_table: None = None, leftpad_k: None = None, seqused_k: None = None,
                               zero_tensors: bool = False
                               ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The forward of flash_attn_varlen_func, without autograd; returns as _flash_attn_forward does. zero_tensors
    changes nothing. block_table, leftpad_k and seqused_k are refused."""
    _refuse_pages(block_table=block_table, leftpad_k=leftpad_k, seqused_k=seqused_k)
    _arguments.expect_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return _forward_pass(return_softmax, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                         softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)


def _flash_attn_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor,
                         dk: Tensor, dv: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
                         window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
                         deterministic: bool, rng_state: Tensor | None = None) -> Tensor:
    """The backward of flash_attn_func: writes dq, dk and dv, and returns softmax_d, fp32 (batch, nheads, seqlen_q): the
    sums of dout * out over headdim. softmax_lse may be that of more keys than k, as context parallelism has it.
    deterministic changes nothing."""
    return _backward_pass(dout, out, softmax_lse, (("dq", dq), ("dk", dk), ("dv", dv)), rng_state, q, k, v, None, None,
                          None, None, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
                          alibi_slopes)


def _flash_attn_varlen_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
                                dq: Tensor, dk: Tensor, dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                                max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float | None,
                                causal: bool, window_size_left: int, window_size_right: int, softcap: float,
                                alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
                                zero_tensors: bool = False) -> Tensor:
    """_flash_attn_backward of a ragged batch; softmax_lse and softmax_d are (nheads, total_q). deterministic and
    zero_tensors change nothing."""
    _arguments.expect_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return _backward_pass(dout, out, softmax_lse, (("dq", dq), ("dk", dk), ("dv", dv)), rng_state, q, k, v,
                          cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                          window_size_left, window_size_right, softcap, alibi_slopes)
