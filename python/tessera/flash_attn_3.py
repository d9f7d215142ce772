# SPDX-License-Identifier: Apache-2.0
"""The functions of FlashAttention-3's module flash_attn_interface on tessera, with its names, order and return values.

The LSE of a query that sees no key is -inf, as in FlashAttention-3 (2.8: +inf). qv, the descale factors of fp8 and
attention_chunk raise NotImplementedError. num_splits, pack_gqa, sm_margin, scheduler_metadata and deterministic change
nothing: they choose between ways to the same result.
"""
from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _flash_arguments as _arguments, _kvcache, _native
from ._offsets import used_members
from .flash_attn import _scores_of_cache
from .torch import _attention, _errors, _sinks
from .torch._operators import Arguments

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_with_kvcache", "get_scheduler_metadata"]


def _refuse(**arguments):
    for name, value in arguments.items():
        if value is not None and not (name == "attention_chunk" and value == 0):
            raise NotImplementedError(f"{name}: expected None, since tessera does not have this feature, got "
                                      f"{type(value).__name__}")


def _run(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap,
         return_attn_probs, learnable_sink=None):
    left, right = _arguments.window(window_size)
    softcap = max(_arguments.number("softcap", softcap), 0.0)
    try:
        if cu_seqlens_q is cu_seqlens_k is None and not return_attn_probs and softcap == 0.0:
            return _attention.run_few(q, k, v, 1 if causal else 0, False, softmax_scale, left, right)
        return _sinks.run(Arguments(q, k, v, None, None, cu_seqlens_q, cu_seqlens_k, None,
                                    _arguments.bound("max_seqlen_q", max_seqlen_q),
                                    _arguments.bound("max_seqlen_k", max_seqlen_k), 1 if causal else 0, left, right, softmax_scale, softcap),
                          learnable_sink, return_attn_probs, name="learnable_sink")
    except (ValueError, _native.DeviceUnavailable) as error:
        raise RuntimeError(_errors.renamed(error, _arguments.NAMES)) from None


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
                    qv: None = None, q_descale: None = None, k_descale: None = None, v_descale: None = None,
                    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
                    sm_margin: int = 0, return_attn_probs: bool = False) -> Any:
    """Attention of q (batch, seqlen_q, nheads, headdim) over k (batch, seqlen_k, nheads_k, headdim), v (.., headdim_v).

    A tensor (batch, nheads, seqlen, headdim) often fits these shapes too, but then the heads of each token attend to
    one another: transpose(1, 2) puts seqlen first, and tessera.torch.attention has layout="bhsd" for it.
    causal is bottom-right. Returns out, or with return_attn_probs (out, softmax_lse), fp32 (batch, nheads, seqlen_q).
    Raises RuntimeError that names the argument, NotImplementedError for what the module's text lists."""
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    return _run(q, k, v, None, None, None, None, softmax_scale, causal, window_size, softcap, return_attn_probs)


def _split_heads(qkv, num_heads_q):
    """q, k and v of one tensor (batch, seqlen, num_heads_q + 2 * nheads_k, headdim)."""
    if qkv.dim() != 4:
        raise RuntimeError("qkv: expected shape (batch, seqlen, num_heads_q + 2 * nheads_k, headdim) with num_heads_q, "
                           f"got {list(qkv.shape)}")
    heads_q = _attention._integer(num_heads_q)
    heads_k = None if heads_q is None else (qkv.shape[2] - heads_q) // 2
    if heads_k is None or heads_q < 0 or heads_k < 0 or heads_q + 2 * heads_k != qkv.shape[2]:
        raise RuntimeError(f"num_heads_q: expected a number from 0 to {qkv.shape[2]}, the heads of qkv, that leaves an "
                           f"even number of heads for k and v, got {num_heads_q!r}")
    return qkv.split([heads_q, heads_k, heads_k], dim=2)


