# SPDX-License-Identifier: Apache-2.0
"""The functions of xformers.ops.fmha on tessera: memory_efficient_attention and its classes of attn_bias.

compat.install() gives them as xformers.ops, xformers.ops.fmha and xformers.ops.fmha.attn_bias. A query that sees no key
gives 0. `op` changes nothing: tessera chooses the kernel. Dropout draws other bits than xFormers does.
"""
from __future__ import annotations

import math
from typing import Any, NamedTuple, Sequence

import torch
from torch import Tensor

from . import _xformers_masks
from ._arrays import expect
from ._xformers_masks import *  # noqa: F401, F403
from ._xformers_masks import AttentionBias, BlockDiagonalMask
from .torch import _attention, _errors, _operators, attention, varlen_attention
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


_BIASES = tuple(getattr(_xformers_masks, name) for name in _xformers_masks.__all__)


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
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[2:4] != query.shape[2:4]:
            expect(name, f"groups and heads {list(query.shape[2:4])}, as query has (expand() gives them), in dimensions 2 "
                   "and 3", list(tensor.shape))
    if key.stride(3) == 0 and value.stride(3) == 0:  # expanded: all heads of a group read one
        return query.flatten(2, 3), key[:, :, :, 0], value[:, :, :, 0]
    return tuple(t.flatten(2, 3) for t in (query, key, value))


def _tensor_bias(bias, query):
    """A tensor attn_bias as [B, H, M, N]; query: the caller's."""
    _attention.expect_tensor("attn_bias", bias)
    if bias.dtype == torch.bool:
        expect("attn_bias", "numbers that are added to the scores", "bool")
    if query.dim() == 3 and bias.dim() == 3:
        return bias.unsqueeze(1)
    if query.dim() == 5 and bias.dim() == 5:
        groups, heads = query.shape[2:4]
        if not {bias.shape[1]} <= {1, groups} or not {bias.shape[2]} <= {1, heads}:
            expect("attn_bias", f"dimensions that broadcast to the {groups} groups and {heads} heads of query",
                   list(bias.shape))
        return bias.expand(-1, groups, heads, -1, -1).flatten(1, 2)
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
    if p is None:
        expect("p", "a number", "None")
    keywords = dict(scale=scale, dropout_p=_attention.number("p", p))
    if attn_bias is None or isinstance(attn_bias, torch.Tensor):
        bias = None if attn_bias is None else _tensor_bias(attn_bias, query)
        return _Inputs(q, k, v, None, dict(keywords, bias=bias))
    if type(attn_bias) is AttentionBias or type(attn_bias) not in _BIASES:  # a subclass may hide other keys
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


# The operators' names of arguments and xFormers'.
_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_bias", "dropout_p": "p", "do": "grad", "o": "output"}


def _run(inputs, return_lse=False):
    """O [B, M, H, K], and with return_lse LSE [B, H, M]."""
    try:
        return _attend(inputs, return_lse)
    except ValueError as error:
        raise type(error)(_errors.renamed(error, _NAMES)) from None


def _attend(inputs, return_lse):
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
    for name, tensor in (("grad", grad), ("output", output), ("lse", lse)):
        _attention.expect_tensor(name, tensor)
        if name != "lse" and list(tensor.shape) != [*query.shape[:-1], value.shape[-1]]:
            expect(name, f"shape {[*query.shape[:-1], value.shape[-1]]}", list(tensor.shape))
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
        error = _attention._explained(error, saved)
        raise type(error)(_errors.renamed(error, _NAMES)) from None
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

    attn_split: tensors [B, M, H, K] or [B, M, G, H, K]; lse_split: tensors [B, H, M] or [B, G, H, M], also [B, G * H, M]
    as memory_efficient_attention_partial() gives them; or one tensor each with the parts in front. output_dtype: of
    out, default that of the parts. Raises ValueError that names the argument."""
    lse, parts = (_stacked(name, tensors) for name, tensors in (("lse_split", lse_split), ("attn_split", attn_split)))
    if parts.dim() not in (5, 6):
        expect("attn_split", "tensors [B, M, H, K] or [B, M, G, H, K]", list(parts.shape[1:]))
    count, batch, rows, *heads, _ = parts.shape
    if list(lse.shape) not in ([count, batch, *heads, rows], [count, batch, math.prod(heads), rows]):
        expect("lse_split", f"{count} tensors {[batch, *heads, rows]}, one for each of attn_split",
               f"{len(lse)} tensors {list(lse.shape[1:])}")
    total = lse.logsumexp(0)
    weights = (lse - torch.where(total == float("-inf"), 0.0, total)).exp()
    weights = weights.reshape(count, batch, *heads, rows).movedim(-1, 2).unsqueeze(-1)
    o = (parts.to(weights.dtype) * weights).sum(0).to(output_dtype or parts.dtype)
    return o, total if write_lse else None


def _stacked(name, tensors):
    """Tensors of one shape as one, the parts in front."""
    tensors = tuple(tensors)
    for tensor in tensors:
        _attention.expect_tensor(name, tensor)
    if not tensors or len({tensor.shape for tensor in tensors}) > 1:
        expect(name, "tensors of one shape", [list(tensor.shape) for tensor in tensors])
    return torch.stack(tensors)
