# SPDX-License-Identifier: Apache-2.0
"""Cases of test_context_parallel.py: sinks, documents, graphs, checkpointing, shards."""
import torch
import torch.distributed as dist

import tessera.torch as tt
import torch_reference as reference
from context_parallel_support import (both_passes, case, expect, inputs, one_process, raises, ranks_part,
                                      reversed_chunks, rows_of)


@case
def sinks_with_gradients(groups):
    """Sinks go through the kernels that have them; the gradients of all ranks add up to that of one process."""
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.1])
    whole = q, k, v, d_o = inputs()

    def run(call, tensors, d_o):
        leaves = [t.detach().clone().requires_grad_() for t in (*tensors, sinks)]
        o = call(*leaves)
        return o.detach(), *torch.autograd.grad(o, leaves, d_o)
    want = run(lambda q, k, v, s: tt.attention(q, k, v, causal="bottom-right", sinks=s, kernel="cpu.fa1"), (q, k, v), d_o)
    for ranks, group in groups.items():
        q, k, v, d_o = (tt.shard_sequence(t, group) for t in whole)
        got = run(lambda q, k, v, s: tt.context_parallel_attention(q, k, v, group, causal=True, sinks=s,
                                                                   kernel="cpu.fa1", steps=2), (q, k, v), d_o)
        for i in range(4):
            reference.expect_close(got[i], tt.shard_sequence(want[i], group), 1e-6, f"{ranks} ranks: {i}")
        assert torch.equal(got[0], tt.shard_sequence(want[0], group))
        dist.all_reduce(got[4], group=group)
        reference.expect_close(got[4], want[4], 1e-6, f"{ranks} ranks: gradient of the sinks")


@case
def rows_of_no_document_have_no_sinks(groups):
    """Rows past the last offset: LSE is -inf as in one process, and gives the sinks no gradient."""
    sinks, offsets = torch.tensor([0.5, -1.0, 2.0, 0.1]), torch.tensor([0, 30, 70])
    q, k, v, d_o = inputs()
    d_lse = reference.random((1, 4, 96), 5)

    def run(call, tensors, d_lse):
        s = sinks.clone().requires_grad_()
        lse = call(*tensors, s)[1]
        return lse.detach(), torch.autograd.grad(lse, s, d_lse)[0]

    def one(q, k, v, s):
        o, lse = tt.varlen_attention(q[0], k[0], v[0], offsets, offsets, sinks=s, causal="bottom-right", return_lse=True)
        return o[None], lse[None]
    want = run(one, (q, k, v), d_lse)
    assert (want[0][..., 70:] == float("-inf")).all()
    for ranks, group in groups.items():
        own = [tt.shard_sequence(t, group) for t in (q, k, v)]
        lse, of_sinks = run(lambda q, k, v, s: tt.context_parallel_attention(
            q, k, v, group, causal=True, sinks=s, cu_seqlens=offsets, return_lse=True), own,
            tt.shard_sequence(d_lse, group, dim=2))
        right = tt.shard_sequence(want[0], group, dim=2)
        assert torch.equal(lse.isfinite(), right.isfinite())
        reference.expect_close(lse, right, 1e-6, f"{ranks} ranks: LSE")
        dist.all_reduce(of_sinks, group=group)
        reference.expect_close(of_sinks, want[1], 1e-6, f"{ranks} ranks: gradient of the sinks")


@case
def documents_are_balanced(groups):
    """balance_documents() gives all ranks equal rows and about equal pairs, and its order gives the bits of one
    process, with the way of K and V that sends only what is needed."""
    from tessera.torch._context_parallel import _order, _plan
    offsets = [0, 5, 40, 41, 88, 150, 151, 192]
    whole = inputs(total=192, head_dim=16)
    want = one_process(*whole, {"causal": True, "cu_seqlens": offsets, "kernel": "cpu.fa1"})
    pairs = _order.pairs_of_rows(offsets, 192, True)
    for ranks, group in groups.items():
        order = tt.balance_documents(offsets, ranks)
        loads = pairs[order.view(ranks, -1)].sum(1)
        assert loads.max() <= 1.15 * loads.float().mean(), loads
        contiguous = pairs.view(ranks, -1).sum(1)
        assert loads.max() <= contiguous.max()
        got = ranks_part(whole, group, order, {"causal": True, "cu_seqlens": offsets, "kernel": "cpu.fa1"}, steps=2)
        expect(got, rows_of(want, group, order), ("o", "lse", "dq"), 1e-6, f"{ranks} ranks")
    many = list(range(0, 193, 12))
    whole = inputs(total=192)
    layout = _plan.Layout(192, 1, 4, "contiguous", tuple(many), True, -1, -1, 0)
    assert _plan.plan(layout, 1).send is not None  # documents of 12 rows: few keys are needed
    want = one_process(*whole, {"causal": True, "cu_seqlens": many, "kernel": "cpu.fa1"})
    for ranks, group in groups.items():
        got = ranks_part(whole, group, "contiguous", {"causal": True, "cu_seqlens": many, "kernel": "cpu.fa1"})
        expect(got, rows_of(want, group, "contiguous"), ("o", "lse", "dq"), 1e-6, f"{ranks} ranks, many documents")


