# SPDX-License-Identifier: Apache-2.0
"""The functions of flash_attn.cute (FlashAttention-4) on tessera, with its names, order and return values.

Both return (out, lse); lse is float32 (batch, nheads, seqlen_q) or (nheads, total_q), -inf for a query that sees no
key. window_size: (left, right), None for no limit. num_splits, pack_gqa and deterministic change nothing: they choose
between ways to the same result. return_lse changes nothing, since lse is always there.
"""
from __future__ import annotations

from torch import Tensor

from . import flash_attn_3
from .flash_attn_3 import _refuse

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func"]

flash_attn_combine = flash_attn_3.flash_attn_combine


def _sides(window_size):
    """window_size with -1 for no limit."""
    try:
        return tuple(-1 if side is None else side for side in window_size)
    except TypeError:
        return window_size  # refused by the call, which names it


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
                    window_size: tuple[int | None, int | None] = (None, None), learnable_sink: Tensor | None = None,
                    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
                    deterministic: bool = False, score_mod: None = None, mask_mod: None = None,
                    block_sparse_tensors: None = None, aux_tensors: None = None, return_lse: bool = False
                    ) -> tuple[Tensor, Tensor]:
    """Attention of q (batch, seqlen_q, nheads, headdim) over k, v (batch, seqlen_k, nheads_k, ..): (out, lse).

    A tensor (batch, nheads, seqlen, headdim) often fits these shapes too, but then the heads of each token attend to
    one another: transpose(1, 2) puts seqlen first, and tessera.torch.attention has layout="bhsd" for it.
    causal is bottom-right. learnable_sink: (nheads,), as the sinks of tessera.torch.attention. score_mod, mask_mod,
    block_sparse_tensors and aux_tensors raise NotImplementedError."""
    _refuse(score_mod=score_mod, mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors,
            aux_tensors=aux_tensors)
    return flash_attn_3._run(q, k, v, None, None, None, None, softmax_scale, causal, _sides(window_size), softcap or 0.0,
                             True, learnable_sink)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None,
                           cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
                           max_seqlen_k: int | None = None, seqused_q: Tensor | None = None,
                           seqused_k: Tensor | None = None, page_table: None = None,
                           softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int | None, int | None] = (None, None),
                           learnable_sink: Tensor | None = None,
                           softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
                           deterministic: bool = False, score_mod: None = None, aux_tensors: None = None,
                           return_lse: bool = False) -> tuple[Tensor, Tensor]:
    """flash_attn_func of a ragged batch: q (total_q, nheads, headdim), k, v (total_k, nheads_k, ..), cu_seqlens int32
    (batch + 1,), seqused (batch,) as in tessera.flash_attn_3: (out, lse). page_table raises NotImplementedError too."""
    _refuse(page_table=page_table, score_mod=score_mod, aux_tensors=aux_tensors)
    return flash_attn_3._run_ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
                                    softmax_scale, causal, _sides(window_size), softcap or 0.0, True, learnable_sink)
