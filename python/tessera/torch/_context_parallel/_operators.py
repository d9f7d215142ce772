# SPDX-License-Identifier: Apache-2.0
"""The operators tessera::context_parallel and its backward, which graphs of torch.compile contain.

A call runs for one group of key heads after another: K and V of the next group travel while the kernels of this one
run. Heads are independent, so no bit depends on the number of groups. Each rank computes its own rows against all keys
that they see; dK and dV of each segment of rows travel to the ranks that hold the keys, which add them in the order of
the segments' rows, in fp32."""
from __future__ import annotations

import contextlib
import typing
import zlib
from typing import Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import _operators
from . import _exchange, _groups, _order, _peer_exchange, _peers, _plan

FUNCTION = "context_parallel_attention"
# Groups of key heads on CUDA, by the bytes of a rank's K and V from which on they are made, forward and backward. More
# groups hide more and need less memory, and make smaller calls. On two H200 (32/8 heads of 128, causal), 1, 2 and 4 calls
# for 8,192 rows of a rank take 1.67, 1.69 and 1.72 ms forward, and 5.2, 5.6 and 5.9 ms backward.
_STEPS = ((256 << 20, 8), (64 << 20, 4), (16 << 20, 2)), ((512 << 20, 8), (256 << 20, 4))
_GROWING = 32 << 20, 256 << 20  # bytes between which three steps of growing size are made where ranks copy
_LARGEST = torch.finfo(torch.float32).max
_FARTHEST = 2**31 - 1  # a side of a window that leaves out no key


class Settings(typing.NamedTuple):
    """The arguments of the operators after the tensors."""
    group: str  # the name of _groups.name_of()
    order: str  # "" with a permutation
    causal: bool
    left: int
    right: int
    scale: Optional[float]
    softcap: float
    kernel: Optional[str]
    blocks: int
    steps: int
    limit: float
    check: bool
    gradients: bool  # whether a backward may follow
    sinks: str  # "" or the shape and the dtype of the sinks, which no operator gets on CUDA
    residual: bool  # whether the forward keeps the residual of O


_setups: dict = {}  # what a kind of call on CUDA needs -> its _Setup
_values = WeakIdKeyDictionary()  # tensor -> (its version, its bytes)
_groups.on_forget(lambda name: _setups.clear())


class _Setup(typing.NamedTuple):
    plan: _plan.Plan
    collectives: _exchange.Collectives
    heads: list  # (first, last) key heads of each step
    peers: typing.Optional[_peers.Peers]  # None: by collectives
    copies: typing.Optional[_peers.Copies]

    def keys(self, calls, k, v, s, passing):
        """A context in which K and V of all ranks come, one step after another. passing: 0 forward, 1 backward."""
        if self.peers is None:
            return _exchange.steps(self.collectives, self.plan, calls, k, v, self.heads)
        return contextlib.closing(iter(_peer_exchange.PeerKeys(
            self.peers, self.copies.keys[passing], calls, k, v, self.heads, passing == 1, s.limit)))

    def parts(self, calls, k, v, heads, step):
        """Memory for dK and dV of a step's calls, [rows, width]."""
        rows, width = sum(call.keys.shape[0] for call in calls), heads * (k.shape[2] + v.shape[2])
        if self.peers is None:
            return k.new_empty((rows, width))
        return self.peers.rows(self.peers.rank, self.peers.parts(step), rows, width, k.dtype)

    def gradients(self, parts, step, s):
        """What brings dK and dV of a step to the ranks that hold the keys."""
        if self.peers is None:
            return _exchange.Gradients(self.collectives, self.plan, parts)
        return _peer_exchange.PeerGradients(self.peers, self.copies, self.peers.parts(step), parts, s.limit,
                                            step + 1 == len(self.heads))


def digest(values):
    """What stands for long values in a message."""
    if values is None:
        return None
    return [len(values), zlib.crc32(values if isinstance(values, bytes) else repr(values).encode())]


