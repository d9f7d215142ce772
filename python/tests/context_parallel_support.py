# SPDX-License-Identifier: Apache-2.0
"""Inputs for the cases of context parallelism, the results of one process, and those of a rank's rows.

A case gets the groups that its process belongs to, by their number of ranks. The group of one is its own."""
import json
import pathlib
import sys

import torch

import tessera.torch as tt
import torch_reference as reference

PROCESSES = 4
CASES, OUTCOMES, ENDED = {}, {}, {}  # ENDED: groups that the cases which end processes use, and no other
FOLDER = sys.argv[1] if len(sys.argv) > 1 else None


def case(function):
    CASES[function.__name__] = function
    return function


def inputs(total=96, batch=1, heads_q=4, heads_kv=2, head_dim=32, dtype=torch.float32, seed=0):
    """q, k, v and a gradient of O of the whole sequence: the same on every rank."""
    shapes = [(batch, total, heads, head_dim) for heads in (heads_q, heads_kv, heads_kv, heads_q)]
    return [reference.random(shape, seed + i, dtype=dtype) for i, shape in enumerate(shapes)]


def both_passes(call, q, k, v, d_o, d_lse=None):
    """(o, lse, dq, dk, dv) of call(q, k, v), which returns (o, lse)."""
    q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
    o, lse = call(q, k, v)
    loss = (o, lse) if d_lse is not None else (o,)
    return (o.detach(), lse.detach(),
            *torch.autograd.grad(loss, (q, k, v), (d_o, d_lse) if d_lse is not None else (d_o,)))


def one_process(q, k, v, d_o, options, d_lse=None):
    """both_passes() of the whole sequence in this process."""
    options = dict(options)
    cu_seqlens = options.pop("cu_seqlens", None)
    options["causal"] = "bottom-right" if options.get("causal") else None
    if cu_seqlens is None:
        return both_passes(lambda *t: tt.attention(*t, **options, return_lse=True), q, k, v, d_o, d_lse)
    offsets = torch.tensor(cu_seqlens, dtype=torch.int32)

    def call(*tensors):
        o, lse = tt.varlen_attention(*(t[0] for t in tensors), offsets, offsets, **options, return_lse=True)
        return o[None], lse[None]
    return both_passes(call, q, k, v, d_o, d_lse)


def ranks_part(whole, group, order, options, d_lse=None, **more):
    """both_passes() of this rank's rows of `whole`, q, k, v and d_o."""
    own = [tt.shard_sequence(t, group, order=order) for t in whole]
    if d_lse is not None:
        d_lse = tt.shard_sequence(d_lse, group, dim=2, order=order)
    return both_passes(lambda *t: tt.context_parallel_attention(*t, group, order=order, return_lse=True, **options,
                                                                **more), *own, d_lse)


def rows_of(results, group, order):
    """This rank's rows of (o, lse, dq, dk, dv) of the whole sequence."""
    return [tt.shard_sequence(t, group, dim=2 if i == 1 else 1, order=order) for i, t in enumerate(results)]


NAMES = ("o", "lse", "dq", "dk", "dv")


def expect(got, want, equal, limit, what):
    """The tensors named in `equal` have the same bits, the others are within `limit` of each other."""
    for name, g, w in zip(NAMES, got, want):
        assert g.dtype == w.dtype and g.shape == w.shape, f"{what}: {name} is {g.dtype} {list(g.shape)}"
        if name in equal:
            assert torch.equal(g, w), f"{what}: {name} has other bits, off by {(g - w).abs().max()}"
        else:
            reference.expect_close(g, w, limit, f"{what}: {name}")


def reversed_chunks(ranks, total=96):
    """A permutation in which rank 0 holds the end of the sequence, in pieces of other lengths than its chunks."""
    size = total // ranks
    cut = size // 3
    return torch.cat([torch.cat((torch.arange(size - cut) + r * size + cut, torch.arange(cut) + r * size))
                      for r in reversed(range(ranks))])


def raises(kind, words, call):
    """The text of the exception of call(), of this class and with these words."""
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
        return str(error)
    raise AssertionError(f"expected {kind} with {words}")


def write(rank):
    pathlib.Path(FOLDER, f"{rank}.json").write_text(json.dumps(OUTCOMES))
