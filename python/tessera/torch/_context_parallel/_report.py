# SPDX-License-Identifier: Apache-2.0
"""Reports what a call would do, without a group and without tensors."""
from __future__ import annotations

import os
import typing

import torch

from . import _exchange, _order, _peer_exchange, _peers, _plan, _predicted, _setup


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
    by: str  # "copies" between the GPUs of a host, or "collectives": NCCL's, or gloo's
    ms_forward: typing.Optional[float]  # predicted, of the rank that is done last; None where there is no prediction
    ms_backward: typing.Optional[float]


def plan_of(total: int, ranks: int, heads_kv: int, head_dim: int, *, rank: int = 0, batch: int = 1,
            head_dim_v: typing.Optional[int] = None, dtype: torch.dtype = torch.bfloat16, order: typing.Any = "zigzag",
            causal: bool = True, window: typing.Optional[typing.Tuple[typing.Optional[int], typing.Optional[int]]] = None,
            cu_seqlens: typing.Any = None, gradient_blocks: typing.Optional[int] = None,
            steps: typing.Optional[int] = None, copies: typing.Optional[bool] = None,
            heads_q: typing.Optional[int] = None, device: typing.Optional[str] = None) -> ContextParallelPlan:
    """The work of `rank` of `ranks` in a call on a sequence of `total` rows. Needs no group and runs nothing.

    steps: default: that of CUDA for these bytes. copies: whether the ranks are GPUs of one host that copy from each
        other; default: whether this machine has so many that can, and TESSERA_PEER_COPIES is not 0. Runs that are too
        many go by collectives nevertheless: `by` of the result. With copies the memory is in part shared by the ranks
        and serves all layers (docs/context-parallel.md).
    heads_q: query heads, for the prediction; default: heads_kv. device: the GPU that is predicted, by its name in
        `tessera machine`, such as "h200"; default: the current one, if PyTorch sees one. The prediction is that of
        `tessera roofline --gpus` over NVLink. There is none for a GPU that it does not know, gradient_blocks, steps that
        are given, and orders other than its own.
    The other arguments are those of context_parallel_attention() and the sizes of its tensors. Raises ValueError."""
    from .. import _attention
    left, right = _attention.window_sides(window)
    if causal and right > 0:
        right = -1
    for argument, value in (("total", total), ("ranks", ranks), ("heads_kv", heads_kv), ("head_dim", head_dim),
                            ("batch", batch), ("head_dim_v", head_dim_v), ("gradient_blocks", gradient_blocks),
                            ("steps", steps), ("heads_q", heads_q)):
        if value is not None or argument in ("total", "ranks", "heads_kv", "head_dim", "batch"):
            _order.whole_number(argument, value, 1)
    _order.whole_number("rank", rank, 0)
    if batch != 1 and cu_seqlens is not None:
        raise ValueError(f"batch: expected 1 with cu_seqlens, got {batch}")
    if rank >= ranks:
        raise ValueError(f"rank: expected one of {ranks} ranks, got {rank}")
    if heads_q is not None and heads_q % heads_kv:
        raise ValueError(f"heads_q: expected a multiple of the {heads_kv} heads of k, got {heads_q}")
    _order.positions_of(order, total, ranks, "total")
    name = order if isinstance(order, str) else _setup.bytes_of(_order.tensor_of(order))
    offsets = None if cu_seqlens is None else tuple(_order.offsets_of(cu_seqlens, total))
    layout = _plan.Layout(total, batch, ranks, name, offsets, bool(causal), left, right, gradient_blocks or 0)
    plan = _plan.plan(layout, rank)
    of_ranks = _peers.copies(layout) if ranks > 1 and (_reach_each_other(ranks) if copies is None else copies) else None
    width = (head_dim + (head_dim_v or head_dim)) * torch.empty((), dtype=dtype).element_size()  # of a row of one head
    own = plan.rows * batch
    both = [_setup.steps_of(heads_kv, own * heads_kv * width, steps, which, of_ranks is not None) for which in (0, 1)]
    if of_ranks is None:
        memory = _memory_of_collectives(plan, both, own, ranks, width)
    else:
        memory = _memory_of_copies(plan, of_ranks[rank], both, own * heads_kv * width, width)
    arrived = sum(plan.parts_received) if ranks > 1 else 0
    ms = [None, None]
    if steps is None and gradient_blocks is None:
        ms = _predicted.milliseconds(total, ranks, batch, (heads_q or heads_kv, heads_kv), (head_dim, head_dim_v or head_dim),
                                     dtype, order, causal, (left, right), cu_seqlens, of_ranks is not None, device)
    received = own * (ranks - 1) if plan.send is None else sum(plan.received) - plan.received[rank]
    pairs = _pairs(layout)
    return ContextParallelPlan(
        "gather" if plan.send is None else "exchange", len(both[0]), len(both[1]), len(plan.forward), len(plan.backward),
        int(pairs[rank]), float(pairs.max() / pairs.double().mean()), received * heads_kv * width,
        (received + arrived - (plan.parts_received[rank] if ranks > 1 else 0)) * heads_kv * width,
        *memory, total * batch * heads_kv * width, "collectives" if of_ranks is None else "copies", *ms)


def _reach_each_other(ranks):
    """Whether this machine has so many GPUs that can copy from each other, as _peers asks."""
    if os.environ.get("TESSERA_PEER_COPIES", "1") == "0" or not torch.cuda.is_available():
        return False
    count = torch.cuda.device_count()
    return count >= ranks and all(torch.cuda.can_device_access_peer(0, other) for other in range(1, count))


def _memory_of_collectives(plan, heads_of_passes, own, ranks, width):
    """Bytes forward and backward. width: of a row of one head; own: rows of a rank."""
    memory = []
    for calls, heads in zip((plan.forward, plan.backward), heads_of_passes):
        received, count, copies, twins = _exchange.buffers_of(plan, calls, own, ranks, len(heads))
        at_once = twins * sum(copies) if copies else max(call.keys.shape[0] for call in calls)
        memory.append(received * count + at_once)
    sent, arrived = plan.parts.shape[0], sum(plan.parts_received) if ranks > 1 else 0
    memory[1] += sum(call.keys.shape[0] for call in plan.backward) + sent + arrived
    return [rows * width * max(last - first for first, last in heads) for rows, heads in zip(memory, heads_of_passes)]


def _memory_of_copies(plan, copies, heads_of_passes, own, width):
    """Bytes forward and backward: the keys of calls, shared memory of K and V of two calls, and for the backward shared
    memory of dK and dV of two steps, and received rows of one. own: bytes of a rank's K and V."""
    memory = []
    for calls, heads in zip((plan.forward, plan.backward), heads_of_passes):
        rows, most = sum(call.keys.shape[0] for call in calls), max(last - first for first, last in heads)
        kept = heads[-1][1] if len(heads) <= _peer_exchange._MOST_SETS else 2 * most
        memory.append(rows * kept * width + 2 * own)
    received = sum(run.rows for run in copies.parts)
    memory[1] += (2 * copies.most_parts + received) * most * width
    return memory


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
