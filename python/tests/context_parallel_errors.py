# SPDX-License-Identifier: Apache-2.0
"""Cases of test_context_parallel.py: ranks that differ, that are late, that end. The last case ends a process."""
import importlib.util
import os
import time

import torch
import torch.distributed as dist

import tessera.torch as tt
from context_parallel_support import ENDED, OUTCOMES, PROCESSES, case, inputs, raises, write
from tessera import ring_flash_attn as ring


@case
def ranks_that_differ(groups):
    """Each rank raises the error that names the argument and the ranks, and the group remains usable."""
    q, k, v, _ = (t[:, :24] for t in inputs())
    group, rank = groups[PROCESSES], dist.get_rank()
    odd = rank == 2

    def call(q=q, k=k, v=v, **options):
        return lambda: tt.context_parallel_attention(q, k, v, group, timeout=60, **options)
    others = "ranks 0, 1, 3"
    raises(ValueError, ("scale:", "0.5 on rank 2", others), call(scale=0.5 if odd else None))
    raises(ValueError, ("causal:", "True on rank 2", others), call(causal=odd))
    raises(ValueError, ("order:", "contiguous on rank 2", others), call(order="contiguous" if odd else "zigzag"))
    raises(ValueError, ("window:", "rank 2", others), call(window=(4, 4) if odd else None))
    raises(ValueError, ("cu_seqlens:", "rank 2", others), call(cu_seqlens=[0, 5, 96] if odd else [0, 7, 96]))
    raises(ValueError, ("gradient_blocks:", "8 on rank 2"), call(gradient_blocks=8 if odd else None))
    raises(ValueError, ("q:", "12", "rank 2", others), call(*(t[:, :12] for t in (q, k, v))) if odd else call())
    raises(ValueError, ("q:", "bfloat16", "rank 2"), call(*(t.bfloat16() for t in (q, k, v))) if odd else call())
    refused = (ValueError, ("k: expected",) if odd else ("rank 2 refused the call", "k: expected"))
    raises(*refused, call(k=k[:, :9]) if odd else call())
    sinks = torch.zeros(4)
    raises(ValueError, ("sinks:", "None on rank 2", "[4]", others), call(sinks=None if odd else sinks))
    raises(ValueError, ("needs gradients:", "True on rank 2", others), call(q=q.clone().requires_grad_(odd)))
    raises(ValueError, ("scale: expected", "refused" if not odd else "nan"), call(scale=float("nan") if odd else None))
    positions = list(range(96))
    raises(ValueError, ("order:",), call(order=positions[::-1] if odd else positions))
    raises(ValueError, ("order: expected a permutation",), call(order=[0] * 96))
    raises(ValueError, ("order: expected 'zigzag'",), call(order="striped"))
    raises(ValueError, ("q: expected a sequence whose length 2 * 4 divides",), call(*(t[:, :23] for t in (q, k, v))))
    raises(ValueError, ("cu_seqlens: expected offsets",), call(cu_seqlens=[0, 9, 5]))
    raises(ValueError, ("gradient_blocks: expected a divisor",), call(gradient_blocks=7))
    call()()
    for key, tensor, dim, order in (("tensor", q[:, :8 if odd else 16], 1, "zigzag"),
                                    ("tensor", q.bfloat16() if odd else q, 1, "zigzag"),
                                    ("dim", q[:, :4], 2 if odd else 1, "zigzag"),
                                    ("order", q, 1, "contiguous" if odd else "zigzag")):
        raises(ValueError, (key + ": expected the same on all ranks", "rank 2"),
               lambda: tt.unshard_sequence(tensor, group, dim=dim, order=order))


def refused_by_rank_2(group, name, wrong, right):
    """wrong() on rank 2 and right() on the others: all raise at once, and name the argument and the rank."""
    odd, begin = dist.get_rank() == 2, time.monotonic()
    raises(ValueError, (name + ": expected",) if odd else ("rank 2 refused the call", name + ": expected"),
           wrong if odd else right)
    assert time.monotonic() - begin < 60, name


@case
def one_rank_that_refuses(groups):
    """Refusals of a rank before ranks exchange anything are raised on all of them."""
    q, k, v, _ = (t[:, :24] for t in inputs())
    group = groups[PROCESSES]

    def call(**options):
        return tt.context_parallel_attention(**{**dict(q=q, k=k, v=v, group=group), **options})
    for name, value in (("causal", "left"), ("timeout", 0), ("steps", 0), ("window", 3), ("kernel", "cpu.fa9"),
                        ("sinks", torch.zeros(3)), ("scale", float("inf")), ("softcap", -1.0), ("order", None),
                        ("cu_seqlens", [0.0, 96.0]), ("q", q.numpy())):
        refused_by_rank_2(group, name, lambda: call(**{name: value}), call)
    refused_by_rank_2(group, "dim", lambda: tt.unshard_sequence(q, group, dim=7), lambda: tt.unshard_sequence(q, group))
    with tt.context_parallel(group):
        heads = [t.transpose(1, 2) for t in (q, q, q)]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        refused_by_rank_2(group, "attn_mask", lambda: sdpa(*heads, torch.zeros(1, 1)), lambda: sdpa(*heads))
    call()


