# SPDX-License-Identifier: Apache-2.0
"""The functions of xformers.ops.fmha on tessera: memory_efficient_attention and its classes of attn_bias.

compat.install() gives them as xformers.ops, xformers.ops.fmha and xformers.ops.fmha.attn_bias. A query that sees no key
gives 0. `op` changes nothing: tessera chooses the kernel. Dropout draws other bits than xFormers does.
"""
from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import torch
from torch import Tensor

from . import _xformers_masks
from ._arrays import expect
from ._xformers_masks import *  # noqa: F401, F403
from ._xformers_masks import AttentionBias, BlockDiagonalMask
from .torch import _attention, _operators, attention, varlen_attention
from .torch._operators import Arguments

__all__ = ["AttentionMask", "AttentionOp", "AttentionOpBase", "MemoryEfficientAttentionCkOp",
           "MemoryEfficientAttentionCutlassFwdFlashBwOp", "MemoryEfficientAttentionCutlassOp",
           "MemoryEfficientAttentionFlashAttentionOp", "MemoryEfficientAttentionSplitKCkOp",
           "memory_efficient_attention", "memory_efficient_attention_backward", "memory_efficient_attention_forward",
           "memory_efficient_attention_forward_requires_grad", "memory_efficient_attention_partial", "merge_attentions",
           "unbind"]
__all__ += _xformers_masks.__all__

AttentionMask = AttentionBias
AttentionOp = AttentionOpBase = None
MemoryEfficientAttentionCkOp = MemoryEfficientAttentionCutlassOp = MemoryEfficientAttentionFlashAttentionOp = None
MemoryEfficientAttentionCutlassFwdFlashBwOp = MemoryEfficientAttentionSplitKCkOp = None