def flash_attn_qkvpacked_func(qkv: Tensor, softmax_scale: float | None = None, causal: bool = False,
                              q_descale: None = None, k_descale: None = None, v_descale: None = None,
                              window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                              deterministic: bool = False, num_heads_q: int | None = None, sm_margin: int = 0,
                              return_attn_probs: bool = False) -> Any:
    """flash_attn_func of one tensor: qkv (batch, seqlen, 3, nheads, headdim), or, with num_heads_q,
    (batch, seqlen, num_heads_q + 2 * nheads_k, headdim)."""
    _arguments.expect_tensors(qkv=qkv)
    if num_heads_q is None:
        q, k, v = _arguments.unpacked("qkv", qkv, 3, 2, "(batch, seqlen, 3, nheads, headdim), or num_heads_q")
    else:
        q, k, v = _split_heads(qkv, num_heads_q)
    return flash_attn_func(q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
                           attention_chunk, softcap, return_attn_probs=return_attn_probs)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                           max_seqlen_q: int, max_seqlen_k: int, seqused_q: Tensor | None = None,
                           seqused_k: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
                           qv: None = None, q_descale: None = None, k_descale: None = None, v_descale: None = None,
                           window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                           num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
                           sm_margin: int = 0, return_attn_probs: bool = False) -> Any:
    """flash_attn_func of a ragged batch: q (total_q, nheads, headdim), k, v (total_k, nheads_k, ..), cu_seqlens int32
    (batch + 1,) from 0 to the total; softmax_lse is (nheads, total_q). seqused_q, seqused_k: int32 (batch,), the number
    of rows of each sequence that are in use. Output and gradients of the other rows are 0 (FlashAttention-3 does not
    write them)."""
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    return _run_ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
                       softmax_scale, causal, window_size, softcap, return_attn_probs)


def _run_ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, *scores):
    """_run() of a ragged batch of which seqused rows are in use. scores: the arguments of _run() after the lengths."""
    _arguments.expect_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if seqused_q is not None or seqused_k is not None:
        _arguments.expect_tensors(**{name: used for name, used in (("seqused_q", seqused_q), ("seqused_k", seqused_k))
                           if used is not None})
        cu_seqlens_q, cu_seqlens_k = used_members(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    return _run(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *scores)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None,
                            v: Tensor | None = None, qv: None = None, rotary_cos: Tensor | None = None,
                            rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
                            cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None,
                            page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
                            cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | None = None,
                            rotary_seqlens: Tensor | None = None, q_descale: None = None, k_descale: None = None,
                            v_descale: None = None, softmax_scale: float | None = None, causal: bool = False,
                            window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                            rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None, num_splits: int = 0,
                            pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False,
                            s_aux: Tensor | None = None) -> Any:
    """2.8's flash_attn_with_kvcache, with page_table as the name of the table, and ragged queries and new rows.

    cu_seqlens_q: int32 (batch + 1,); then q is (total_q, nheads, headdim), rows past the last offset get output 0,
        and softmax_lse is (nheads, total_q). cu_seqlens_k_new: the same of k and v, (total_k_new, nheads_k, headdim).
    rotary_seqlens: int32 (batch,), the position of the first new row in place of cache_seqlens.
    With a page_table, cache_batch_idx names the row of the table of each sequence.
    max_seqlen_q: the most queries of a sequence; CUDA takes it as a bound. scheduler_metadata changes nothing."""
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    _arguments.expect_tensors(q=q)
    try:
        batch = len(q) if cu_seqlens_q is None else len(_kvcache.offsets("cu_seqlens_q", cu_seqlens_q)) - 1
        cache = _kvcache.Cache(k_cache, v_cache, batch, cache_seqlens, page_table, cache_batch_idx, cache_leftpad,
                               ("k_cache", "v_cache", "page_table", "cache_seqlens"))
        result = _kvcache.with_kvcache(q, cache, k, v, rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens,
                                       cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q,
                                       **_scores_of_cache(softmax_scale, causal, window_size, softcap, None, s_aux))
    except ValueError as error:
        raise RuntimeError(str(error)) from None
    return result if return_softmax_lse else result[0]


def flash_attn_combine(*arguments: Any, **keywords: Any) -> NoReturn:
    """Raises NotImplementedError: tessera gives no partial results to combine."""
    raise NotImplementedError("flash_attn_combine: tessera gives no partial results to combine")


def get_scheduler_metadata(batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int,
                           headdim: int, cache_seqlens: Tensor, qkv_dtype: torch.dtype = torch.bfloat16,
                           headdim_v: int | None = None, cu_seqlens_q: Tensor | None = None,
                           cu_seqlens_k_new: Tensor | None = None, cache_leftpad: Tensor | None = None,
                           page_size: int | None = None, max_seqlen_k_new: int = 0, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
                           has_softcap: bool = False, num_splits: int = 0, pack_gqa: bool | None = None,
                           sm_margin: int = 0) -> Tensor:
    """An empty int32 tensor on the device of cache_seqlens, for scheduler_metadata: tessera's calls need no plan that
    is made beforehand. All other arguments change nothing."""
    _arguments.expect_tensors(cache_seqlens=cache_seqlens)
    return cache_seqlens.new_empty(0, dtype=torch.int32)