@case
def one_rank_that_refuses_in_ring_flash_attn(groups):
    group, rank = groups[PROCESSES], dist.get_rank()
    q, k, v, _ = (t[:, :24] for t in inputs(heads_kv=4))
    kv, qkv = torch.stack((k, v), 2), torch.stack((q, k, v), 2)

    def dense(**options):
        return ring.ring_flash_attn_func(q, k, v, **options, group=group)
    for name, value in (("dropout_p", 0.1), ("window_size", 3), ("softmax_scale", float("nan")), ("alibi_slopes", q)):
        refused_by_rank_2(group, name, lambda: dense(**{name: value}), dense)
    refused_by_rank_2(group, "kv", lambda: ring.ring_flash_attn_kvpacked_func(q, k, group=group),
                      lambda: ring.ring_flash_attn_kvpacked_func(q, kv, group=group))
    refused_by_rank_2(group, "qkv", lambda: ring.ring_flash_attn_qkvpacked_func(kv, 0.0, None, False, (-1, -1), None,
                                                                                False, False, group),
                      lambda: ring.ring_flash_attn_qkvpacked_func(qkv, group=group))

    def varlen(cu_seqlens=(0, 10, 24), max_seqlen=14):
        return ring.zigzag_ring_flash_attn_varlen_func(q[0], k[0], v[0], torch.tensor(cu_seqlens), max_seqlen, group=group)
    refused_by_rank_2(group, "cu_seqlens", lambda: varlen((0, 10, 20)), varlen)
    refused_by_rank_2(group, "cu_seqlens", lambda: varlen((0, 11, 24)), varlen)
    refused_by_rank_2(group, "max_seqlen", lambda: varlen(max_seqlen=3), varlen)
    packed = torch.tensor([0, 13, 50, 61, 96], dtype=torch.int32)
    names = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k local_k_slice".split()
    prepared = dict(zip(names, ring.llama3_flash_attn_prepare_cu_seqlens(packed, True, rank, PROCESSES)))
    keys = prepared["local_k_slice"]

    def llama3(**options):
        return ring.llama3_flash_attn_varlen_func(q[0], k[0], v[0], heads_k_stride=1, causal=True, group=group,
                                                  **{**prepared, **options})
    for name, value in (("local_k_slice", slice(keys.start, keys.stop + 1)), ("cu_seqlens_q", torch.tensor([0, 5, 24])),
                        ("cu_seqlens_k", torch.tensor([0, 1])), ("max_seqlen_q", 1), ("max_seqlen_k", 1)):
        refused_by_rank_2(group, name, lambda: llama3(**{name: value}), llama3)
    llama3()


@case
def one_rank_that_refuses_in_transformers(groups):
    """A rank whose rows have padding, or that has a cache, tells the others."""
    if importlib.util.find_spec("transformers") is None:
        return
    from transformers import masking_utils as masks
    from tessera._context_parallel_layer import Layer, masks_of
    group = groups[PROCESSES]
    q, k, v = (t[:, :24].transpose(1, 2) for t in inputs()[:3])
    layer, mask, module = Layer(group, "zigzag"), masks_of(group), torch.nn.Identity()

    def call(attention_mask=None, **options):
        of_layer = mask(mask_function=masks.causal_mask_function, q_length=24, attention_mask=attention_mask)
        return layer(module, q, k, v, of_layer, **options)
    padded = torch.ones(1, 24).masked_fill(torch.arange(24) > 20, 0)
    for wrong in (padded, padded.bool(), torch.zeros(1, 24).masked_fill(padded == 0, float("-inf"))):
        refused_by_rank_2(group, "attention_mask", lambda: call(wrong), lambda: call(torch.ones(1, 24)))
    for name, value in (("cache", 3), ("dropout", 0.5)):
        refused_by_rank_2(group, name, lambda: call(**{name: value}), call)
    call()


@case
def a_group_of_an_old_name(groups):
    """A group that has the name of a destroyed one gets messages of its own."""
    from tessera.torch._context_parallel import _groups
    q, k, v, _ = (t[:, :24] for t in inputs())
    group, rank = groups[PROCESSES], dist.get_rank()
    _groups.name_of(group)
    for kept in (_groups._groups, _groups._controls):
        kept[group.group_name] = groups[1]  # as if it had been one of this name
    raises(ValueError, ("scale:", "rank 2"), lambda: tt.context_parallel_attention(
        q, k, v, group, scale=0.5 if rank == 2 else None, timeout=60))


