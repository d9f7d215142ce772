# SPDX-License-Identifier: Apache-2.0
"""Prepares a call of the operators, after all ranks have agreed on it: the plan, the steps, and how rows are
exchanged."""
from __future__ import annotations

import contextlib
import typing
import zlib
from typing import Optional

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from . import _exchange, _groups, _order, _peer_exchange, _peers, _plan

FUNCTION = "context_parallel_attention"
# Groups of key heads on CUDA, by the bytes of a rank's K and V from which on they are made, forward and backward. More
# groups hide more and need less memory, and make smaller calls. On two H200 (32/8 heads of 128, causal), 1, 2 and 4 calls
# for 8,192 rows of a rank take 1.67, 1.69 and 1.72 ms forward, and 5.2, 5.6 and 5.9 ms backward.
_STEPS = ((256 << 20, 8), (64 << 20, 4), (16 << 20, 2)), ((512 << 20, 8), (256 << 20, 4))
_GROWING = 32 << 20, 256 << 20  # bytes between which three steps of growing size are made where ranks copy
_LARGEST = torch.finfo(torch.float32).max


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


setups: dict = {}  # what a kind of call on CUDA needs -> its Setup
_values = WeakIdKeyDictionary()  # tensor -> (its version, its bytes)
_captured: dict = {}  # id -> the Setup of a call in a CUDA graph, whose replays read its tensors
_groups.on_forget(lambda name: (setups.clear(), _captured.clear()))


class Setup(typing.NamedTuple):
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
        return self.peers.rows(self.peers.rank, self.peers.gradients(step), rows, width, k.dtype)

    def gradients(self, parts, step, s):
        """Makes the exchange that sends dK and dV of a step to the ranks that hold the keys."""
        if self.peers is None:
            return _exchange.Gradients(self.collectives, self.plan, parts)
        return _peer_exchange.PeerGradients(self.peers, self.copies, self.peers.gradients(step), parts, s.limit,
                                            step + 1 == len(self.heads))


def digest(values):
    """A short stand-in for long values in a message: their number and checksum."""
    if values is None:
        return None
    return [len(values), zlib.crc32(values if isinstance(values, bytes) else repr(values).encode())]


def checked(q, k, v):
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


def capturing(device):
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


def setup_of(q, k, v, permutation, cu_seqlens, s: Settings, passing):
    """The Setup of a call, after all ranks have agreed on it. A call of a known kind takes that of the one before it:
    with few rows the host would be slower than the kernels."""
    group, key = _groups.by_name(s.group), None
    if q.is_cuda and not s.check:
        key = (s, passing, *((t.shape, t.dtype, t.device) for t in (q, k, v)),
               *(None if t is None else values_of(t) for t in (permutation, cu_seqlens)))
        made = setups.get(key)
        if made is not None and made.collectives.group is group:
            return _kept(made, q.device)
    made = _kept(_made(q, k, v, permutation, cu_seqlens, s, passing, group), q.device)
    if key is not None:
        if len(setups) >= 16:
            setups.pop(next(iter(setups)))
        setups[key] = made
    return made


def _kept(made, device):
    if capturing(device):
        _captured[id(made)] = made
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
    """The Setup of a call of a new kind."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    error, layout, plan = None, None, None
    try:
        checked(q, k, v)
        _numbers(s)
        total = q.shape[1] * ranks
        offsets = None if cu_seqlens is None else tuple(_order.offsets_of(cu_seqlens, total))
        if offsets is not None and q.shape[0] != 1:
            raise ValueError(f"q: expected batch 1 with cu_seqlens, got {q.shape[0]}")
        order = s.order if permutation is None else bytes_of(permutation)
        layout = _plan.Layout(total, q.shape[0], ranks, order, offsets, s.causal, s.left, s.right, s.blocks)
        if capturing(q.device) and not _plan.is_made(layout, rank, q.device):
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
        return Setup(plan, collectives, heads, None, None)
    # A backward's memory is made in the forward: making it waits for all ranks.
    row = (k.shape[3] + v.shape[3]) * k.element_size() * max(last - first for first, last in both[1])
    peers.reserve((k.numel() + v.numel()) * k.element_size(), copies.most_parts * row if s.gradients else 0)
    return Setup(plan, collectives, heads, peers, copies)


def bytes_of(permutation):
    """A permutation as _plan.Layout has it. Raises ValueError."""
    if permutation.dtype not in (torch.int32, torch.int64) or permutation.dim() != 1:
        raise ValueError(f"order: expected int64 [total], got {permutation.dtype} {list(permutation.shape)}")
    return values_of(permutation)
