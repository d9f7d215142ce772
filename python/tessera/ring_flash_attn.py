# SPDX-License-Identifier: Apache-2.0
"""The functions of ring_flash_attn (zhuzilin) on tessera: K and V are gathered, and no ring runs.

The names say which rows a rank holds. ring_*: consecutive ones. zigzag_ring_*: two of 2 * ranks chunks. In the varlen
functions each document is cut in this way by itself, and cu_seqlens are those of this rank's rows. llama3_*: the packed
documents are cut into consecutive parts wherever that falls; llama3_flash_attn_prepare_cu_seqlens() comes first.

q: [batch, rows, heads, head_dim], varlen [rows, heads, head_dim]; kv and qkv have one more dimension, of 2 or 3, before
heads. dropout_p and alibi_slopes are refused, deterministic changes nothing (every call is), and window_size, which
ring_flash_attn does not have, is (left, right) with a negative side for no limit. max_seqlen, max_seqlen_q
and max_seqlen_k are bounds of the lengths on a rank: smaller ones are refused, larger ones change nothing. group: None
is the default group. With return_attn_probs the functions return (out, lse, None), lse [batch, heads, rows] or
[heads, rows].
They raise ValueError that names the argument, on every rank when one refuses. The functions stripe_* are left out: their rows are never consecutive."""
from __future__ import annotations

import collections
import functools
import inspect
import itertools
import math
import operator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .torch import _attention
from .torch._context_parallel import _groups, _order, _setup, context_parallel_attention

_LIMIT = 300.0  # seconds, the default timeout of context_parallel_attention()
_PREPARED_AT_MOST = 256
_OFFSETS = "_tessera_offsets"  # the attribute of cu_seqlens_q that has the offsets of all ranks
# The cache of llama3_*: the offsets that one rank passes -> those of all ranks, for every sequence with that part.
_prepared: collections.OrderedDict = collections.OrderedDict()


def _attend(q, k, v, group, placed, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs):
    """placed(): (order, cu_seqlens of the whole sequence). Its refusals and those here are raised on every rank."""
    def check():
        if dropout_p:
            raise ValueError(f"dropout_p: expected 0, got {dropout_p}")
        if alibi_slopes is not None:
            raise ValueError(f"alibi_slopes: expected None, got a {type(alibi_slopes).__name__}")
        try:
            left, right = window_size
            window = tuple(None if operator.index(side) < 0 else operator.index(side) for side in (left, right))
        except (TypeError, ValueError):
            raise ValueError(f"window_size: expected two integers, negative for no limit, got {window_size!r}") from None
        scale = _attention.number("softmax_scale", softmax_scale)
        if scale is not None and not math.isfinite(scale):
            raise ValueError(f"softmax_scale: expected None or a finite number, got {scale}")
        return *placed(), scale, None if window == (None, None) else window
    order, cu_seqlens, scale, window = _groups.checked(group, _LIMIT, _setup.FUNCTION, check)
    o, lse = context_parallel_attention(q, k, v, group, order=order, cu_seqlens=cu_seqlens, scale=scale,
                                        causal=bool(causal), window=window, return_lse=True)
    return (o, lse, None) if return_attn_probs else o


def _dense(order):
    def function(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                 causal: bool = False, window_size: tuple[int, int] = (-1, -1), alibi_slopes: None = None,
                 deterministic: bool = False, return_attn_probs: bool = False,
                 group: dist.ProcessGroup | None = None) -> Any:
        return _attend(q, k, v, group, lambda: (order, None), dropout_p, softmax_scale, causal, window_size, alibi_slopes,
                       return_attn_probs)
    return function


def _expect_bound(name, bound, longest):
    try:
        fits = operator.index(bound) >= longest
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"{name}: expected an integer from {longest} on, the longest length, got {bound!r}")


def _varlen(order):
    def function(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
                 softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                 alibi_slopes: None = None, deterministic: bool = False, return_attn_probs: bool = False,
                 group: dist.ProcessGroup | None = None) -> Any:
        def placed():
            ranks = dist.get_world_size(_groups.resolved(group))
            local = _order.offsets_of(cu_seqlens)
            if local[-1] != q.shape[0]:
                raise ValueError(f"cu_seqlens: expected offsets of this rank's rows whose last one is {q.shape[0]}, the "
                                 f"rows of q, got {local[-1]} as the last one")
            odd = next((b - a for a, b in zip(local, local[1:]) if (b - a) % 2), None)
            if order == "zigzag" and odd:
                raise ValueError(f"cu_seqlens: expected documents of an even number of rows on each rank, got one of {odd}")
            _expect_bound("max_seqlen", max_seqlen, max((b - a for a, b in zip(local, local[1:])), default=0))
            offsets = tuple(offset * ranks for offset in local)
            return _order.of_documents(order, offsets, ranks), offsets
        return _attend(q, k, v, group, placed, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
                       return_attn_probs)
    return function


