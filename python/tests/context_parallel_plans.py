# SPDX-License-Identifier: Apache-2.0
"""Cases of test_context_parallel.py: what context_parallel_plan() says is what a call does."""
import torch
import torch.distributed as dist

import tessera.torch as tt
import torch_reference as reference
from context_parallel_support import case, inputs, raises

KINDS = ({"order": "zigzag"}, {"order": "contiguous"}, {"order": "contiguous", "window": (5, 0)},
         {"causal": False}, {"causal": False, "cu_seqlens": [0, 13, 50, 61, 96]}, {"cu_seqlens": [0, 13, 50, 50, 61, 90]})


def seen(total, causal=True, window=None, cu_seqlens=None):
    """bool [total, total] from the definition."""
    mask = reference.visible(total, total, "bottom-right" if causal else None, window)
    document = torch.zeros(total, dtype=torch.int64)
    for offset in (cu_seqlens or [])[1:]:
        document[offset:] += 1
    mask &= document[:, None] == document[None]
    if cu_seqlens:
        mask[cu_seqlens[-1]:] = False
    return mask


@case
def pairs_and_balance(groups):
    for kind in (*KINDS, {"causal": False, "window": (7, 4)}):
        options = dict(kind)
        order = options.pop("order", "zigzag")
        mask = seen(96, **options)
        for ranks, group in groups.items():
            rank = dist.get_rank(group)
            plan = tt.context_parallel_plan(96, ranks, 2, 32, rank=rank, batch=3 if "cu_seqlens" not in kind else 1, **kind)
            every = [int(mask[tt.shard_sequence(torch.arange(96), group, dim=0, order=order)].sum())]
            of_all = torch.zeros(ranks, dtype=torch.int64)
            of_all[rank] = every[0]
            dist.all_reduce(of_all, group=group)
            batch = 1 if "cu_seqlens" in kind else 3
            assert plan.pairs == batch * every[0], (kind, ranks, plan)
            assert abs(plan.busiest - float(of_all.max() / of_all.double().mean())) < 1e-12


@case
def memory_and_bytes(groups):
    """The buffers that a call allocates, and the bytes that its collectives receive from other ranks."""
    from tessera.torch._context_parallel import _exchange
    made, arrived = [], []
    before = _exchange.Keys.__init__, _exchange.Collectives.begin

    def init(self, *arguments):
        before[0](self, *arguments)
        made.append(sum(t.numel() * t.element_size() for t in self.received + [t for twin in self.packed for t in twin]))

    def begin(self, collective, into, mine, *sizes):
        rank = dist.get_rank(self.group)
        own = mine.shape[0] if not sizes else sizes[0][rank]
        arrived.append((into.shape[0] - own) * into.shape[1] * into.element_size())
        return before[1](self, collective, into, mine, *sizes)
    _exchange.Keys.__init__, _exchange.Collectives.begin = init, begin
    try:
        for kind in KINDS:
            for ranks, group in groups.items():
                options = dict(kind, causal=kind.get("causal", True))
                q, k, v, _ = (tt.shard_sequence(t, group, order=kind.get("order", "zigzag")) for t in inputs())
                q.requires_grad_()
                made.clear()
                arrived.clear()
                o = tt.context_parallel_attention(q, k, v, group, **options)
                plan = tt.context_parallel_plan(96, ranks, 2, 32, rank=dist.get_rank(group), dtype=torch.float32,
                                                **options)
                assert sum(arrived) == plan.bytes_forward, (kind, ranks, arrived, plan)
                assert plan.calls == 1 and made == [plan.memory_forward], (kind, ranks, made, plan)
                arrived.clear()
                o.sum().backward()
                assert sum(arrived) == plan.bytes_backward, (kind, ranks, arrived, plan)
                assert plan.memory_backward > made[1] and plan.whole == 96 * 2 * 64 * 4
    finally:
        _exchange.Keys.__init__, _exchange.Collectives.begin = before


@case
def large_plans(groups):
    """The sizes that docs/context-parallel.md states, and the balance of packed documents."""
    million = tt.context_parallel_plan(2**20, 8, 8, 128)
    assert (million.way, million.steps, million.calls, million.busiest) == ("gather", 8, 1, 1.0)
    pieces = tt.context_parallel_plan(96, 1, 2, 32, order=list(reversed(range(96))))
    assert pieces.calls > 10 and pieces.memory_forward < 4 * pieces.whole  # each row is a run with keys of its own
    assert 1.6e9 < million.memory_forward < 1.8e9 and 3.3e9 < million.memory_backward < 3.5e9
    assert 4.2e9 < million.whole < 4.4e9 and million.memory_backward < million.whole
    for ranks, rows, forward, backward in ((2, 8192, 2.25, 5.75), (4, 8192, 1.625, 4.875), (8, 2**17, 0.516, 0.906)):
        copied = tt.context_parallel_plan(ranks * rows, ranks, 8, 128, copies=True)
        assert copied.by == "copies" and abs(copied.memory_forward / copied.whole - forward) < 1e-3
        assert abs(copied.memory_backward / copied.whole - backward) < 1e-3
    offsets, generator = [0], torch.Generator().manual_seed(0)
    while offsets[-1] < 32768:
        offsets.append(min(32768, offsets[-1] + int(torch.empty(1).exponential_(1 / 2048, generator=generator)) + 1))
    order = tt.balance_documents(offsets, 4)
    dealt, cut = (tt.context_parallel_plan(32768, 4, 8, 128, order=o, cu_seqlens=offsets) for o in (order, "contiguous"))
    assert dealt.busiest < 1.05 < cut.busiest
    raises(ValueError, ("rank: expected one of 4 ranks",), lambda: tt.context_parallel_plan(96, 4, 2, 32, rank=4))
