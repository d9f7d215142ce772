# SPDX-License-Identifier: Apache-2.0
"""Reports what a call would do, without a group and without tensors."""
from __future__ import annotations

import typing

import torch

from . import _exchange, _order, _plan, _setup


class ContextParallelPlan(typing.NamedTuple):
    """The work of one rank in a call of context_parallel_attention()."""
    way: str  # "gather": all of K and V; "exchange": the rows that a rank needs
    steps: int  # groups of key heads, forward
    backward_steps: int
    calls: int  # ragged calls of a step, forward
    backward_calls: int
    pairs: int  # of a query and a key that it sees, for each head
    busiest: float  # the pairs of the busiest rank, divided by the mean of all: 1 is perfect balance
    bytes_forward: int  # that this rank receives
    bytes_backward: int
    memory_forward: int  # bytes beside the tensors of the call, at most
    memory_backward: int
    whole: int  # bytes of K and V of the whole sequence, to compare the memory with


def plan_of(total: int, ranks: int, heads_kv: int, head_dim: int, *, rank: int = 0, batch: int = 1,
            head_dim_v: typing.Optional[int] = None, dtype: torch.dtype = torch.bfloat16, order: typing.Any = "zigzag",
            causal: bool = True, window: typing.Optional[typing.Tuple[typing.Optional[int], typing.Optional[int]]] = None,
            cu_seqlens: typing.Any = None, gradient_blocks: typing.Optional[int] = None,
            steps: typing.Optional[int] = None) -> ContextParallelPlan:
    """The work of `rank` of `ranks` in a call on a sequence of `total` rows. Needs no group and runs nothing.

    Steps and memory are those of an exchange by collectives, NCCL's or gloo's; docs/context-parallel.md says what copies
    between the GPUs of a host take. steps: default: that of CUDA for these bytes. The other arguments are those of
    context_parallel_attention() and the sizes of its tensors. Raises ValueError."""
    from .. import _attention
    left, right = _attention.window_sides(window)
    if causal and right > 0:
        right = -1
    for argument, value in (("total", total), ("ranks", ranks), ("heads_kv", heads_kv), ("head_dim", head_dim),
                            ("batch", batch), ("head_dim_v", head_dim_v), ("gradient_blocks", gradient_blocks),
                            ("steps", steps)):
        if value is not None or argument in ("total", "ranks", "heads_kv", "head_dim", "batch"):
            _order.whole_number(argument, value, 1)
    _order.whole_number("rank", rank, 0)
    if batch != 1 and cu_seqlens is not None:
        raise ValueError(f"batch: expected 1 with cu_seqlens, got {batch}")
    if rank >= ranks:
        raise ValueError(f"rank: expected one of {ranks} ranks, got {rank}")
    _order.positions_of(order, total, ranks, "total")
    name = order if isinstance(order, str) else _setup.bytes_of(_order.tensor_of(order))
    offsets = None if cu_seqlens is None else tuple(_order.offsets_of(cu_seqlens, total))
    layout = _plan.Layout(total, batch, ranks, name, offsets, bool(causal), left, right, gradient_blocks or 0)
    plan = _plan.plan(layout, rank)
    width = (head_dim + (head_dim_v or head_dim)) * torch.empty((), dtype=dtype).element_size()  # of a row of one head
    own = plan.rows * batch
    both = [_setup.steps_of(heads_kv, own * heads_kv * width, steps, which, False) for which in (0, 1)]
    most = [max(last - first for first, last in heads) * width for heads in both]
    memory = []
    for calls, heads in zip((plan.forward, plan.backward), both):
        received, count, copies, twins = _exchange.buffers_of(plan, calls, own, ranks, len(heads))
        at_once = twins * sum(copies) if copies else max(call.keys.shape[0] for call in calls)
        memory.append(received * count + at_once)
    sent, arrived = plan.parts.shape[0], sum(plan.parts_received) if ranks > 1 else 0
    parts = sum(call.keys.shape[0] for call in plan.backward)
    memory[1] += parts + sent + arrived
    received = own * (ranks - 1) if plan.send is None else sum(plan.received) - plan.received[rank]
    pairs = _pairs(layout)
    return ContextParallelPlan(
        "gather" if plan.send is None else "exchange", len(both[0]), len(both[1]), len(plan.forward), len(plan.backward),
        int(pairs[rank]), float(pairs.max() / pairs.double().mean()), received * heads_kv * width,
        (received + arrived - (plan.parts_received[rank] if ranks > 1 else 0)) * heads_kv * width,
        memory[0] * most[0], memory[1] * most[1], total * batch * heads_kv * width)


def _pairs(layout):
    """Visible pairs of each rank, int64 [ranks]."""
    positions = _plan.positions_of(layout)
    offsets = [0, layout.total] if layout.offsets is None else [*layout.offsets]
    starts = torch.tensor(offsets, dtype=torch.int64)
    rows = torch.arange(layout.total)
    document = torch.searchsorted(starts, rows, right=True) - 1
    behind = document >= len(offsets) - 1
    document = document.clamp(max=len(offsets) - 2)
    first, last = starts[document], starts[document + 1]
    if layout.left >= 0:
        first = torch.maximum(first, rows - layout.left)
    right = 0 if layout.causal else layout.right
    if right >= 0:
        last = torch.minimum(last, rows + min(right, layout.total) + 1)
    pairs = torch.where(behind, 0, last - first) * layout.batch
    return pairs[positions].sum(1)