def _checked(q, k, v):
    """Raises ValueError naming the tensor whose shape or dtype does not fit the others."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name}: expected [batch, rows of this rank, heads, head_dim], got {list(tensor.shape)}")
        if tensor.shape[:2] != q.shape[:2]:
            raise ValueError(f"{name}: expected as many rows as q, {list(q.shape[:2])} (batch, rows of this rank), got "
                             f"{list(tensor.shape[:2])}")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name}: expected {q.dtype}, the dtype of q, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, where q is, got one on {tensor.device}")
    if q.shape[1] == 0:
        raise ValueError(f"q: expected rows on every rank, got {list(q.shape)}")
    if k.shape[2] != v.shape[2] or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"k: expected as many heads as v and a divisor of the {q.shape[2]} heads of q, got {k.shape[2]} "
                         f"heads, and {v.shape[2]} of v")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k: expected head_dim {q.shape[3]}, as q has, got {k.shape[3]}")
    for name, tensor in (("q", q), ("v", v)):
        if tensor.shape[3] == 0:
            raise ValueError(f"{name}: expected head_dim from 1 on, got {list(tensor.shape)}")
    if q.shape[0] == 0:
        raise ValueError(f"q: expected a batch from 1 on, got {list(q.shape)}")


def _numbers(s):
    """Raises ValueError for a scale or softcap that no kernel takes."""
    if s.scale is not None and not abs(s.scale) <= _LARGEST:
        raise ValueError(f"scale: expected None or a number that is finite in fp32, got {s.scale}")
    if not 0 <= s.softcap <= _LARGEST:
        raise ValueError(f"softcap: expected a number from 0 on that is finite in fp32, got {s.softcap}")


def _capturing(device):
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def steps_of(heads, size, wanted, passing, copied):
    """The key heads of each step, (first, last). size: the bytes of a rank's K and V on CUDA, 0 on the CPU. passing: 0
    forward, 1 backward. copied: whether ranks copy from each other."""
    if not wanted and copied and passing == 0 and heads >= 8 and _GROWING[0] <= size < _GROWING[1]:
        # The first step's exchange is not hidden, so it is small, and each step hides that of a larger one.
        return [(0, heads // 8), (heads // 8, heads * 3 // 8), (heads * 3 // 8, heads)]
    if not wanted:
        wanted = next((steps for least, steps in _STEPS[passing] if size >= least), 1)
    count = min(wanted, heads)
    cuts = [heads * i // count for i in range(count + 1)]
    return list(zip(cuts, cuts[1:]))


def _setup(q, k, v, permutation, cu_seqlens, s: Settings, passing):
    """The _Setup of a call, after all ranks have agreed on it. A call of a known kind takes that of the one before it:
    with few rows the host would be slower than the kernels."""
    group, key = _groups.by_name(s.group), None
    if q.is_cuda and not s.check:
        key = (s, passing, *((t.shape, t.dtype, t.device) for t in (q, k, v)),
               *(None if t is None else values_of(t) for t in (permutation, cu_seqlens)))
        made = _setups.get(key)
        if made is not None and made.collectives.group is group:
            return made
    made = _made(q, k, v, permutation, cu_seqlens, s, passing, group)
    if key is not None:
        if len(_setups) >= 16:
            _setups.pop(next(iter(_setups)))
        _setups[key] = made
    return made


def values_of(tensor):
    """The bytes of a tensor of integers, kept as long as it lives: reading it from a GPU would wait."""
    if tensor.is_inference():
        return tensor.cpu().long().numpy().tobytes()
    version, values = _values.get(tensor, (None, None))
    if version != tensor._version:
        values = tensor.detach().cpu().long().numpy().tobytes()
        _values[tensor] = tensor._version, values
    return values


def _made(q, k, v, permutation, cu_seqlens, s: Settings, passing, group):
    """The _Setup of a call of a new kind."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    error, layout, plan = None, None, None
    try:
        _checked(q, k, v)
        _numbers(s)
        total = q.shape[1] * ranks
        offsets = None if cu_seqlens is None else tuple(_order.offsets_of(cu_seqlens, total))
        if offsets is not None and q.shape[0] != 1:
            raise ValueError(f"q: expected batch 1 with cu_seqlens, got {q.shape[0]}")
        order = s.order if permutation is None else bytes_of(permutation)
        layout = _plan.Layout(total, q.shape[0], ranks, order, offsets, s.causal, s.left, s.right, s.blocks)
        if _capturing(q.device) and not _plan.is_made(layout, rank, q.device):
            raise ValueError("q: expected a call of these sizes, order and documents that ran outside of a graph's "
                             "capture first, since its plan is copied to the device")
        plan = _plan.plan_on(layout, rank, q.device)
    except ValueError as found:
        error = str(found)
    shapes = {name: [list(t.shape), str(t.dtype).removeprefix("torch."), t.device.type]
              for name, t in (("q", q), ("k", k), ("v", v))}
    message = {
        "error": error, "pass": passing, **shapes, "order": s.order or digest(layout and layout.order),
        "cu_seqlens": digest(layout and layout.offsets), "causal": s.causal, "window": [s.left, s.right],
        "scale": s.scale, "softcap": s.softcap, "kernel": s.kernel, "sinks": s.sinks or None,
        "needs gradients": s.gradients, "gradient_blocks": s.blocks, "steps": s.steps}
    _groups.agree(s.group, message, s.limit, FUNCTION, s.check or q.device.type == "cpu")
    collectives = _exchange.Collectives(group, q.device, s.limit, FUNCTION)
    size = (k.numel() + v.numel()) * k.element_size() if k.is_cuda else 0
    peers = _peers.of_group(s.group, q.device) if ranks > 1 else None
    copies = _peers.copies_on(layout, rank, q.device) if peers is not None else None
    both = [steps_of(k.shape[2], size, s.steps, which, copies is not None) for which in (0, 1)]
    heads = both[passing == "backward"]
    if copies is None:
        return _Setup(plan, collectives, heads, None, None)
    # A backward's memory is made in the forward: making it waits for all ranks.
    row = (k.shape[3] + v.shape[3]) * k.element_size() * max(last - first for first, last in both[1])
    peers.reserve((k.numel() + v.numel()) * k.element_size(), copies.most_parts * row if s.gradients else 0)
    return _Setup(plan, collectives, heads, peers, copies)


def bytes_of(permutation):
    """A permutation as _plan.Layout has it. Raises ValueError."""
    if permutation.dtype not in (torch.int32, torch.int64) or permutation.dim() != 1:
        raise ValueError(f"order: expected int64 [total], got {permutation.dtype} {list(permutation.shape)}")
    return values_of(permutation)


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
    setup = _setup(q, k, v, permutation, cu_seqlens, s, "forward")
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
    # A kernel for few queries writes none, and then no call's counts.
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
    _checked(q, k, v)
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
    setup = _setup(q, k, v, permutation, cu_seqlens, s, "backward")
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
