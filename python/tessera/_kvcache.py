# SPDX-License-Identifier: Apache-2.0
"""Attention over a cache of keys and values, which the calls of flash-attn's two versions share.

Cache.attend() runs the library on the tensors where they lie, and with_kvcache() also writes new rows into the cache in
place before, with rotary. There are no gradients: a tensor that requires one is refused, but under torch.no_grad(). On
CUDA nothing is read on the host, so the calls can be captured in a graph.

The environment variable TESSERA_PROMPT_KERNEL names the kernel of calls with FEWEST_OF_PROMPT queries a sequence and more.
"""
from __future__ import annotations

import ctypes
import os

import torch
import torch.nn.functional as F

from . import _native
from ._append import append_kv, without_gradient
from ._arrays import borrow
from ._problem import integer
from ._results import Workspace
from .torch._tensors import expect_tensor

_INT32 = (-2**31, 2**31 - 1)
PROMPT_KERNEL = "TESSERA_PROMPT_KERNEL"
FEWEST_OF_PROMPT = 64


def prompt_kernel():
    """The forward kernel that TESSERA_PROMPT_KERNEL names, with or without its pass; None for none."""
    given = os.environ.get(PROMPT_KERNEL)
    if not given:
        return None
    name = given.removesuffix(".forward") + ".forward"
    known = [kernel for kernel in _native.kernel_names() if kernel.endswith(".forward")]
    if name not in known:
        raise ValueError(f"{PROMPT_KERNEL}: expected one of {', '.join(known)}, or one without its pass, got {given!r}")
    return name


def _expect_on(name, tensor, device):
    expect_tensor(name, tensor)
    if tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, where the cache is, got one on {tensor.device}")


def _int32(name, values):
    """int32 (batch,) or (batch, ..), as the library reads it. An int64 that int32 has not stays out of every bound."""
    expect_tensor(name, values)
    if values.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: expected dtype int32, got {str(values.dtype).removeprefix('torch.')}")
    return values.clamp(*_INT32).to(torch.int32) if values.dtype == torch.int64 else values


def offsets(name, values, batch=None):
    """int32 (batch + 1,), the first row of each sequence of a ragged batch."""
    values = _int32(name, values)
    if values.dim() != 1 or len(values) != (max(len(values), 1) if batch is None else batch + 1):
        raise ValueError(f"{name}: expected shape ({'batch' if batch is None else batch} + 1,), got "
                         f"{list(values.shape)}")
    return values


