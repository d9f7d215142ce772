# SPDX-License-Identifier: Apache-2.0
"""torch.nn.functional.scaled_dot_product_attention: its arguments and its meaning, by tessera."""
from __future__ import annotations

import torch
from torch import Tensor

from . import _attention, _broadcast, _masks
from ._operators import Arguments
from ._tensors import CausalBias, alignment_of, expect_tensor, under_autocast

_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_mask"}
_NONE, _TOP_LEFT = 0, 2


def bias_of(mask, q_shape, len_kv, dtype, name="attn_mask"):
    """The additive bias of 4 dimensions for torch's attn_mask: bool (True: the key takes part) or numbers to add. A
    mask of fewer dimensions gets dimensions of 1 in front. A bool mask that repeats elements (stride 0) gives a bias
    with a dimension of 1 there. None for None."""
    if mask is None:
        return None
    batch, heads, len_q = q_shape[0], q_shape[1], q_shape[2]
    full = (batch, heads, len_q, len_kv)
    fits = mask.dim() <= 4 and all(size in (1, expected) for size, expected in zip(mask.shape[::-1], full[::-1]))
    if not fits:
        raise ValueError(f"{name}: expected a shape that broadcasts to {list(full)}, got {list(mask.shape)}")
    if mask.dtype == torch.bool:
        mask = _masks.as_bias(mask, dtype)
    elif mask.dtype not in (dtype, torch.float32):
        raise ValueError(f"{name}: expected bool, float32 or the dtype of query, {dtype}, got {mask.dtype}")
    return mask[(None,) * (4 - mask.dim())]


def _mask_of(mask, leading, len_q, len_kv):
    """torch's attn_mask with at most 4 dimensions, [batch, heads, len_q, len_kv] or what broadcasts to that; leading:
    the dimensions of the result before len_q. Raises ValueError naming it."""
    expect_tensor("attn_mask", mask)
    full = (*(1,) * (2 - len(leading)), *leading, len_q, len_kv)
    if not 2 <= mask.dim() <= len(full) or any(size not in (1, wanted)
                                               for size, wanted in zip(mask.shape[::-1], full[::-1])):
        raise ValueError(f"attn_mask: expected a shape of 2 dimensions or more that broadcasts to {list(full)}, got "
                         f"{list(mask.shape)}")
    if len(leading) > 2 and mask.dim() > 3:
        return mask.expand(*leading[:-1], *mask.shape[-3:]).flatten(0, -4)
    return mask


def zeros_for_full_dropout(q, k, v, bias):
    """O [batch, heads, len_q, head_dim_v] for dropout_p = 1, which keeps no weight: 0, with gradients of 0."""
    sums = [t.sum() for t in (q, k, v, bias) if t is not None]
    o = q.new_zeros(*q.shape[:-1], v.shape[-1])
    return torch.where(torch.zeros_like(o, dtype=torch.bool), sum(sums).to(o.dtype), o)


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                                 dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
                                 enable_gqa: bool = False, *, math: bool = False) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention: the same arguments, the same meaning.

    query: [..., heads, len_q, head_dim]; key, value: [..., heads, len_kv, ..]. All dimensions before the last two
        broadcast; with enable_gqa the heads of key and of value each divide those of query instead. is_causal is
        TOP-LEFT: query i sees the keys 0 .. i, whatever the lengths are (attention() has both alignments). dropout_p
        holds in eval() too.
    attn_mask: bool, True where the key takes part, or numbers that are added to the scores, float32 or the dtype of
        query; 2 dimensions or more, which broadcast to [..., heads, len_q, len_kv]; numbers get a gradient. A
        CausalBias of torch.nn.attention.bias means what it means there.
    math: True composes the call of PyTorch's own operators, as torch's sdpa_kernel(SDPBackend.MATH) does: slow, with
        second derivatives and forward mode.
    Returns [..., heads, len_q, head_dim_v]. The output is 0 if a query sees no key, as PyTorch's is from 2.5 on.
    Unlike torch's: head_dim up to 256 only; no nested tensors; dropout draws other bits. Under autocast the
        inputs are cast as torch's are.
    Raises ValueError that names the argument; tessera.Unsupported."""
    try:
        return _run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, math)
    except ValueError as error:
        raise _named_as_here(error) from None


def _named_as_here(error):
    """An error that names q, k, v or bias, with the names of this function."""
    name, colon, text = str(error).partition(":")
    return type(error)(_NAMES.get(name, name) + colon + text)


def _run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, math):
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        expect_tensor(name, tensor)
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name}: expected a bool, got {flag!r}")
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask: expected None with is_causal=True, got both")
    causal = _TOP_LEFT if is_causal else _NONE
    if isinstance(attn_mask, CausalBias):
        alignment = alignment_of("attn_mask", attn_mask, query.shape[-2], key.shape[-2])
        causal, attn_mask = _masks.CAUSAL[alignment], None
    elif attn_mask is not None:
        expect_tensor("attn_mask", attn_mask)
    q, k, v, mask = under_autocast(query, key, value, attn_mask)
    if q.dim() == k.dim() == v.dim() == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2]:
        leading = q.shape[:2]
    else:
        q, k, v, leading = _broadcast.heads_first(q, k, v, enable_gqa)
    bias = None
    if mask is not None:
        bias = bias_of(_mask_of(mask, leading, q.shape[2], k.shape[2]), q.shape, k.shape[2], q.dtype)
    if bias is None and not math and type(dropout_p) is float and dropout_p == 0.0:
        o = _attention.run_few(q, k, v, causal, True, scale)
    elif _attention.number("dropout_p", dropout_p) == 1.0:
        o = zeros_for_full_dropout(q, k, v, bias)
    else:
        run = _attention.run_math if math else _attention.run
        o = run(Arguments(q, k, v, bias, seed=_attention.seed_tensor(None, dropout_p), causal=causal, scale=scale,
                          dropout_p=dropout_p, heads_first=True), False)
    return o if len(leading) == 2 else o.reshape(*leading, *o.shape[-2:])
