# SPDX-License-Identifier: Apache-2.0
"""A layer's attention in transformers where the rows of the sequence are spread over ranks."""
from __future__ import annotations

import typing

from .torch._context_parallel import context_parallel_attention


class Layer:
    """What transformers calls for each layer: query [batch, heads, rows, head_dim], key, value [batch, kv_heads, ..]."""

    def __init__(self, group: typing.Any, order: typing.Any):
        self.group, self.order = group, order

    def __call__(self, module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None,
                 softcap=None, is_causal=None, s_aux=None, sinks=None, cu_seq_lens_q=None, **kwargs):
        if attention_mask is not None:
            raise ValueError(f"attention_mask: expected None, got a {type(attention_mask).__name__}")
        if dropout:
            raise ValueError(f"dropout: expected 0 with context parallelism, got {dropout}")
        if query.shape[2] != key.shape[2]:
            raise ValueError(f"key: expected the {query.shape[2]} rows of query and no cache, got {key.shape[2]}")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        window = (sliding_window - 1, 0) if sliding_window is not None and causal else None
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        o = context_parallel_attention(q, k, v, self.group, order=self.order, causal=bool(causal), window=window,
                                       scale=scaling, softcap=softcap or 0.0, sinks=s_aux if sinks is None else sinks,
                                       cu_seqlens=cu_seq_lens_q)
        return o, None


def no_mask(*args, attention_mask=None, **kwargs):
    """None, the mask of a layer whose attention knows its mask. Raises ValueError for one of padding that hides keys."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("attention_mask: expected ones with context parallelism, got zeros; packed documents "
                         "(cu_seq_lens_q) take the place of padding")
    return None
