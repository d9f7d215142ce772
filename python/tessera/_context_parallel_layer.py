# SPDX-License-Identifier: Apache-2.0
"""A layer's attention in transformers where the rows of the sequence are spread over ranks."""
from __future__ import annotations

import typing

import torch

from . import _layer_masks, _mask_functions
from .torch._context_parallel import _groups, _setup, context_parallel_attention

_LIMIT = 300.0  # seconds, the default timeout of context_parallel_attention()


class Window(typing.NamedTuple):
    """The mask of a layer with a window: a query sees itself, `left` keys before it and `right` keys after it, None for
    no limit."""
    left: int
    right: typing.Optional[int]


def _differ(offsets, others):
    """Whether the offsets are known to differ: no numbers are read on a GPU or in a graph."""
    if offsets is others:
        return False
    if offsets.is_cuda or torch.compiler.is_compiling():
        return offsets.shape != others.shape
    return not torch.equal(offsets, others)


def _mask_of_layer(module, query, key, attention_mask, dropout, sliding_window, is_causal, unsupported, second_sinks,
                   cu_seq_lens_q, cu_seq_lens_k):
    """(causal, window) of a call. Raises ValueError for what ranks do not have together."""
    for name, given in unsupported.items():
        if given is not None:
            raise ValueError(f"{name}: expected None with context parallelism, got a {type(given).__name__}")
    if second_sinks is not None:
        raise ValueError("sinks: expected None beside s_aux, which is another name of it, got both")
    if cu_seq_lens_k is not None and (cu_seq_lens_q is None or _differ(cu_seq_lens_q, cu_seq_lens_k)):
        raise ValueError("cu_seq_lens_k: expected None or the same offsets as cu_seq_lens_q, got different ones")
    if attention_mask is not None and not isinstance(attention_mask, Window):
        raise ValueError(f"attention_mask: expected None, got a {type(attention_mask).__name__}")
    if dropout:
        raise ValueError(f"dropout: expected 0 with context parallelism, got {dropout}")
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"key: expected the {query.shape[2]} rows of query and no cache, got {key.shape[2]}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = None if attention_mask is None else tuple(attention_mask)
    if window is None and sliding_window is not None:
        if not causal:
            raise ValueError("sliding_window: expected the mask that transformers makes for it, which says how far a "
                             f"layer that is not causal sees to both sides, got {sliding_window} and no mask")
        window = sliding_window - 1, 0
    return bool(causal), window


class Layer:
    """The function that transformers calls for each layer. query: [batch, heads, rows, head_dim]; key, value: [batch,
    kv_heads, ..]."""

    def __init__(self, group: typing.Any, order: typing.Any):
        self.group, self.order = group, order

    def __call__(self, module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None,
                 softcap=None, is_causal=None, s_aux=None, sinks=None, head_mask=None, position_bias=None, cache=None,
                 cu_seq_lens_q=None, cu_seq_lens_k=None, **kwargs):
        def check():
            return _mask_of_layer(module, query, key, attention_mask, dropout, sliding_window, is_causal,
                                  dict(head_mask=head_mask, position_bias=position_bias, cache=cache),
                                  None if sinks is None else s_aux, cu_seq_lens_q, cu_seq_lens_k)
        causal, window = _groups.checked(self.group, _LIMIT, _setup.FUNCTION, check)
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        o = context_parallel_attention(q, k, v, self.group, order=self.order, causal=causal, window=window,
                                       scale=scaling, softcap=softcap or 0.0, sinks=s_aux if sinks is None else sinks,
                                       cu_seqlens=cu_seq_lens_q)
        return o, None


def masks_of(group):
    """no_mask(), whose refusal on one rank is raised on all."""
    def function(*args, **keywords):
        return _groups.checked(group, _LIMIT, _setup.FUNCTION, lambda: no_mask(*args, **keywords))
    return function


def no_mask(*args, q_length=None, attention_mask=None, mask_function=None, local_size=None, device="cpu", **kwargs):
    """None, the mask of a layer whose attention knows its mask, or a Window. Raises ValueError for one of padding that
    hides keys, and for a mask function that is not causal, a window or all.

    Documents that transformers finds in position_ids do not count: those of a rank's rows jump in zig-zag, too."""
    if attention_mask is not None and not bool(_layer_masks.padding("attention_mask", attention_mask).all()):
        raise ValueError("attention_mask: expected ones with context parallelism, got zeros; packed documents "
                         "(cu_seq_lens_q) take the place of padding")
    if mask_function is None:
        return None
    if torch.compiler.is_dynamo_compiling():
        head = torch.arange(1, device=device)[:, None]
        query, key = torch.arange(1, q_length, device=device)[None], torch.arange(q_length - 1, device=device)[None]
        seen = mask_function(head, head, query, key)
        pattern = _mask_functions._traced_pattern(head, head, query, key, seen, local_size)
    else:
        pattern = _mask_functions._pattern_of(mask_function)
    if pattern is None or pattern.local == "chunk":
        raise ValueError("mask_function: expected causal, a sliding window or all keys with context parallelism, got "
                         + ("another one" if pattern is None else f"chunks of {pattern.size} keys"))
    if not pattern.local:
        return None
    if pattern.local == "window":
        return Window(pattern.size - 1, 0 if pattern.causal else None)
    return Window(pattern.size, 0 if pattern.causal else pattern.size)
