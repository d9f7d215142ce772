# SPDX-License-Identifier: Apache-2.0
"""append_kv() on arrays of any library."""
from __future__ import annotations

import ctypes
import sys
from typing import Any

from . import _native
from ._arrays import borrow, expect
from ._problem import number, thread_count
from ._results import dlpack_stream, finished, output, stream_of, working_on


def without_gradient(name, array):
    """The array, a PyTorch tensor as one that requires no gradient. Raises ValueError if one would be lost."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor) or not array.requires_grad:
        return array
    if torch.is_grad_enabled():
        expect(name, "a tensor without requires_grad, or torch.no_grad(), since calls on a cache have no gradient",
               "one with requires_grad")
    return array.detach()


def append_kv(k: Any, v: Any, k_cache: Any, v_cache: Any, *, slot_mapping: Any = None, kv_lengths: Any = None,
              page_table: Any = None, cache_batch_index: Any = None, cu_seqlens_k: Any = None, rotary_cos: Any = None,
              rotary_sin: Any = None, rotary_interleaved: bool = False, positions: Any = None, q: Any = None,
              q_positions: Any = None, k_norm: Any = None, q_norm: Any = None, norm_eps: float = 1e-6,
              out_q: Any = None, threads: int | None = None, stream: int | None = None) -> Any:
    """Writes new rows of K and V into a cache of keys, in place. Returns q turned as k is, or None without q.

    k: [batch, len, heads_kv, head_dim] or [total, heads_kv, head_dim]; v alike with head_dim_v. k_cache, v_cache:
    [slots, capacity, heads_kv, ..] or [pages, page_size, heads_kv, ..], any strides; both may lie in one memory.

    The place of each row is given in one of two ways. A row without a place is not written: a slot or position that is
    negative or past the end, or a page that the table does not name.
    slot_mapping: int32 or int64, one for each row; slot s is row s % page_size of page s / page_size (as in vLLM).
    kv_lengths: int32 [batch], the keys before the call; row i of sequence b becomes key kv_lengths[b] + i (as in
        flash-attn). page_table: int32 [batch, pages of a sequence]. cache_batch_index: int32 [batch], slots.
        cu_seqlens_k: int32 or int64 [batch + 1], for k [total, ..]; rows past the last offset are not written.

    rotary_cos, rotary_sin: [positions, rotary_dim / 2], float32 or the dtype of k: the first rotary_dim dimensions of k
    and q are rotated by their positions. rotary_interleaved: pairs are neighbours (GPT-J), else the halves (GPT-NeoX).
    positions: int32 or int64, one for each row of k; default with kv_lengths: its place in the sequence.
    q: [batch, len_q, heads_q, head_dim] or [total_q, heads_q, head_dim]. q_positions: one for each row of q; default:
    those of k. out_q: an array for the result, which may be q itself.
    k_norm, q_norm: [head_dim], weights of an RMS norm of each head's row before it is turned, with norm_eps (Qwen 3).
        Appending has no gradient: under torch.no_grad() they may be parameters.
    threads: number of threads; default: one per core that this process may use.
    stream: a cudaStream_t as a number, for arrays on CUDA; default: the current stream of the arrays' library. The host
        reads no slots, lengths or positions there.

    Rows that are neither turned nor normed keep their bits; all others are computed in float64 and rounded once. Under
    torch.compile the call is the operator tessera::append_kv. Raises ValueError naming the argument; nothing is written
    then.
    """
    arrays = dict(k=k, v=v, slot_mapping=slot_mapping, kv_lengths=kv_lengths, page_table=page_table,
                  cache_batch_index=cache_batch_index, cu_seqlens_k=cu_seqlens_k, rotary_cos=rotary_cos,
                  rotary_sin=rotary_sin, positions=positions, q=q, q_positions=q_positions, k_norm=k_norm,
                  q_norm=q_norm)
    arrays = {name: without_gradient(name, array) for name, array in arrays.items()}
    k_cache, v_cache = without_gradient("k_cache", k_cache), without_gradient("v_cache", v_cache)
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        from .torch._append_operator import append_kv as operator
        if stream is not None:
            expect("stream", "None under torch.compile", stream)
        turned = operator(arrays.pop("k"), arrays.pop("v"), k_cache, v_cache, **arrays, out_q=out_q,
                          rotary_interleaved=bool(rotary_interleaved), norm_eps=norm_eps, threads=threads)
        return None if q is None else turned if out_q is None else out_q
    args, options = _native.sized(_native.AppendArgs), _native.sized(_native.Options)
    args.rotary_interleaved, args.norm_eps = int(bool(rotary_interleaved)), number("norm_eps", norm_eps)
    if not args.norm_eps > 0:
        expect("norm_eps", "a number over 0", norm_eps)
    options.threads = thread_count(threads)
    on_cuda = borrow("k", arrays["k"]).device[0] == _native.CUDA
    if stream is not None and not on_cuda:
        expect("stream", "None for arrays of the host", stream)
    stream = stream_of(arrays["k"], stream) if on_cuda else None
    of_dlpack = None if stream is None else dlpack_stream(stream)
    borrowed = {name: borrow(name, array, of_dlpack) for name, array in arrays.items() if array is not None}
    borrowed.update({name: borrow(name, array, of_dlpack, written=True) for name, array in
                     (("k_cache", k_cache), ("v_cache", v_cache))})
    turned = None
    if q is not None or out_q is not None:
        like = borrowed.get("q", borrowed["k"])
        with working_on(like, stream):
            turned = borrowed["q_out"] = output("out_q", out_q, like, like.shape, like.dtype, stream)
    for name, array in borrowed.items():
        setattr(args, name, array.tensor())
    names = {"q_out": "out_q"}
    _native.check(_native.library().tessera_append(ctypes.byref(args), ctypes.byref(options), stream), names)
    return None if turned is None else finished(turned, borrowed["q"], out_q)
