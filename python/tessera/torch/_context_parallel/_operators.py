# SPDX-License-Identifier: Apache-2.0
"""The operators tessera::context_parallel and its backward, which graphs of torch.compile contain.

A call runs for one group of key heads after another: K and V of the next group travel while the kernels of this one
run. Heads are independent, so no bit depends on the number of groups. Each rank computes its own rows against all keys
that they see; dK and dV of each segment of rows travel to the ranks that hold the keys, which add them in the order of
the segments' rows, in fp32."""
from __future__ import annotations

import contextlib
from typing import Optional, Tuple

import torch
from torch import Tensor

from .. import _operators
from . import _exchange, _plan, _setup
from ._setup import Settings

_FARTHEST = 2**31 - 1  # a side of a window that leaves out no key


def _mask(s: Settings, call: _plan.Call):
    """(causal, window_left, window_right) of a ragged call, whose diagonal is bottom-right. `shift` is 0 with a causal
    mask."""
    left = s.left if s.left < 0 else min(s.left + call.shift, _FARTHEST)
    right = s.right if s.right < 0 else min(s.right - call.shift, _FARTHEST)
    return 1 if s.causal else 0, left, right


def _rows(tensor, call):
    return tensor[call.rows] if isinstance(call.rows, slice) else tensor.index_select(0, call.rows)


def _arguments(q, keys, call, k, heads, s: Settings):
    """The Arguments of one ragged call. keys: its rows of K and V."""
    k_call, v_call = _exchange.halves(keys, heads, k.shape[3])
    causal, left, right = _mask(s, call)
    return _operators.Arguments(
        _rows(q, call), k_call, v_call, cu_seqlens_q=call.cu_q, cu_seqlens_kv=call.cu_kv, max_len_q=call.max_q,
        max_len_kv=call.max_kv, causal=causal, window_left=left, window_right=right, scale=s.scale, softcap=s.softcap,
        kernel=s.kernel)


def run_forward(q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor], permutation: Optional[Tensor],
            cu_seqlens: Optional[Tensor], group: str, order: str, causal: bool, left: int, right: int,
            scale: Optional[float], softcap: float, kernel: Optional[str], blocks: int, steps: int, limit: float,
            check: bool, gradients: bool, sinks_of: str, residual: bool) -> Tuple[Tensor, Tensor, Tensor]:
    s = Settings(group, order, causal, left, right, scale, softcap, kernel, blocks, steps, limit, check, gradients,
                 sinks_of, residual)
    setup = _setup.setup_of(q, k, v, permutation, cu_seqlens, s, "forward")
    batch, rows, heads_q, _ = q.shape
    q_rows, k_rows, v_rows = (t.reshape(batch * rows, *t.shape[2:]) for t in (q, k, v))
    share = heads_q // k.shape[2]
    o = q.new_empty((batch * rows, heads_q, v.shape[3]))
    lse = q.new_empty((heads_q, batch * rows), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    o_residual = torch.empty_like(o, dtype=torch.int8) if residual else o.new_empty((0,), dtype=torch.int8)
    calls = setup.plan.forward
    with setup.keys(calls, k_rows, v_rows, s, 0) as keys:
        for step in keys:
            heads = slice(step.first * share, step.last * share)
            for index, call in enumerate(calls):
                with step.call(index) as rows_of_keys:
                    a = _arguments(q_rows[:, heads], rows_of_keys, call, k, step.last - step.first, s)
                    to = o[:, heads], lse[heads], o_residual[:, heads] if residual else None
                    residual = _forward(to, a, call, None if sinks is None else sinks[heads].float()) and residual
    lse = lse.reshape(heads_q, batch, rows).transpose(0, 1).contiguous()
    # A kernel for few queries writes no residual of O. If one of the calls has none, those of the others are dropped.
    kept = o_residual.reshape(batch, rows, heads_q, -1) if residual else o.new_empty((0,), dtype=torch.int8)
    return o.reshape(batch, rows, heads_q, -1), lse, kept


def _forward(to, a, call, sinks):
    """Writes the rows of one ragged call to O, LSE and the residual of O or None. Returns whether the residual was."""
    o, lse, kept = to
    if sinks is None and isinstance(call.rows, slice):
        into = o[call.rows], lse[:, call.rows], None if kept is None else kept[call.rows]
        return _operators.forward_to(*into, *_few(a))
    if sinks is not None:
        found = _operators.attention_with_sinks(*a, sinks)
    else:
        found = (_operators.forward if kept is None else _operators.forward_with_residual)(*a)
    o[call.rows] = found[0]
    lse[:, call.rows] = found[1]
    if kept is None or found[2].numel() != found[0].numel():  # a kernel for few queries writes none
        return False
    kept[call.rows] = found[2]
    return True


forward = torch.library.custom_op("tessera::context_parallel", run_forward, mutates_args=())


@forward.register_fake
def _(q, k, v, sinks, permutation, cu_seqlens, *settings):
    _setup.checked(q, k, v)
    o = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]),
                      dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    residual = torch.empty_like(o, dtype=torch.int8) if settings[-1] else q.new_empty((0,), dtype=torch.int8)
    return o, lse, residual