class Cache:
    """K and V of a call with what finds a sequence's rows in them.

    k, v: (slots, capacity, nheads_k, headdim), or with pages (pages, page_size, nheads_k, headdim) and table int32
    (batch, pages of a sequence). lengths: an integer, int (batch,), or None: all of the capacity. slots: the slot of
    each sequence, or the row of the table; slots, left_padding: int (batch,) or None. names: the caller's names of k, v,
    the table and the lengths. Raises ValueError that names the argument."""

    def __init__(self, k, v, batch, lengths, table=None, slots=None, left_padding=None,
                 names=("k_cache", "v_cache", "block_table", "cache_seqlens")):
        table_name, lengths_name = names[2:]
        self.table = None if table is None else _int32(table_name, table)
        for name, cache in zip(names, (k, v)):
            expect_tensor(name, cache)
            if cache.dim() != 4:
                raise ValueError(f"{name}: expected 4 dimensions, got {list(cache.shape)}")
            if cache.device != k.device:
                raise ValueError(f"{name}: expected a tensor on {k.device}, got one on {cache.device}")
        for name, given in ((table_name, table), (lengths_name, lengths), ("cache_batch_idx", slots),
                            ("cache_leftpad", left_padding)):
            if isinstance(given, torch.Tensor):
                _expect_on(name, given, k.device)
        if table is not None and not k.shape[1]:
            raise ValueError(f"{names[0]}: expected pages of at least one row, got {list(k.shape)}")
        self.k, self.v = without_gradient(names[0], k), without_gradient(names[1], v)
        self.batch, self._names = batch, names
        self.slots = None if slots is None else self._of_sequences("cache_batch_idx", slots)
        if self.table is not None and self.slots is not None and self.table.dim() == 2:
            self.table, self.slots = self._rows_of_table(), None
        if self.table is not None and (self.table.dim() != 2 or len(self.table) != batch):
            raise ValueError(f"{table_name}: expected shape ({batch}, pages of a sequence), got {list(table.shape)}")
        self.left_padding = None if left_padding is None else self._of_sequences("cache_leftpad", left_padding)
        self.capacity = k.shape[1] * (1 if table is None else self.table.shape[1])
        lengths = self.capacity if lengths is None else lengths
        if not isinstance(lengths, torch.Tensor):
            lengths = min(max(integer(lengths_name, lengths), _INT32[0]), _INT32[1])
            lengths = torch.full((batch,), lengths, dtype=torch.int32, device=k.device)
        self.lengths = self._of_sequences(lengths_name, lengths)

    def _of_sequences(self, name, values):
        values = _int32(name, values)
        if values.shape != (self.batch,):
            raise ValueError(f"{name}: expected shape ({self.batch},), got {list(values.shape)}")
        return values

    def _rows_of_table(self):
        """The row of the table for each sequence, which cache_batch_idx names. On CUDA, where the host does not read it,
        a row that does not exist has no pages."""
        if self.slots.is_cuda:
            rows = self.slots.long()
            exists = (rows >= 0) & (rows < len(self.table))
            of_rows = self.table[rows.clamp(0, max(len(self.table) - 1, 0))]
            return torch.where(exists[:, None], of_rows, of_rows.new_full((), -1))
        wrong = self.slots[(self.slots < 0) | (self.slots >= len(self.table))]
        if len(wrong):
            raise ValueError(f"cache_batch_idx: expected rows of {self._names[2]} from 0 to {len(self.table) - 1}, got "
                             f"{int(wrong[0])}")
        return self.table[self.slots.long()]

    @torch.compiler.disable
    def attend(self, q, cu_seqlens_q=None, **scores):
        """(out, softmax_lse) of q: the run of call()."""
        return self.call(q, cu_seqlens_q, **scores).run()

    def call(self, q, cu_seqlens_q=None, *, max_seqlen_q=None, scale=None, causal=False, window=(-1, -1), softcap=0.0,
             tensors=()):
        """The _Call of q (batch, seqlen_q, nheads, headdim), or (total_q, nheads, headdim) with cu_seqlens_q.

        max_seqlen_q: the most queries of a sequence, which CUDA takes as the bound, or None: as many as q has rows.
        tensors: (name, option of the problem, tensor or None) of further arguments of the library.
        Rows past the last offset get output 0 and LSE -inf."""
        q, names = without_gradient("q", q), _names_of(self._names)
        problem = _native.new_problem()
        arrays = {"q": q, "k": self.k, "v": self.v, "kv_lengths": self.lengths, "page_table": self.table,
                  "cache_batch_index": self.slots, "left_padding": self.left_padding}
        if cu_seqlens_q is not None:
            arrays["cu_seqlens_q"] = offsets("cu_seqlens_q", cu_seqlens_q, self.batch)
        for name, option, tensor in tensors:
            if tensor is not None:
                expect_tensor(name, tensor)
                arrays[name] = without_gradient(names.get(name, name), tensor)
                setattr(problem, option, 1)
        self._set_sizes(problem, q, cu_seqlens_q, max_seqlen_q)
        problem.causal = 1 if causal else 0
        problem.window_left, problem.window_right = (_native.UNBOUNDED if side < 0 else side for side in window)
        if scale is not None:
            problem.scale = scale
        problem.softcap = softcap
        ragged = cu_seqlens_q is not None
        out = q.new_zeros((*q.shape[:-1], self.v.shape[-1]))  # the kernels do not write rows past the last offset
        lse_shape = (q.shape[1], q.shape[0]) if ragged else (q.shape[0], q.shape[2], q.shape[1])
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.full(lse_shape, float("-inf"), dtype=lse_dtype, device=q.device)
        kernel = prompt_kernel() if problem.len_q >= FEWEST_OF_PROMPT else None
        return _Call(problem, dict(arrays, o=out, lse=lse), names, kernel)

    def _set_sizes(self, problem, q, cu_seqlens_q, max_seqlen_q):
        if q.dim() != (4 if cu_seqlens_q is None else 3):
            raise ValueError("q: expected shape (batch, seqlen_q, nheads, headdim), or (total_q, nheads, headdim) with "
                             f"cu_seqlens_q, got {list(q.shape)}")
        dtypes = {torch.float64: _native.FP64, torch.float32: _native.FP32, torch.float16: _native.FP16,
                  torch.bfloat16: _native.BF16}
        if q.dtype not in dtypes:
            raise ValueError(f"q: expected dtype {' or '.join(map(str, dtypes))}, got {q.dtype}")
        problem.dtype, problem.batch, problem.kv_lengths = dtypes[q.dtype], self.batch, 1
        problem.heads_q, problem.head_dim = q.shape[-2:]
        problem.heads_kv, problem.head_dim_v = self.k.shape[2], self.v.shape[3]
        problem.len_kv = self.capacity
        problem.page_size = 0 if self.table is None else self.k.shape[1]
        problem.cache_batch_index = int(self.slots is not None)
        problem.left_padding = int(self.left_padding is not None)
        if cu_seqlens_q is None:
            problem.len_q = q.shape[1]
        else:
            problem.ragged, problem.total_q = 1, q.shape[0]
            if q.is_cuda:
                problem.len_q = min(len(q), len(q) if max_seqlen_q is None else max(int(max_seqlen_q), 1))
            else:
                lengths = cu_seqlens_q.diff()
                problem.len_q = max(int(lengths.max()), 0) if len(lengths) else 0