@case
def several_members_of_a_batch(groups):
    """Three sequences, where a window leaves most keys out (only what is needed is sent), and where a rank makes several
    calls: runs whose keys end at different distances, blocks of rows."""
    from tessera.torch._context_parallel import _plan
    whole = inputs(batch=3)
    for options, more in (({"window": (3, 0), "causal": True}, {}), ({"window": (20, 9)}, {}),
                          ({"causal": True}, {"gradient_blocks": 24})):
        options = {**options, "kernel": "cpu.fa1"}
        want = one_process(*whole, options)
        for ranks, group in groups.items():
            for order in ("zigzag", "contiguous"):
                got = ranks_part(whole, group, order, options, **more)
                expect(got, rows_of(want, group, order), ("o", "lse", "dq"), 1e-6, f"{options}, {ranks} ranks, {order}")
    layout = _plan.Layout(96, 3, 4, "contiguous", None, True, -1, -1, 0)
    assert _plan.plan(layout, 0).send is not None  # contiguous and causal: 0.625 of the keys
    several = _plan.plan(_plan.Layout(96, 3, 4, "zigzag", None, False, 20, 9, 0), 0)
    assert len(several.forward) == 2 and isinstance(several.forward[0].rows, torch.Tensor)


@case
def compiled(groups):
    """A graph holds the operator, and gives the bits of an eager call."""
    whole = inputs()

    def call(q, k, v, group):
        return tt.context_parallel_attention(q * 1.0, k, v, group, causal=True, return_lse=True)
    graph = torch.compile(call, fullgraph=True, backend="aot_eager")
    for ranks, group in groups.items():
        if ranks in (1, 2):
            rows = [tt.shard_sequence(t, group) for t in whole]
            longer = [torch.cat((t, t), 1) for t in rows]  # sizes become symbols
            for given in (rows, longer):
                want, got = (both_passes(lambda *t: f(*t, group), *given) for f in (call, graph))
                assert all(torch.equal(g, w) for g, w in zip(got, want))


@case
def strides_in_graphs(groups):
    """The fake kernels give results the strides of the real ones, for transposed tensors too."""
    from torch.library import opcheck
    from tessera.torch._context_parallel import _groups
    name = _groups.name_of(groups[1])
    settings = (None, None, None, name, "zigzag", True, -1, -1, None, 0.0, None, 0, 0, 30.0, False, True, "", False)
    for batch in (1, 2):
        q, k, v = (reference.random((batch, 4, 16, 16), i).transpose(1, 2) for i in range(3))
        results = torch.ops.tessera.context_parallel(q, k, v, *settings)
        d_o = torch.ones_like(results[0])
        opcheck(torch.ops.tessera.context_parallel.default, (q, k, v, *settings), test_utils=("test_faketensor",))
        opcheck(torch.ops.tessera.context_parallel_backward.default, (d_o, None, q, k, v, *results, *settings),
                test_utils=("test_faketensor",))


@case
def an_error_between_steps(groups):
    """When a call fails, its exchange ends before its memory is freed, and the group remains usable."""
    from tessera.torch._context_parallel import _exchange, _operators
    group = groups[max(groups)]
    q, k, v, _ = (tt.shard_sequence(t, groups[max(groups)]) for t in inputs())
    want, before, settled = tt.context_parallel_attention(q, k, v, group), _operators._arguments, []

    def fails(*arguments):
        raise MemoryError("no memory")
    settle = _exchange.Keys._settle

    def seen(self):
        travelling = list(self.open)
        settle(self)
        settled.extend(work.is_completed() for work in travelling)
    _operators._arguments, _exchange.Keys._settle = fails, seen
    try:
        raises(MemoryError, ("no memory",), lambda: tt.context_parallel_attention(q, k, v, group, steps=2))
    finally:
        _operators._arguments, _exchange.Keys._settle = before, settle
    assert settled == ([True] if max(groups) > 1 else [])
    leaves, gradients, arrived = [t.clone().requires_grad_() for t in (q, k, v)], _operators._gradients, []
    o, calls, arrive = tt.context_parallel_attention(*leaves, group, steps=2), [], _exchange.Gradients.settle

    def fails_later(*arguments):
        calls.append(1)
        return gradients(*arguments) if len(calls) == 1 else fails()

    def settles(self):
        arrive(self)
        arrived.append(self.work)
    _operators._gradients, _exchange.Gradients.settle = fails_later, settles
    try:
        raises(MemoryError, ("no memory",), lambda: o.sum().backward())
    finally:
        _operators._gradients, _exchange.Gradients.settle = gradients, arrive
    assert arrived == [None]
    assert torch.equal(tt.context_parallel_attention(q, k, v, group, steps=2), want)