def unbind(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """x.unbind(dim)."""
    return x.unbind(dim)


def _four_dimensions(query, key, value):
    """query, key and value [B, M, H, K] of [B, M, K], [B, M, H, K] or [B, M, G, H, K]."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _attention.expect_tensor(name, tensor)
        if tensor.dim() != query.dim() or not 3 <= tensor.dim() <= 5:
            expect(name, "as many dimensions as query has, [B, M, K], [B, M, H, K] or [B, M, G, H, K]",
                   list(tensor.shape))
    if query.dim() == 3:
        return tuple(t.unsqueeze(2) for t in (query, key, value))
    if query.dim() == 4:
        return query, key, value
    if key.stride(3) == 0 and value.stride(3) == 0:  # expanded: all heads of a group read one
        return query.flatten(2, 3), key[:, :, :, 0], value[:, :, :, 0]
    return tuple(t.flatten(2, 3) for t in (query, key, value))


def _tensor_bias(bias, query):
    """A tensor attn_bias as [B, H, M, N]; query: the caller's."""
    _attention.expect_tensor("attn_bias", bias)
    if query.dim() == 3 and bias.dim() == 3:
        return bias.unsqueeze(1)
    if query.dim() == 5 and bias.dim() == 5:
        return bias.flatten(1, 2)
    if bias.dtype == torch.bool:
        expect("attn_bias", "numbers that are added to the scores", "bool")
    if bias.dim() > 4:
        expect("attn_bias", "4 dimensions or less, or 5 with a query of 5", bias.dim())
    return bias


class _Inputs(NamedTuple):
    """A call of attention() or, with starts of sequences, of varlen_attention()."""
    query: Tensor
    key: Tensor
    value: Tensor
    starts: tuple | None  # (of queries, of keys)
    keywords: dict


def _inputs(query, key, value, attn_bias, p, scale):
    q, k, v = _four_dimensions(query, key, value)
    keywords = dict(scale=scale, dropout_p=float(p))
    if attn_bias is None or isinstance(attn_bias, torch.Tensor):
        bias = None if attn_bias is None else _tensor_bias(attn_bias, query)
        return _Inputs(q, k, v, None, dict(keywords, bias=bias))
    if not isinstance(attn_bias, AttentionBias) or type(attn_bias) is AttentionBias:
        expect("attn_bias", "None, a tensor or an AttentionBias of tessera.xformers", f"a {type(attn_bias).__name__}")
    keywords.update(causal=attn_bias._causal)
    if not isinstance(attn_bias, BlockDiagonalMask):
        bias = None if attn_bias._bias is None else _tensor_bias(attn_bias._bias, query)
        return _Inputs(q, k, v, None, dict(keywords, window=attn_bias._window(q.shape[1], k.shape[1]), bias=bias))
    total = attn_bias.q_seqinfo.seqstart_py[-1], attn_bias.k_seqinfo.seqstart_py[-1]
    for name, tensor, length in (("query", q, total[0]), ("key", k, total[1])):
        if tensor.shape[:2] != (1, length):
            expect(name, f"a batch of 1 with {length} rows, as attn_bias has", list(tensor.shape[:2]))
    one = getattr(attn_bias, "_one_window", lambda: attn_bias._window(0, 0))()
    return _Inputs(q, k, v, attn_bias._sequences(total[1]), dict(keywords, window=one))


def _run(inputs, return_lse=False):
    """O [B, M, H, K], and with return_lse LSE [B, H, M]."""
    if inputs.starts is None:
        return attention(*inputs[:3], return_lse=return_lse, **inputs.keywords)
    cu_seqlens = (torch.tensor(starts, dtype=torch.int32, device=inputs.query.device) for starts in inputs.starts)
    longest = (max((end - begin for begin, end in zip(starts, starts[1:])), default=0) for starts in inputs.starts)
    names = ("max_len_q", "max_len_kv")
    o, lse = varlen_attention(*(t.squeeze(0) for t in inputs[:3]), *cu_seqlens, **dict(zip(names, longest)),
                              return_lse=True, **inputs.keywords)
    return (o.unsqueeze(0), lse.unsqueeze(0)) if return_lse else o.unsqueeze(0)


def memory_efficient_attention(query: Tensor, key: Tensor, value: Tensor,
                               attn_bias: Tensor | AttentionBias | None = None, p: float = 0.0,
                               scale: float | None = None, *, op: Any = None,
                               output_dtype: torch.dtype | None = None) -> Tensor:
    """Attention of query [B, M, H, K] over key and value [B, N, H, ..]; also [B, M, K], and [B, M, G, H, K] for G
    groups of H heads. Differentiable in query, key, value and a tensor of attn_bias.

    attn_bias: None, a tensor that broadcasts to [B, H, M, N] and is added to the scores, or an AttentionBias.
    p: dropout. scale: default K ** -0.5. op changes nothing. output_dtype: of the result, default that of query.
    Returns [B, M, H, K of value], or with the dimensions of query. Raises ValueError that names the argument."""
    o = _run(_inputs(query, key, value, attn_bias, p, scale)).reshape(*query.shape[:-1], value.shape[-1])
    return o if output_dtype is None else o.to(output_dtype)


def _without_dropout(p):
    if p != 0:
        raise NotImplementedError("p: expected 0, since only memory_efficient_attention has dropout, got " + repr(p))


@torch.no_grad()
def memory_efficient_attention_forward(query: Tensor, key: Tensor, value: Tensor,
                                       attn_bias: Tensor | AttentionBias | None = None, p: float = 0.0,
                                       scale: float | None = None, *, op: Any = None,
                                       output_dtype: torch.dtype | None = None) -> Tensor:
    """memory_efficient_attention without a gradient: query [B, M, H, K], key and value [B, N, H, ..], or the other
    shapes and the attn_bias that it takes. Returns [B, M, H, K of value]."""
    return memory_efficient_attention(query, key, value, attn_bias, p, scale, output_dtype=output_dtype)


@torch.no_grad()
def memory_efficient_attention_forward_requires_grad(query: Tensor, key: Tensor, value: Tensor,
                                                     attn_bias: Tensor | AttentionBias | None = None, p: float = 0.0,
                                                     scale: float | None = None, *, op: Any = None,
                                                     output_dtype: torch.dtype | None = None
                                                     ) -> tuple[Tensor, Tensor]:
    """(out [B, M, H, K of value], LSE float32 [B, H, M]) without a gradient, for memory_efficient_attention_backward(),
    of query [B, M, H, K], key and value [B, N, H, ..]: what memory_efficient_attention_partial() returns."""
    return memory_efficient_attention_partial(query, key, value, attn_bias, p, scale, output_dtype=output_dtype)


def memory_efficient_attention_backward(grad: Tensor, output: Tensor, lse: Tensor, query: Tensor, key: Tensor,
                                        value: Tensor, attn_bias: Tensor | AttentionBias | None = None,
                                        p: float = 0.0, scale: float | None = None, *, op: Any = None
                                        ) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), of the shapes of query [B, M, H, K], key and value [B, N, H, ..]. grad, output: [B, M, H, K of
    value]; lse: float32 [B, H, M]; output and lse are those of memory_efficient_attention_forward_requires_grad()."""
    _without_dropout(p)
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    with torch.enable_grad():
        inputs = _inputs(*leaves, attn_bias, p, scale)
    q, k, v = (t.detach() for t in inputs[:3])
    given, starts = inputs.keywords, inputs.starts
    bias = given.get("bias")
    rows = q.shape if starts is None else q.shape[1:]
    left, right = _attention.window_sides(given.get("window"))
    saved = Arguments(*(t if starts is None else t.squeeze(0) for t in (q, k, v)),
                      None if bias is None else bias.detach()[(None,) * (4 - bias.dim())], None,
                      *(None if starts is None else torch.tensor(s, dtype=torch.int32, device=q.device)
                        for s in starts or (None, None)), window_left=left, window_right=right,
                      causal=_attention.causal_number(given.get("causal")), scale=scale)
    d_o, o = (t.detach().reshape(*rows[:-1], v.shape[-1]) for t in (grad, output))
    try:
        found = _operators.gradients(_operators.backward, (*saved[:8], o, lse if starts is None else lse.squeeze(0)),
                                     saved[8:], d_o, None, False)[:3]
    except RuntimeError as error:
        raise _attention._explained(error, saved) from None
    found = [g.reshape(t.shape) for g, t in zip(found, inputs[:3])]
    return torch.autograd.grad(inputs[:3], leaves, found)


def memory_efficient_attention_partial(query: Tensor, key: Tensor, value: Tensor,
                                       attn_bias: Tensor | AttentionBias | None = None, p: float = 0.0,
                                       scale: float | None = None, *, op: Any = None,
                                       output_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """(out, LSE float32 [B, H, M]) over some of the keys, for merge_attentions(). Both are differentiable. H is the
    product of both with 5 dimensions, and B is 1 for a ragged batch."""
    _without_dropout(p)
    o, lse = _run(_inputs(query, key, value, attn_bias, p, scale), True)
    o = o.reshape(*query.shape[:-1], value.shape[-1])
    return o if output_dtype is None else o.to(output_dtype), lse


def merge_attentions(attn_split: Tensor | Sequence[Tensor], lse_split: Tensor | Sequence[Tensor],
                     write_lse: bool = True, output_dtype: torch.dtype | None = None
                     ) -> tuple[Tensor, Tensor | None]:
    """(out, LSE or None) over all keys, from those over parts of the keys.

    attn_split: tensors [B, M, H, K]; lse_split: tensors [B, H, M]; or one tensor each with the parts in front."""
    lse = torch.stack(tuple(lse_split))
    total = lse.logsumexp(0)
    weights = (lse - torch.where(total == float("-inf"), 0.0, total)).exp().transpose(2, 3).unsqueeze(-1)
    parts = torch.stack(tuple(attn_split))
    o = (parts.to(weights.dtype) * weights).sum(0).to(output_dtype or parts.dtype)
    return o, total if write_lse else None
