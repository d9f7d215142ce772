# SPDX-License-Identifier: Apache-2.0
"""attention() and attention_backward() on arrays of any library."""
from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

from . import _masks, _native
from ._arrays import ITEM_SIZE, expect
from ._problem import Call
from ._results import Workspace, finished, output, working_on

# The keywords that all functions of this package share, with their defaults.
SCORES = dict(causal=None, window=None, scale=None, softcap=0.0, alibi_slopes=None, bias=None, mask=None,
              sinks=None, dropout_p=0.0, seed=0, cu_seqlens_q=None, cu_seqlens_kv=None, max_len_q=None,
              max_len_kv=None, layout="bshd", deterministic=True, kernel=None, threads=None)


def scores_of(function: str, given: dict) -> dict:
    for name in given:
        if name not in SCORES:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; it takes {', '.join(SCORES)}")
    return {**SCORES, **given}


def attention(q: Any, k: Any, v: Any, *, causal: str | bool | None = None,
              window: tuple[int | None, int | None] | None = None, scale: float | None = None, softcap: float = 0.0,
              alibi_slopes: Any = None, bias: Any = None, mask: Any = None, sinks: Any = None, dropout_p: float = 0.0,
              seed: int = 0, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, max_len_q: int | None = None,
              max_len_kv: int | None = None, layout: str = "bshd", return_lse: bool = False,
              return_o_residual: bool = False, deterministic: bool = True, kernel: str | None = None,
              threads: int | None = None, out: Any = None, out_lse: Any = None, stream: int | None = None) -> Any:
    """O = softmax(scale Q K^T, with mask, softcap, ALiBi, bias and sinks) V, as docs/numerics.md defines it.

    q: [batch, len_q, heads_q, head_dim]; k: [batch, len_kv, heads_kv, head_dim]; v: [batch, len_kv, heads_kv,
    head_dim_v]; heads_q is a multiple of heads_kv. With layout="bhsd" heads come before len. An array [batch, heads,
    len, head_dim] often fits the default layout too, but then the heads of each token attend to one another:
    layout="bhsd" says that heads come first. Arrays of NumPy or of any library with DLPack, in host or CUDA memory;
    float32, bfloat16, float16 or float64 (by the reference); any strides. They are never written and never copied.
    Classes that hide or reinterpret elements (masked arrays) are refused.

    causal: None, "bottom-right" (the last query sees the last key) or "top-left" (the first query, the first key).
    window: (left, right), inclusive, relative to the bottom-right diagonal; None in it: no limit on that side.
    scale: default 1 / sqrt(head_dim). softcap: 0 for none. alibi_slopes: float32 [heads_q] or [batch, heads_q].
    bias: broadcasts to [batch, heads_q, len_q, len_kv]; float32 or the dtype of q; added to the scores.
    mask: bool, True where the key takes part; broadcasts likewise. It becomes a bias of 0 and -inf in the dtype of q,
        or joins `bias`; dimensions that it repeats (stride 0) take no memory.
    sinks: float32 [heads_q], a logit of each query head that takes part in the softmax as a key without a value.
    dropout_p, seed: dropout on the weights; the same seed, an integer of 64 bits, drops the same weights, also in
    attention_backward().
    cu_seqlens_q, cu_seqlens_kv: int32 or int64 [batch + 1], for ragged batches: then q is [total_q, heads_q, head_dim],
    k and v alike ("bhsd": heads first), and max_len_q, max_len_kv are bounds of the lengths (default: the totals). Rows
    past the last offset belong to no sequence: O is 0 and LSE -inf there; in `out`, `out_lse` and on CUDA they are
        not written.
    return_lse: also LSE, float32 [batch, heads_q, len_q] or [heads_q, total_q], natural logarithm (float64 for
        float64).
    return_o_residual: the last result, the low-order bits of O that rounding takes off, int8 of the shape of O. It
    makes attention_backward() faster. None where the kernel does not write it: CUDA's do in 16 bits (docs/numerics.md).
    deterministic: every kernel of tessera gives the same bits in every run, so both values mean the same.
    kernel: a name of `tessera list`, with or without its pass ("cpu.fa2", "reference"); default: plan()'s choice.
    threads: number of host threads; default: one per core that this process may use. CUDA kernels use none.
    out, out_lse: arrays to write O and LSE to, of their shapes and dtypes, sharing memory with no other argument.
    stream: a cudaStream_t as a number, for arrays on CUDA; default: the current stream of the arrays' library.

    Returns O, [batch, len_q, heads_q, head_dim_v] in the layout and library of q; with LSE or the residual a tuple.
    Raises ValueError naming the argument, what was expected and what came; tessera.Unsupported (a ValueError) when the
    options leave no kernel; tessera.DeviceUnavailable; MemoryError.
    """
    call = Call(q, k, v, {name: value for name, value in locals().items() if name in SCORES}, stream=stream)
    with working_on(call.q, stream):
        o = output("out", out, call.q, _shape_of_o(call), call.q.dtype, call.stream)
        lse = None
        if return_lse or out_lse is not None:
            lse = output("out_lse", out_lse, call.q, _shape_of_lse(call), _lse_dtype(call), call.stream)
        tensors = {**call.inputs, "o": call.laid_out(o)}
        if lse is not None:
            tensors["lse"] = lse.tensor()
        if return_o_residual and _plan_info(call).o_residual:
            o_residual = output("o_residual", None, call.q, o.shape, _native.INT8, call.stream)
            tensors["o_residual"] = call.laid_out(o_residual)
        if call.ragged and call.q.device[0] == _native.CPU:
            _fill_rows_behind(call, {"o": out, "lse": out_lse, "o_residual": None}, tensors)
        args = _native.sized(_native.ForwardArgs)
        _run(call, args, tensors)
    results = [finished(o, call.q, out)]
    if return_lse:
        results.append(finished(lse, call.q, out_lse))
    if return_o_residual:
        results.append(finished(o_residual, call.q, None) if args.o_residual.rank else None)
    return tuple(results) if len(results) > 1 else results[0]