@case
def captured(groups):
    """A graph's capture refuses a layout whose plan is not on the device; one that has run is taken."""
    from tessera.torch._context_parallel import _setup
    q, k, v, _ = (t[:, :36] for t in inputs())
    before, _setup.capturing = _setup.capturing, lambda device: True
    try:
        raises(ValueError, ("q: expected a call", "capture"), lambda: tt.context_parallel_attention(q, k, v, groups[1]))
        _setup.capturing = before
        tt.context_parallel_attention(q, k, v, groups[1])
        _setup.capturing = lambda device: True
        tt.context_parallel_attention(q, k, v, groups[1])
    finally:
        _setup.capturing = before


@case
def checkpointed(groups):
    """Activation checkpointing makes the exchanges again in the backward."""
    from torch.utils.checkpoint import checkpoint
    whole = inputs()
    for ranks, group in groups.items():
        q, k, v, d_o = (tt.shard_sequence(t, group) for t in whole)

        def call(q, k, v):
            return tt.context_parallel_attention(q, k, v, group, causal=True, return_lse=True)
        want = both_passes(call, q, k, v, d_o)
        got = both_passes(lambda *t: checkpoint(call, *t, use_reentrant=False), q, k, v, d_o)
        for g, w in zip(got, want):
            assert torch.equal(g, w)


@case
def other_derivatives_are_refused(groups):
    group = groups[1]
    q, k, v, _ = inputs(total=8)
    q.requires_grad_()
    first, = torch.autograd.grad(tt.context_parallel_attention(q, k, v, group).sum(), q, create_graph=True)
    raises(NotImplementedError, ("no second derivatives",), lambda: first.sum().backward())
    raises(NotImplementedError, ("forward mode",), lambda: torch.func.jvp(
        lambda t: tt.context_parallel_attention(t, k, v, group), (q.detach(),), (q.detach(),)))


@case
def no_rows_in_documents(groups):
    """Offsets that leave all rows past the last document: O is 0, LSE -inf, and all gradients are 0."""
    for ranks, group in groups.items():
        q, k, v, d_o = (tt.shard_sequence(t, group) for t in inputs())
        o, lse, *gradients = both_passes(
            lambda *t: tt.context_parallel_attention(*t, group, cu_seqlens=[0], causal=True, return_lse=True), q, k, v, d_o)
        assert not o.any() and (lse == float("-inf")).all() and not any(g.any() for g in gradients)


@case
def shards_and_back(groups):
    for ranks, group in groups.items():
        for order in ("zigzag", "contiguous", reversed_chunks(ranks)):
            for dim in (0, 1, -1):
                whole = reference.random((96, 96, 96)[:2] if dim == 0 else (2, 96), 3)
                own = tt.shard_sequence(whole, group, dim=dim, order=order)
                assert own.shape[dim] == 96 // ranks
                assert torch.equal(tt.unshard_sequence(own, group, dim=dim, order=order), whole)
        positions = tt.sequence_positions(96, group)
        assert torch.equal(tt.shard_sequence(torch.arange(96), group, dim=0), positions)


@case
def no_batch_and_autocast(groups):
    q, k, v, _ = inputs()
    group = groups[2] if 2 in groups else groups[1]
    q, k, v = (tt.shard_sequence(t, group) for t in (q, k, v))
    want = tt.context_parallel_attention(q, k, v, group, return_lse=True)
    got = tt.context_parallel_attention(q[0], k[0], v[0], group, return_lse=True)
    assert all(torch.equal(g, w[0]) for g, w in zip(got, want))
    with torch.autocast("cpu", torch.bfloat16):
        assert tt.context_parallel_attention(q, k, v, group).dtype == torch.bfloat16


@case
def counted_by_flop_counters(groups):
    """The ranks' FLOPs add up to those of one process."""
    from torch.utils.flop_counter import FlopCounterMode
    offsets = torch.tensor([0, 13, 50, 61, 90])

    def counted(call, tensors, d_o):
        with FlopCounterMode(display=False) as counter:
            both_passes(call, *tensors, d_o)
        return counter.get_total_flops()
    whole = inputs()
    dense = counted(lambda *t: tt.attention(*t, return_lse=True), whole[:3], whole[3])
    rows = [t[0, :90] for t in whole]
    packed = counted(lambda *t: tt.varlen_attention(*t, offsets, offsets, return_lse=True), rows[:3], rows[3])
    assert dense > packed > 0
    for group in groups.values():
        own = [tt.shard_sequence(t, group) for t in whole]
        for want, more in ((dense, {}), (packed, {"cu_seqlens": offsets})):
            total = torch.tensor(counted(lambda *t: tt.context_parallel_attention(*t, group, return_lse=True, **more),
                                         own[:3], own[3]))
            dist.all_reduce(total, group=group)
            assert total == want, (total, want, more)