def run_backward(d_o: Tensor, dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
             o_residual: Tensor, sinks: Optional[Tensor], permutation: Optional[Tensor], cu_seqlens: Optional[Tensor],
             group: str, order: str, causal: bool, left: int, right: int, scale: Optional[float], softcap: float,
             kernel: Optional[str], blocks: int, steps: int, limit: float, check: bool, gradients: bool, sinks_of: str,
             residual: bool) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    s = Settings(group, order, causal, left, right, scale, softcap, kernel, blocks, steps, limit, check, gradients,
                 sinks_of, residual)
    setup = _setup.setup_of(q, k, v, permutation, cu_seqlens, s, "backward")
    batch, rows, heads_q, _ = q.shape
    share = heads_q // k.shape[2]
    q_rows, k_rows, v_rows, o_rows, d_rows = (t.reshape(batch * rows, *t.shape[2:]) for t in (q, k, v, o, d_o))
    kept = o_residual.reshape(o_rows.shape) if o_residual.numel() else None
    of_rows = [None if t is None else t.transpose(0, 1).reshape(heads_q, batch * rows) for t in (lse, dlse)]
    if 0 in d_rows.stride():  # the gradient of a sum, which the fastest kernels do not read
        d_rows = d_rows.contiguous()
    # empty_like() would keep the strides of a transposed tensor, and the fake says contiguous.
    dq, dk, dv = (t.new_empty(t.shape) for t in (q_rows, k_rows, v_rows))
    dsinks = sinks.new_zeros(sinks.shape, dtype=torch.float32) if sinks is not None else q.new_empty((0,))
    summing, calls = None, setup.plan.backward
    with setup.keys(calls, k_rows, v_rows, s, 1) as keys, contextlib.ExitStack() as travelling:
        for number, step in enumerate(keys):
            heads = slice(step.first * share, step.last * share)
            own = [None if t is None else t[:, heads] for t in (d_rows, o_rows, kept)]
            own_lse, own_dlse = [None if t is None else t[heads] for t in of_rows]
            parts, begin = setup.parts(calls, k_rows, v_rows, step.last - step.first, number), 0
            for index, call in enumerate(calls):
                end = begin + call.keys.shape[0]
                to = dq[:, heads], *_exchange.halves(parts[begin:end], step.last - step.first, k.shape[3])
                begin = end
                with step.call(index) as rows_of_keys:
                    a = _arguments(q_rows[:, heads], rows_of_keys, call, k, step.last - step.first, s)
                    del rows_of_keys  # may be all of its memory
                    of_sinks = _gradients(to, a, call, own, own_lse, own_dlse,
                                          None if sinks is None else sinks[heads].float())
                if of_sinks is not None:
                    dsinks[heads] += of_sinks
                del a
            step.join()
            if summing is not None:
                _sum(setup.plan, summing, dk, dv)
            travelling.callback((gradients := setup.gradients(parts, number, s)).settle)
            summing = step.first, step.last, gradients
        _sum(setup.plan, summing, dk, dv)
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape), dsinks