def attention_backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, dlse: Any = None, o_residual: Any = None,
                       bias_gradient: bool = False, sinks_gradient: bool = False, out: Sequence[Any] | None = None,
                       stream: int | None = None, **scores: Any) -> tuple[Any, ...]:
    """The gradients of attention() for the gradient `do` of O and `dlse` of LSE.

    q, k, v, the layout and all other keywords: as for attention(). o, lse: its results. do: shape of o, any strides.
    dlse: shape of lse; default: 0. o_residual: its result or None; it makes the call faster. out: (dq, dk, dv), arrays
    to write to. bias_gradient, sinks_gradient: whether to compute the gradient of the bias and of the sinks.

    Returns (dq, dk, dv), then dbias and dsinks where they are asked for, of the shapes and dtypes of q, k, v, the bias
    and the sinks. The gradient of a bias is summed over its dimensions of size 1; a mask has none. Raises as
    attention() does.
    """
    scores = scores_of("attention_backward", scores)
    if bias_gradient and scores["bias"] is None:
        expect("bias_gradient", "False, since there is no bias", "True")
    if sinks_gradient and scores["sinks"] is None:
        expect("sinks_gradient", "False, since there are no sinks", "True")
    call = Call(q, k, v, scores, backward=True, stream=stream, bias_gradient=bias_gradient)
    given = (None,) * 3 if out is None else tuple(out)
    if len(given) != 3:
        expect("out", "(dq, dk, dv)", f"{len(given)} arrays")
    tensors = dict(call.inputs)
    for name, source in (("d_o", do), ("o", o), *([] if o_residual is None else [("o_residual", o_residual)])):
        tensors[name] = call.laid_out(call.borrow("do" if name == "d_o" else name, source))
    for name, source in (("lse", lse), ("dlse", dlse)):
        if source is not None or name == "lse":
            tensors[name] = call.borrow(name, source).tensor()
    with working_on(call.q, stream):
        gradients = []
        for name, source, array in zip(("dq", "dk", "dv"), (call.q, call.k, call.v), given):
            gradients.append(output(name, array, source, source.shape, source.dtype, call.stream))
            tensors[name] = call.laid_out(gradients[-1])
        if bias_gradient:
            of_call = call.bias if call.made_bias is None else call.made_bias
            dbias = output("dbias", None, of_call, of_call.shape, of_call.dtype, call.stream)
            tensors["dbias"] = dbias.padded().tensor()
        if sinks_gradient:
            dsinks = output("dsinks", None, call.sinks, call.sinks.shape, call.sinks.dtype, call.stream)
            tensors["dsinks"] = dsinks.tensor()
        _run(call, _native.sized(_native.BackwardArgs), tensors)
        if bias_gradient and call.made_bias is not None:
            dbias = _masks.gradient_of(call.bias, call.made_bias, dbias, stream)
    results = [finished(g, call.q, array) for g, array in zip(gradients, given)]
    if bias_gradient:
        results.append(finished(dbias, call.bias, None))
    if sinks_gradient:
        results.append(finished(dsinks, call.sinks, None))
    return tuple(results)