def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens: Tensor, causal: bool, rank: int,
                                         world_size: int) -> tuple[Tensor, Tensor, int, int, slice]:
    """(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice) of one rank, for llama3_*.

    cu_seqlens: offsets of the packed documents over the whole sequence, whose length world_size divides. cu_seqlens_q
    carries them, since llama3_* gets no more than the results of this rank. A copy of it is known by its numbers, unless
    they are those of several sequences, whose documents differ on other ranks. Raises ValueError."""
    offsets = _order.offsets_of(cu_seqlens)
    total = offsets[-1]
    if world_size < 1 or total % world_size or not 0 <= rank < world_size:
        raise ValueError(f"world_size: expected a divisor of the {total} rows and more than rank {rank}, got {world_size}")
    cu_q, cu_k, longest_q, longest_k, keys = _parts(tuple(offsets), bool(causal), rank, world_size)
    key = _key(cu_q, keys, rank, world_size)
    known = _prepared.pop(key, set())
    _prepared[key] = known if len(known) > 1 else {*known, tuple(offsets)}
    while len(_prepared) > _PREPARED_AT_MOST:
        _prepared.popitem(last=False)
    dtype, device = (cu_seqlens.dtype, cu_seqlens.device) if isinstance(cu_seqlens, Tensor) else (torch.int32, "cpu")
    made = [torch.tensor(c, dtype=dtype, device=device) for c in (cu_q, cu_k)]
    setattr(made[0], _OFFSETS, tuple(offsets))
    return *made, longest_q, longest_k, keys


@functools.lru_cache(maxsize=_PREPARED_AT_MOST)
def _parts(offsets, causal, rank, ranks):
    """The result of llama3_flash_attn_prepare_cu_seqlens(), its tensors as lists."""
    rows = offsets[-1] // ranks
    first, last = rank * rows, (rank + 1) * rows
    own = [(a, b) for a, b in zip(offsets, offsets[1:]) if a < last and b > first]
    lengths_q = [min(b, last) - max(a, first) for a, b in own]
    lengths_k = [(min(b, last) if causal else b) - a for a, b in own]
    cu_q, cu_k = (list(itertools.accumulate(lengths, initial=0)) for lengths in (lengths_q, lengths_k))
    begin = own[0][0] if own else first
    return cu_q, cu_k, max(lengths_q, default=0), max(lengths_k, default=0), slice(begin, begin + cu_k[-1])


def _key(cu_seqlens_q, keys, rank, ranks):
    return tuple(int(n) for n in cu_seqlens_q), keys.start, keys.stop, rank, ranks


def llama3_flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                                  max_seqlen_q: int, max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice,
                                  dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                                  window_size: tuple[int, int] = (-1, -1), alibi_slopes: None = None,
                                  deterministic: bool = False, return_attn_probs: bool = False,
                                  group: dist.ProcessGroup | None = None) -> Any:
    """Attention over packed documents that are cut into consecutive parts. The lengths and local_k_slice are those of
    llama3_flash_attn_prepare_cu_seqlens() with the same causal, and others are refused; cu_seqlens_k is not read on a
    GPU. heads_k_stride changes no result. Raises ValueError."""
    def placed():
        return "contiguous", _offsets_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice, causal,
                                         group)
    return _attend(q, k, v, group, placed, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
                   return_attn_probs)


def _offsets_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice, causal, group):
    """The offsets of the whole sequence that llama3_flash_attn_prepare_cu_seqlens() gave these for. Raises ValueError."""
    resolved = _groups.resolved(group)
    rank, ranks = dist.get_rank(resolved), dist.get_world_size(resolved)
    offsets = getattr(cu_seqlens_q, _OFFSETS, None)
    if offsets is None:
        several = _prepared.get(_key(cu_seqlens_q.tolist(), local_k_slice, rank, ranks), ())
        if len(several) > 1:
            raise ValueError("cu_seqlens_q: expected the tensor itself that llama3_flash_attn_prepare_cu_seqlens() gave, "
                             f"since several sequences have these numbers on rank {rank}, got a copy")
        offsets = next(iter(several), None)
    if offsets is None:
        raise ValueError("cu_seqlens_q: expected the result of tessera's llama3_flash_attn_prepare_cu_seqlens() for "
                         f"rank {rank} of {ranks}, which knows the documents of all ranks, got another tensor or slice")
    _, cu_k, longest_q, longest_k, keys = _parts(offsets, bool(causal), rank, ranks)
    if local_k_slice != keys:
        raise ValueError(f"local_k_slice: expected {keys}, as llama3_flash_attn_prepare_cu_seqlens() gives it with "
                         f"causal={bool(causal)}, got {local_k_slice}")
    on_host = not isinstance(cu_seqlens_k, Tensor) or cu_seqlens_k.device.type == "cpu"
    if len(cu_seqlens_k) != len(cu_k) or on_host and [int(n) for n in cu_seqlens_k] != cu_k:
        raise ValueError(f"cu_seqlens_k: expected {cu_k}, as llama3_flash_attn_prepare_cu_seqlens() gives it, got "
                         f"{cu_seqlens_k!r}")
    _expect_bound("max_seqlen_q", max_seqlen_q, longest_q)
    _expect_bound("max_seqlen_k", max_seqlen_k, longest_k)
    return offsets