@case
def errors_of_one_rank(groups):
    """Arguments whose values no rank could have are refused without a message to the others."""
    q, k, v, _ = inputs()
    for name, value, words in (("causal", "left", "causal: expected"), ("timeout", 0, "timeout: expected"),
                               ("steps", 0, "steps: expected"), ("group", 3, "group: expected a ProcessGroup"),
                               ("window", 3, "window: expected"), ("kernel", "cpu.fa9", "kernel: expected"),
                               ("sinks", torch.zeros(3), "sinks: expected"), ("scale", float("inf"), "scale: expected"),
                               ("softcap", -1.0, "softcap: expected"), ("order", None, "order: expected"),
                               ("order", [0.5] * 96, "order: expected"), ("cu_seqlens", [0.0, 96.0], "cu_seqlens: expected")):
        options = {"group": groups[1], name: value}
        raises(ValueError, (words,), lambda: tt.context_parallel_attention(q, k, v, **options))
    for part in (q[:0], q[..., :0]):
        raises(ValueError, ("q: expected",), lambda: tt.context_parallel_attention(part, part, part, groups[1]))
    far = tt.context_parallel_attention(q, k, v, groups[1], window=(2**40, 3))
    assert torch.equal(far, tt.context_parallel_attention(q, k, v, groups[1], window=(None, 3)))
    raises(ValueError, ("dim: expected",), lambda: tt.shard_sequence(q, groups[1], dim=4))
    raises(ValueError, ("tensor: expected a sequence",), lambda: tt.shard_sequence(q[:, :95], groups[1]))
    for name, call in (("total", lambda: tt.sequence_positions(4.0, groups[1])),
                       ("total", lambda: tt.sequence_positions(97, groups[1])),
                       ("total", lambda: tt.context_parallel_plan(0, 2, 2, 16)),
                       ("total", lambda: tt.context_parallel_plan(97, 2, 2, 16)),
                       ("heads_kv", lambda: tt.context_parallel_plan(96, 2, 0, 16)),
                       ("gradient_blocks", lambda: tt.context_parallel_plan(96, 2, 2, 16, gradient_blocks=-3)),
                       ("batch", lambda: tt.context_parallel_plan(96, 2, 2, 16, batch=2, cu_seqlens=[0, 96])),
                       ("cu_seqlens", lambda: tt.balance_documents([0, 5.7, 96], 2)),
                       ("ranks", lambda: tt.balance_documents([0, 5, 96], 2.0)),
                       ("chunks", lambda: tt.balance_documents([0, 5, 96], 2, chunks=0))):
        raises(ValueError, (name + ": expected",), call)


@case
def a_rank_that_refuses_alone(groups):
    """The error of a rank whose call the others do not make is its own, and not that they did not come."""
    group = ENDED["refuses"]
    if dist.get_rank() == 1:
        q, k, v, _ = (t[:, :48] for t in inputs())
        raises(ValueError, ("scale: expected",),
               lambda: tt.context_parallel_attention(q, k, v, group, scale=float("nan"), timeout=1))
    dist.barrier()


@case
def a_rank_that_is_late(groups):
    """Rank 0 names the rank that does not come within the timeout, and does not wait for ever."""
    group = ENDED["late"]
    if dist.get_rank() < 2:
        q, k, v, _ = (t[:, :48] for t in inputs())
        if dist.get_rank() == 0:
            begin = time.monotonic()
            raises(RuntimeError, ("rank 1 did not come to this call within 1 s",),
                   lambda: tt.context_parallel_attention(q, k, v, group, timeout=1))
            assert time.monotonic() - begin < 30
        group = ENDED["mixed"]  # its messages need a group of gloo, which both ranks make
        if dist.get_rank() == 0:
            begin = time.monotonic()
            raises(RuntimeError, ("another rank did not come to this call within 1 s",),
                   lambda: tt.context_parallel_attention(q, k, v, group, timeout=1))
            assert time.monotonic() - begin < 30
    dist.barrier()


@case
def a_rank_that_dies(groups):
    """Rank 3 ends between its forward and its backward; every other rank raises."""
    group = ENDED["dies"]
    q, k, v, d_o = (t[:, :24].clone().requires_grad_() for t in inputs())
    o = tt.context_parallel_attention(q, k, v, group, timeout=120)  # longer than any pause of a loaded machine
    dist.barrier()
    if dist.get_rank() == 3:
        OUTCOMES["a_rank_that_dies"] = None
        write(3)
        os._exit(0)
    begin = time.monotonic()
    raises(RuntimeError, ("rank ",), lambda: o.backward(d_o))
    assert time.monotonic() - begin < 60
