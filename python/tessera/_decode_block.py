# SPDX-License-Identifier: Apache-2.0
"""decode_block() on arrays of any library."""
from __future__ import annotations

import ctypes
import sys
from typing import Any

from . import _native
from ._append import without_gradient
from ._arrays import ITEM_SIZE, borrow, expect
from ._problem import integer, number, thread_count
from ._results import Workspace, dlpack_stream, finished, output, stream_of, working_on

_WAYS = {None: 0, "one launch": 1, "chain": 2}
# The arguments that a field of the problem comes from.
_NAMES = {"dtype": "x", "batch": "x", "hidden": "x", "weights_dtype": "w_qkv", "heads_q": "w_qkv", "heads_kv": "k_cache",
          "head_dim": "k_cache", "capacity": "k_cache", "page_size": "k_cache", "rotary_dim": "rotary_cos"}


def _is_captured(like, stream):
    """Whether PyTorch captures the stream of a call into a CUDA graph."""
    torch = sys.modules.get("torch")
    if torch is None or stream is None or not isinstance(like.source, torch.Tensor):
        return False
    with working_on(like, stream):
        return torch.cuda.is_current_stream_capturing()


class DecodeBlockWorkspace:
    """Memory on CUDA devices that calls of decode_block() share, one after another. It grows as needed.

    Calls that may run at the same time, on two streams or in two graphs, need workspaces of their own. A call that is
    captured in a CUDA graph needs one that a call of its shape has used before, since new memory is set to 0 once.
    """

    def __init__(self) -> None:
        self._memories: dict = {}  # device -> [(bytes, array)], the last one in use: a graph may have an earlier one

    def _address(self, size, like, stream):
        """The address of `size` bytes that were 0 at first, on the device of `like`."""
        alignment, memories = _native.WORKSPACE_ALIGNMENT, self._memories.setdefault(like.device, [])
        if not memories or memories[-1][0] < size:
            if _is_captured(like, stream):
                expect("workspace", "a DecodeBlockWorkspace that a call of this shape has used before the capture",
                       "one without memory for it")
            with working_on(like, stream):
                count = (size + alignment) // ITEM_SIZE[_native.INT32] + 1
                memory = output("workspace", None, like, (count,), _native.INT32, stream)
                memory.source[...] = 0
            memories.append((size, memory))
        return -(-memories[-1][1].data // alignment) * alignment


_workspaces: dict = {}  # (device, stream) -> DecodeBlockWorkspace


def _memory_of_call(workspace, info, like, stream):
    """(address of the workspace of a call, the object that owns it)."""
    if workspace is not None and not isinstance(workspace, DecodeBlockWorkspace):
        expect("workspace", "a DecodeBlockWorkspace", repr(workspace))
    if info.counter_bytes == 0:
        memory = Workspace(info.workspace_bytes, like, stream)
        return memory.address, memory
    if workspace is None:
        if _is_captured(like, stream):
            expect("workspace", "a DecodeBlockWorkspace in a CUDA graph, which replays beside other calls", "None")
        workspace = _workspaces.setdefault((like.device, stream), DecodeBlockWorkspace())
    return workspace._address(info.workspace_bytes, like, stream), workspace


def _shape(name, array, words, dimensions):
    if len(array.shape) != dimensions:
        expect(name, f"shape {words}", list(array.shape))
    return array.shape


def _problem(given, norm_eps, rotary_interleaved, window_left, scale, softcap):
    """The problem that the arrays describe."""
    problem = _native.DecodeBlockProblem()
    library = _native.library()
    _native.check(library.tessera_decode_block_problem_init(ctypes.byref(problem), ctypes.sizeof(problem)))
    x, w_qkv, k_cache = given["x"], given["w_qkv"], given["k_cache"]
    problem.dtype, problem.weights_dtype = x.dtype, w_qkv.dtype
    problem.batch, problem.hidden = _shape("x", x, "[batch, hidden]", 2)
    _, rows, problem.heads_kv, problem.head_dim = _shape(
        "k_cache", k_cache, "[pages or slots, rows, heads_kv, head_dim]", 4)
    qkv_rows, _ = _shape("w_qkv", w_qkv, "[(heads_q + 2 * heads_kv) * head_dim, hidden]", 2)
    heads = qkv_rows // max(problem.head_dim, 1)
    if heads * problem.head_dim != qkv_rows or heads <= 2 * problem.heads_kv:
        expect("w_qkv", f"rows for queries and {problem.heads_kv} heads of keys and of values of {problem.head_dim}",
               qkv_rows)
    problem.heads_q = heads - 2 * problem.heads_kv
    problem.capacity = rows
    if "page_table" in given:
        problem.page_size = rows
        problem.capacity = rows * _shape("page_table", given["page_table"], "[batch, pages of a sequence]", 2)[1]
    if "rotary_cos" in given:
        problem.rotary_dim = 2 * _shape("rotary_cos", given["rotary_cos"], "[positions, rotary_dim / 2]", 2)[1]
    problem.rotary_interleaved = int(bool(rotary_interleaved))
    for field, name in (("cache_batch_index", "cache_batch_index"), ("left_padding", "left_padding"),
                        ("sinks", "sinks"), ("qkv_bias", "b_qkv"), ("out_bias", "b_o")):
        setattr(problem, field, int(name in given))
    problem.qk_norm = int("q_norm" in given or "k_norm" in given)
    problem.norm_eps, problem.softcap = number("norm_eps", norm_eps), number("softcap", softcap)
    if window_left is not None:
        problem.window_left = integer("window_left", window_left)
    if scale is not None:
        problem.scale = number("scale", scale)
    return problem


def decode_block(x: Any, norm: Any, w_qkv: Any, w_o: Any, k_cache: Any, v_cache: Any, kv_lengths: Any, *,
                 b_qkv: Any = None, b_o: Any = None, q_norm: Any = None, k_norm: Any = None, norm_eps: float = 1e-6,
                 rotary_cos: Any = None, rotary_sin: Any = None, rotary_interleaved: bool = False,
                 positions: Any = None, page_table: Any = None, cache_batch_index: Any = None,
                 left_padding: Any = None, window_left: int | None = None, scale: float | None = None,
                 softcap: float = 0.0, sinks: Any = None, residual: Any = None, out: Any = None,
                 return_attention: bool = False, way: str | None = None, early_weights: bool = False,
                 workspace: DecodeBlockWorkspace | None = None, threads: int | None = None,
                 stream: int | None = None) -> Any:
    """The attention block of a decode step: RMS norm, GEMM to Q, K and V, rotary embedding, append to the cache,
    attention, output GEMM and residual. A chain of kernels computes it, or on CUDA one launch, if it takes the shape.

    x: [batch, hidden], one new token of each sequence, bfloat16 or float32 (CUDA: bfloat16).
    norm: [hidden], the weights of the RMS norm. w_qkv: [(heads_q + 2 heads_kv) head_dim, hidden], rows of Q, then K, then
        V, as PyTorch's Linear has them; b_qkv alike without hidden. w_o: [hidden, heads_q head_dim]; b_o: [hidden].
    k_cache, v_cache: [slots, capacity, heads_kv, head_dim], or [pages, page_size, heads_kv, head_dim] with page_table,
        int32 [batch, pages of a sequence]. They are written in place, as by append_kv().
    kv_lengths: int32 [batch], keys before the call. A sequence whose length has no place in the cache gets no new key.
    cache_batch_index: int32 [batch], slots. left_padding: int32 [batch], keys before it do not count.
    q_norm, k_norm: [head_dim], weights of an RMS norm of each head of q and k (Qwen3). norm_eps: of all norms.
    rotary_cos, rotary_sin: [positions, rotary_dim / 2]; rotary_interleaved as in append_kv(). positions: int [batch];
        default: kv_lengths.
    window_left: keys before the new one that its query sees; default: all. scale: default 1 / sqrt(head_dim).
    softcap: 0 for none. sinks: float32 [heads_q], a logit of each head in the sum of the softmax.
    residual: [batch, hidden], added to the result; default: x. out: an array for the result, which may be x or residual.
    return_attention: gives (out, o, lse) with o [batch, heads_q, head_dim] and lse float32 [batch, heads_q].
    way: "one launch" or "chain", a kernel after the other with the same bits; default: one launch where it runs.
    early_weights: on CUDA one launch may read w_qkv before the work in front of it in the stream has ended. Neither that
        work nor what it may run beside writes w_qkv.
    workspace: on CUDA, memory that calls one after another share; default: one for each stream. A call that is captured
        in a graph needs one of its own (DecodeBlockWorkspace) for one launch, and runs as the chain without.
    threads: at most; default: one per core that this process may use. stream: a cudaStream_t as a number, for arrays on
        CUDA; default: the current stream of the arrays' library. The host reads no lengths or tables there.

    There is no gradient. Roundings: docs/decode-block.md. Under torch.compile the call is the operator
    tessera::decode_block. Raises ValueError naming the argument; nothing is written then.
    """
    arrays = dict(x=x, norm=norm, w_qkv=w_qkv, w_o=w_o, b_qkv=b_qkv, b_o=b_o, q_norm=q_norm, k_norm=k_norm,
                  rotary_cos=rotary_cos, rotary_sin=rotary_sin, positions=positions, kv_lengths=kv_lengths,
                  page_table=page_table, cache_batch_index=cache_batch_index, left_padding=left_padding, sinks=sinks,
                  residual=residual)
    arrays = {name: without_gradient(name, array) for name, array in arrays.items() if array is not None}
    caches = {name: without_gradient(name, array) for name, array in (("k_cache", k_cache), ("v_cache", v_cache))}
    if way not in _WAYS:
        expect("way", "None, 'one launch' or 'chain'", repr(way))
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        from .torch._decode_block_operator import call
        return call(arrays, caches, out, return_attention, stream, workspace,
                    dict(norm_eps=norm_eps, rotary_interleaved=rotary_interleaved, window_left=window_left, scale=scale,
                         softcap=softcap, way=way, early_weights=early_weights, threads=threads))
    on_cuda = borrow("x", arrays["x"]).device[0] == _native.CUDA
    if stream is not None and not on_cuda:
        expect("stream", "None for arrays of the host", stream)
    stream = stream_of(arrays["x"], stream) if on_cuda else None
    of_dlpack = None if stream is None else dlpack_stream(stream)
    given = {name: borrow(name, array, of_dlpack) for name, array in arrays.items()}
    given.update({name: borrow(name, array, of_dlpack, written=True) for name, array in caches.items()})
    problem = _problem(given, norm_eps, rotary_interleaved, window_left, scale, softcap)
    problem.way, problem.early_weights = _WAYS[way], int(bool(early_weights))
    like = given["x"]
    if way is None and workspace is None and _is_captured(like, stream):
        problem.way = _WAYS["chain"]  # with the same bits and no memory that a replay would share with other calls
    with working_on(like, stream):
        given["out"] = output("out", out, like, like.shape, like.dtype, stream)
        if return_attention:
            shape = (problem.batch, problem.heads_q)
            given["o"] = output("o", None, like, (*shape, problem.head_dim), like.dtype, stream)
            given["lse"] = output("lse", None, like, shape, _native.FP32, stream)
    args, options = _native.sized(_native.DecodeBlockArgs), _native.sized(_native.Options)
    for name, array in given.items():
        setattr(args, name, array.tensor())
    options.threads = thread_count(threads)
    info, library = _native.sized(_native.DecodeBlockInfo), _native.library()
    _native.check(library.tessera_decode_block_query(ctypes.byref(problem), ctypes.byref(options), like.device[0],
                                                     like.device[1], ctypes.byref(info)), _NAMES)
    address, keep = _memory_of_call(workspace, info, like, stream)
    _native.check(library.tessera_decode_block(ctypes.byref(problem), ctypes.byref(options), ctypes.byref(args), address,
                                               info.workspace_bytes, stream), _NAMES)
    del keep  # it has to live until the call is queued
    result = finished(given["out"], like, out)
    if not return_attention:
        return result
    return result, finished(given["o"], like, None), finished(given["lse"], like, None)