def _named(name, function, text):
    function.__name__ = function.__qualname__ = name
    function.__doc__ = text
    return function


def _unpacked(name, packed, parts):
    """The tensors that one packed tensor holds."""
    _attention.expect_tensor(name, packed)
    if packed.dim() not in (4, 5) or packed.shape[-3] != parts:
        raise ValueError(f"{name}: expected shape [batch, rows, {parts}, heads, head_dim] or [rows, {parts}, heads, "
                         f"head_dim], got {list(packed.shape)}")
    return packed.unbind(-3)


def _parts_of(name, packed, parts, function, rest, options):
    """_unpacked(), which refuses on every rank. rest, options: the arguments of `function` after q, k and v."""
    try:
        return _unpacked(name, packed, parts)
    except ValueError as error:
        group = inspect.signature(function).bind_partial(None, None, None, *rest, **options).arguments.get("group")
        _groups.tell(group, _LIMIT, _setup.FUNCTION, error)
        raise


def _with_kv(function, name):
    def of_packed(q: Tensor, kv: Tensor, *rest: Any, **options: Any) -> Any:
        k, v = _parts_of("kv", kv, 2, function, rest, options)
        return function(q, k, v, *rest, **options)
    return _named(name, of_packed, f"{function.__name__}() with k and v in one tensor, and its other arguments.")


def _with_qkv(function, name):
    def of_packed(qkv: Tensor, *rest: Any, **options: Any) -> Any:
        return function(*_parts_of("qkv", qkv, 3, function, rest, options), *rest, **options)
    return _named(name, of_packed, f"{function.__name__}() with q, k and v in one tensor, and its other arguments.")


def _variants(name, function, text):
    base = _named(name + "_func", function, text) if text else function
    return base, _with_kv(base, name + "_kvpacked_func"), _with_qkv(base, name + "_qkvpacked_func")


(ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func) = _variants(
    "ring_flash_attn", _dense("contiguous"), "Attention over ranks that hold consecutive rows.")
(zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func) = _variants(
    "zigzag_ring_flash_attn", _dense("zigzag"), "Attention over ranks that hold two of 2 * ranks chunks.")
(ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func) = _variants(
    "ring_flash_attn_varlen", _varlen("contiguous"), "Attention over documents, each cut into consecutive parts.")
(zigzag_ring_flash_attn_varlen_func, zigzag_ring_flash_attn_varlen_kvpacked_func,
 zigzag_ring_flash_attn_varlen_qkvpacked_func) = _variants(
    "zigzag_ring_flash_attn_varlen", _varlen("zigzag"), "Attention over documents, each cut in zig-zag.")
(_, llama3_flash_attn_varlen_kvpacked_func, llama3_flash_attn_varlen_qkvpacked_func) = _variants(
    "llama3_flash_attn_varlen", llama3_flash_attn_varlen_func, None)

__all__ = ["llama3_flash_attn_prepare_cu_seqlens", "llama3_flash_attn_varlen_func",
           "llama3_flash_attn_varlen_kvpacked_func", "llama3_flash_attn_varlen_qkvpacked_func", "ring_flash_attn_func",
           "ring_flash_attn_kvpacked_func", "ring_flash_attn_qkvpacked_func", "ring_flash_attn_varlen_func",
           "ring_flash_attn_varlen_kvpacked_func", "ring_flash_attn_varlen_qkvpacked_func",
           "zigzag_ring_flash_attn_func", "zigzag_ring_flash_attn_kvpacked_func",
           "zigzag_ring_flash_attn_qkvpacked_func", "zigzag_ring_flash_attn_varlen_func",
           "zigzag_ring_flash_attn_varlen_kvpacked_func", "zigzag_ring_flash_attn_varlen_qkvpacked_func"]