def _gradients(to, a, call, own, lse, dlse, sinks):
    """Writes dQ, dK and dV of one ragged call to `to`, whose dQ has all rows of this rank. own: dO, O and the residual
    of O, lse, dlse: of all rows. Returns the gradient of the sinks or None."""
    d_o, o, kept = (None if t is None else _rows(t, call) for t in own)
    lse, dlse = (None if t is None else t[:, call.rows] for t in (lse, dlse))
    kernel = _operators.backward_kernel(a.kernel)
    of_sinks = None
    if sinks is not None:
        *found, _, of_sinks = _operators.attention_with_sinks_backward(
            d_o, dlse, *a[:3], o, lse.contiguous(), *a[3:16], kernel, False, False, sinks)
        for into, gradient in zip(to[1:], found[1:]):
            into.copy_(gradient)
    else:
        found = [to[0][call.rows] if isinstance(call.rows, slice) else to[0].new_empty(a.q.shape)]
        _operators.backward_to(found[0], *to[1:], d_o, dlse, *a[:3], o, lse, kept, *_few(a)[3:-1], kernel)
    if sinks is not None or not isinstance(call.rows, slice):
        to[0][call.rows] = found[0]
    return of_sinks


def _few(a):
    """The last arguments of the operators that write into tensors."""
    return (*a[:3], a.cu_seqlens_q, a.cu_seqlens_kv, a.max_len_q, a.max_len_kv, a.causal, a.window_left, a.window_right,
            a.scale, a.softcap, a.kernel)


def _sum(plan, summing, dk, dv):
    """Adds the received rows of one step in the order of the plan, in one launch, and writes dK, dV of its heads."""
    first, last, gradients = summing
    _operators.add_parts(dk[:, first:last], dv[:, first:last], gradients.finish(), plan.first, plan.sources)


backward = torch.library.custom_op("tessera::context_parallel_backward", run_backward, mutates_args=())


@backward.register_fake
def _(d_o, dlse, q, k, v, o, lse, o_residual, sinks, *rest):
    of_sinks = q.new_empty((0,)) if sinks is None else sinks.new_empty(sinks.shape, dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_sinks


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.settings = inputs[6:]
    ctx.set_materialize_grads(False)


def _registered_backward(ctx, d_o, dlse, _):
    return *_gradients_of_all(backward, ctx, d_o, dlse), *(None,) * (2 + len(ctx.settings))


def _gradients_of_all(run, ctx, d_o, dlse):
    """The gradients of q, k, v and the sinks. run: the operator, or what it runs."""
    q, k, v, sinks, permutation, cu_seqlens, o, lse, o_residual = ctx.saved_tensors
    if d_o is None:
        d_o = torch.zeros_like(o)
    dq, dk, dv, dsinks = run(d_o, dlse, q, k, v, o, lse, o_residual, sinks, permutation, cu_seqlens, *ctx.settings)
    return dq, dk, dv, None if sinks is None else dsinks.to(sinks.dtype)


class EagerContextParallel(torch.autograd.Function):
    """(o, lse) of an eager call that needs gradients. rest: the operator's arguments after the sinks in one tuple. It
    runs what the operator runs and saves the host the operator's way, which is written in Python."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, rest):
        inputs = (q, k, v, sinks, *rest)
        results = run_forward(*inputs)
        _setup_context(ctx, inputs, results)
        return results[:2]

    @staticmethod
    def backward(ctx, d_o, dlse):
        # With create_graph=True gradients are enabled here, and the operator that refuses to be differentiated runs.
        run = backward if torch.is_grad_enabled() else run_backward
        return *_gradients_of_all(run, ctx, d_o, dlse), None


forward.register_autograd(_registered_backward, setup_context=_setup_context)
backward.register_autograd(_operators.no_second_derivative)