def _names_of(names):
    """The caller's names of the library's arguments."""
    return {**dict(zip(("k", "v", "page_table", "kv_lengths"), names)), "cache_batch_index": "cache_batch_idx",
            "left_padding": "cache_leftpad", "scale": "softmax_scale", "sinks": "s_aux"}


class _Call:
    """A forward of the library. tensors: its arguments by name, of which absent ones are None. kernel: its name, or None
    for plan()'s choice."""

    def __init__(self, problem, tensors, names, kernel=None):
        self._problem, self._tensors, self._names = problem, tensors, names
        self._args, self._options = _native.sized(_native.ForwardArgs), _native.sized(_native.Options)
        self._borrowed = {}
        self._set(**{name: tensor for name, tensor in tensors.items() if tensor is not None})
        if tensors["q"].is_cuda:
            self._options.backend = _native.BACKENDS["cuda"]
        if kernel is not None:
            self._options.kernel = kernel.encode()
        self._planned = ctypes.byref(problem), ctypes.byref(self._options)

    def _set(self, **tensors):
        for name, tensor in tensors.items():
            self._borrowed[name] = borrow(self._names.get(name, name), tensor)
            setattr(self._args, name, self._borrowed[name].tensor())

    def check(self, **changed):
        """Makes the checks of run() for these arguments and raises their errors, before the caller writes to a tensor."""
        self._set(**changed)
        self._check(_native.library().tessera_check_forward(*self._planned, ctypes.byref(self._args)))

    def _check(self, status):
        try:
            _native.check(status, self._names)
        except (_native.Unsupported, _native.DeviceUnavailable) as error:
            if self._options.kernel is None:
                raise
            raise type(error)(f"{PROMPT_KERNEL}: expected a kernel that takes the call, got "
                              f"{self._options.kernel.decode()}; {error}") from None

    def run(self, **changed):
        """(out, softmax_lse). changed: tensors of the shape of others, by name."""
        self._set(**changed)
        library, q, size = _native.library(), self._borrowed["q"], ctypes.c_size_t()
        stream = torch.cuda.current_stream(q.source.device).cuda_stream if q.source.is_cuda else None
        self._check(library.tessera_workspace_bytes(*self._planned, _native.FORWARD, ctypes.byref(size)))
        workspace = Workspace(size.value, q, stream)
        self._check(library.tessera_forward(*self._planned, ctypes.byref(self._args), workspace.address, size.value, stream))
        return self._tensors["o"], self._tensors["lse"]


def _sequences(x, cu_seqlens, batch):
    """(sequence, index in it) of each row of a dense or a ragged tensor. Rows past the last offset have the index 0 of
    a sequence `batch`, and are neither appended nor queries of any."""
    if cu_seqlens is None:
        count = x.shape[1]
        rows = torch.arange(batch * count, device=x.device)
        return rows // max(count, 1), rows % max(count, 1)
    begins = cu_seqlens.long()
    rows = torch.arange(len(x), device=x.device)
    sequence = torch.searchsorted(begins, rows, right=True) - 1
    return sequence, torch.where(sequence < batch, rows - begins[sequence], 0)