def _fill_rows_behind(call: Call, given: dict, tensors: dict) -> None:
    """Gives rows past the last sequence O = 0 and LSE = -inf in new results: no kernel writes them."""
    cu, total = call.inputs["cu_seqlens_q"], call.problem.total_q
    if cu.dtype not in (_native.INT32, _native.INT64) or call.problem.batch < 0:
        return  # an error of the call
    kind = ctypes.c_int32 if cu.dtype == _native.INT32 else ctypes.c_int64
    last = kind.from_address(cu.data + call.problem.batch * cu.strides[0] * ctypes.sizeof(kind)).value
    if not 0 <= last < total:
        return
    for name in ("o", "o_residual"):
        if name not in tensors or given[name] is not None:
            continue
        t = tensors[name]  # [total_q, heads_q, head_dim_v], whose last dimension is dense
        item = ITEM_SIZE[t.dtype]
        for row in range(last, total):
            for head in range(t.shape[1]):
                ctypes.memset(t.data + (row * t.strides[0] + head * t.strides[1]) * item, 0, t.shape[2] * item)
    if "lse" in tensors and given["lse"] is None:
        t = tensors["lse"]
        kind = ctypes.c_double if t.dtype == _native.FP64 else ctypes.c_float
        for head in range(t.shape[0]):
            start = t.data + (head * t.strides[0] + last) * ctypes.sizeof(kind)
            (kind * (total - last)).from_address(start)[:] = [-math.inf] * (total - last)


def _run(call: Call, args, tensors: dict) -> None:
    """Runs plan()'s kernel, or the next one if it refuses the strides or the alignment of these arrays."""
    for name, tensor in tensors.items():
        setattr(args, name, tensor)
    try:
        _run_planned(call, args)
    except _native.Unsupported:
        following = None if call.options.kernel else _next_kernel(call)
        if following is None:
            raise
        call.options.kernel = following
        if not call.backward and args.o_residual.rank and not _plan_info(call).o_residual:
            args.o_residual = _native.Tensor()
        _run_planned(call, args)


def _run_planned(call: Call, args) -> None:
    library, problem, options = _native.library(), ctypes.byref(call.problem), ctypes.byref(call.options)
    size = ctypes.c_size_t()
    _native.check(library.tessera_workspace_bytes(problem, options, call.pass_code(), ctypes.byref(size)))
    workspace = Workspace(size.value, call.q, call.stream)
    function = library.tessera_backward if call.backward else library.tessera_forward
    names = {} if call.backward else {"o": "out", "lse": "out_lse"}
    _native.check(function(problem, options, ctypes.byref(args), workspace.address, size.value, call.stream), names)


def _plan_info(call: Call) -> _native.PlanInfo:
    """The plan of the call; all zero when there is none, for which running the call raises the error."""
    info = _native.sized(_native.PlanInfo)
    planned = ctypes.byref(call.problem), ctypes.byref(call.options), call.pass_code()
    return info if _native.library().tessera_plan_query(*planned, ctypes.byref(info)) == 0 else _native.PlanInfo()


def _next_kernel(call: Call):
    """The name of the next kernel after the plan's that can run the problem; None when there is none."""
    planned = ctypes.byref(call.problem), ctypes.byref(call.options), call.pass_code()
    for index in range(_plan_info(call).refused):
        refusal = _native.sized(_native.Refusal)
        _native.check(_native.library().tessera_plan_refusal(*planned, index, ctypes.byref(refusal)))
        if refusal.capable:
            return refusal.kernel
    return None


def _shape_of_o(call: Call):
    return (*call.q.shape[:-1], call.v.shape[-1])


def _shape_of_lse(call: Call):
    p = call.problem
    return (p.heads_q, p.total_q) if p.ragged else (p.batch, p.heads_q, p.len_q)


def _lse_dtype(call: Call) -> int:
    return _native.FP64 if call.q.dtype == _native.FP64 else _native.FP32