def _expect_rows(name, x, cu_seqlens, batch, device):
    _expect_on(name, x, device)
    if x.dim() != (4 if cu_seqlens is None else 3) or cu_seqlens is None and len(x) != batch:
        shape = f"({batch}, rows, nheads, headdim)" if cu_seqlens is None else "(rows, nheads, headdim)"
        raise ValueError(f"{name}: expected shape {shape}, got {list(x.shape)}")


def _append(q, cache, k, v, rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens, cu_seqlens_q, cu_seqlens_k,
            moves):
    """Appends k and v, and returns q, rotated if there is a rotary embedding."""
    places = dict(kv_lengths=cache.lengths, page_table=cache.table, cache_batch_index=cache.slots,
                  cu_seqlens_k=cu_seqlens_k)
    turn = {}
    if rotary_cos is not None:
        for name, rotary in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
            _expect_on(name, rotary, cache.k.device)
        if rotary_seqlens is not None:
            _expect_on("rotary_seqlens", rotary_seqlens, cache.k.device)
        first = cache.lengths if rotary_seqlens is None else cache._of_sequences("rotary_seqlens", rotary_seqlens)
        first = F.pad(first.long(), (0, 1))  # rows past the last offset have position 0
        sequence, index = _sequences(k, cu_seqlens_k, cache.batch)
        if cu_seqlens_q is not None:
            cu_seqlens_q = offsets("cu_seqlens_q", cu_seqlens_q, cache.batch)
        of_q, index_q = _sequences(q, cu_seqlens_q, cache.batch)
        # A sequence of padding has a negative length: its rows are not written, and its queries see no key.
        turn = dict(rotary_cos=rotary_cos, rotary_sin=rotary_sin,
                    rotary_interleaved=rotary_interleaved, positions=(first[sequence] + index).clamp(min=0),
                    q=q, q_positions=(first[of_q] + (index_q if moves else 0)).clamp(min=0))
    try:
        turned = append_kv(k, v, cache.k, cache.v, **places, **turn)
    except ValueError as error:
        name, colon, text = str(error).partition(":")
        names = {**_names_of(cache._names), "k": "k", "v": "v", "cu_seqlens_k": "cu_seqlens_k_new",
                 "positions": "rotary_cos", "q_positions": "rotary_cos"}
        raise ValueError(names.get(name, name) + colon + text) from None
    return turned if turn else q


@torch.compiler.disable  # it reads addresses, which a trace does not have
def with_kvcache(q, cache, k=None, v=None, rotary_cos=None, rotary_sin=None, rotary_interleaved=True,
                 rotary_seqlens=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, **scores):
    """(out, softmax_lse) of flash_attn_with_kvcache: appends k and v at the lengths, in place, then attends.

    rotary_cos, rotary_sin: (positions, rotary_dim / 2). A new key is rotated by its position in the cache. In a
    causal or windowed call each query is rotated by the position of its index, in other calls all by the first one.
    rotary_seqlens: int (batch,), replaces the lengths in these positions."""
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'}: expected a tensor, since the other one is given, got None")
    if rotary_cos is None or k is None:
        for name, rotary in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
            if rotary is not None:
                raise ValueError(f"{name}: expected None without {'rotary_cos' if k is not None else 'new k and v'}")
    if k is None:
        return cache.attend(q, cu_seqlens_q, max_seqlen_q=max_seqlen_q, **scores)
    if cu_seqlens_k_new is not None:
        cu_seqlens_k_new = offsets("cu_seqlens_k_new", cu_seqlens_k_new, cache.batch)
    for name, x, cu_seqlens in (("k", k, cu_seqlens_k_new), ("v", v, cu_seqlens_k_new), ("q", q, cu_seqlens_q)):
        _expect_rows(name, x, cu_seqlens, cache.batch, cache.k.device)
    added = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
    call = cache.call(q, cu_seqlens_q, max_seqlen_q=max_seqlen_q, **scores)
    call.check(kv_lengths=cache.lengths + added)  # the whole call, before a row is written
    moves = scores.get("causal") or max(scores.get("window", (-1, -1))) >= 0
    q = _append(q, cache, k, v, rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens, cu_seqlens_q,
                cu_seqlens_k_new, moves)
    return call.run(q=without_gradient("q", q))
