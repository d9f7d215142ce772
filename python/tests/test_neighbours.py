# SPDX-License-Identifier: Apache-2.0
"""The bits of a sequence and of a head do not depend on what stands beside them: O and every gradient, by every
adapter."""
import numpy
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import processes  # noqa: E402
import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402
from conftest import NO_CUDA  # noqa: E402
from tessera import flash_attn, flash_attn_3, flash_attn_cute, ring_flash_attn, xformers  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402

BATCH, HEADS, HEADS_KV = 3, 4, 2


def heads_first(*tensors):
    return [t.transpose(1, 2) for t in tensors]


def compiled(function, dynamic=False):
    def call(*leaves):
        torch._dynamo.reset()
        return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*leaves)
    return call


def ragged(function):
    """A dense call by a function of ragged batches: sequences of one length."""
    def call(q, k, v):
        flat = [t.flatten(0, 1) for t in (q, k, v)]
        cu = torch.arange(q.shape[0] + 1, device=q.device, dtype=torch.int32) * q.shape[1]
        return function(*flat, cu, q.shape[1]).unflatten(0, q.shape[:2])
    return call


def transformers(q, k, v, mask=None, **lengths):
    from tessera.transformers import attention_forward
    return attention_forward(torch.nn.Identity(), *heads_first(q, k, v), mask, **lengths)[0]


def packed(q, k, v):
    """qkv [batch, len, 3, heads, head_dim], the heads of k and v repeated."""
    k, v = (t[:, :, :, None].expand(-1, -1, -1, q.shape[2] // t.shape[2], -1).flatten(2, 3) for t in (k, v))
    return torch.stack((q, k, v), 2)


def block_diagonal(q, k, v):
    """xFormers' ragged batch: sequences of one length."""
    mask = xformers.BlockDiagonalMask.from_seqlens([q.shape[1]] * q.shape[0]).make_causal()
    o = xformers.memory_efficient_attention(*(t.flatten(0, 1)[None] for t in (q, k, v)), mask)
    return o[0].unflatten(0, q.shape[:2])


def five_dimensions(q, k, v):
    """xFormers' [B, M, G, H, K]: a group for each head of k."""
    groups = [t.unflatten(2, (k.shape[2], -1)).expand(-1, -1, -1, q.shape[2] // k.shape[2], -1) for t in (q, k, v)]
    return xformers.memory_efficient_attention(*groups, xformers.LowerTriangularMask()).flatten(2, 3)


def alone(function):
    """A function that calls processes of a group, in a group of one."""
    def call(*leaves):
        if torch.distributed.is_initialized():
            return function(*leaves)
        with processes.group_of_one():
            return function(*leaves)
    return call


def seen(q):
    return torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()


ADAPTERS = {
    "attention": lambda q, k, v: tt.attention(q, k, v, causal="top-left"),
    "attention, LSE": lambda q, k, v: tt.attention(q, k, v, causal="top-left", return_lse=True)[0],
    "attention, softcap": lambda q, k, v: tt.attention(q, k, v, softcap=2.0, window=(40, 3)),
    "attention, heads first": lambda q, k, v: tt.attention(*heads_first(q, k, v), layout="bhsd").transpose(1, 2),
    "compiled": compiled(lambda q, k, v: tt.attention(q, k, v, causal="top-left")),
    "compiled, dynamic": compiled(lambda q, k, v: tt.attention(q, k, v, softcap=2.0), dynamic=True),
    "varlen_attention": ragged(lambda q, k, v, cu, n: tt.varlen_attention(q, k, v, cu, cu, max_len_q=n, max_len_kv=n)),
    "varlen_attention without bounds": ragged(lambda q, k, v, cu,
                                              n: tt.varlen_attention(q, k, v, cu, cu, causal="top-left")),
    "sdpa": lambda q, k, v: tt.scaled_dot_product_attention(*heads_first(q, k, v), is_causal=True,
                                                            enable_gqa=True).transpose(1, 2),
    "sdpa, mask": lambda q, k, v: tt.scaled_dot_product_attention(*heads_first(q, k, v), attn_mask=seen(q),
                                                                  enable_gqa=True).transpose(1, 2),
    "flash_attn": lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True),
    "flash_attn, kvpacked": lambda q, k, v: flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), causal=True),
    "flash_attn, varlen": ragged(lambda q, k, v, cu, n: flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, n, n)),
    "flash_attn_3": lambda q, k, v: flash_attn_3.flash_attn_func(q, k, v, causal=True),
    "flash_attn_3, varlen": ragged(lambda q, k, v, cu, n: flash_attn_3.flash_attn_varlen_func(q, k, v, cu, cu, n, n)),
    "transformers": transformers,
    "transformers, mask": lambda q, k, v: transformers(q, k, v, seen(q)[None, None]),
    "transformers, packed": lambda q, k, v: transformers(
        q, k, v, **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.arange(
            q.shape[0] + 1, device=q.device, dtype=torch.int32) * q.shape[1])),
    "flash_attn, qkvpacked": lambda q, k, v: flash_attn.flash_attn_qkvpacked_func(packed(q, k, v), causal=True),
    "flash_attn, varlen qkvpacked": ragged(lambda q, k, v, cu, n: flash_attn.flash_attn_varlen_qkvpacked_func(
        packed(q[None], k[None], v[None])[0], cu, n)),
    "flash_attn_3, qkvpacked": lambda q, k, v: flash_attn_3.flash_attn_qkvpacked_func(
        torch.cat((q, k, v), 2), causal=True, num_heads_q=q.shape[2]),
    "flash_attn_cute": lambda q, k, v: flash_attn_cute.flash_attn_func(q, k, v, causal=True)[0],
    "flash_attn_cute, varlen": ragged(lambda q, k, v, cu, n: flash_attn_cute.flash_attn_varlen_func(
        q, k, v, cu, cu, n, n)[0]),
    "xformers": lambda q, k, v: xformers.memory_efficient_attention(q, k, v, xformers.LowerTriangularMask()),
    "xformers, block diagonal": block_diagonal,
    "xformers, five dimensions": five_dimensions,
    "vmap": lambda q, k, v: torch.func.vmap(lambda *t: tt.attention(*(x[None] for x in t))[0])(q, k, v),
}

# In a group of one process, by gloo. Their operators are others, and so is their way to CUDA.
OF_RANKS = {
    "context_parallel_attention": alone(lambda q, k, v: tt.context_parallel_attention(q, k, v, causal=True)),
    "ring_flash_attn": alone(lambda q, k, v: ring_flash_attn.ring_flash_attn_func(q, k, v, causal=True)),
    "ring_flash_attn, zigzag": alone(lambda q, k, v: ring_flash_attn.zigzag_ring_flash_attn_func(q, k, v, causal=True)),
    "ring_flash_attn, qkvpacked": alone(lambda q, k, v: ring_flash_attn.ring_flash_attn_qkvpacked_func(
        packed(q, k, v), causal=True)),
    "ring_flash_attn, varlen": alone(ragged(lambda q, k, v, cu, n: ring_flash_attn.ring_flash_attn_varlen_func(
        q, k, v, cu, n, causal=True))),
}


def gradients(function, tensors, d_o):
    """O and the gradients of a function of q, k, v [batch, len, heads, head_dim]."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    o = function(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, d_o)]


def core(q, k, v, d_o):
    """tessera.attention and its gradient."""
    o, lse = tessera.attention(q, k, v, causal="top-left", return_lse=True)
    return [o, *tessera.attention_backward(d_o, q, k, v, o, lse, causal="top-left")]


def expect_own_bits(results, whole, d_o):
    """results(tensors, d_o) of one sequence, and of the heads of one key head, are the bits of the whole batch."""
    want = results(whole, d_o)
    for b in range(BATCH):
        own = slice(b, b + 1)
        got = results([t[own] for t in whole], d_o[own])
        for name, a, e in zip(("o", "dq", "dk", "dv"), got, want):
            assert (a == e[own]).all(), f"{name} of sequence {b}"
    group = HEADS // HEADS_KV
    for h in range(HEADS_KV):
        queries, keys = slice(h * group, (h + 1) * group), slice(h, h + 1)
        got = results([whole[0][:, :, queries], whole[1][:, :, keys], whole[2][:, :, keys]], d_o[:, :, queries])
        for name, a, e, own in zip(("o", "dq", "dk", "dv"), got, want, (queries, queries, keys, keys)):
            assert (a == e[:, :, own]).all(), f"{name} of key head {h}"


def inputs(length, head_dim, dtype, device):
    tensors = reference.inputs(BATCH, length, length, HEADS, HEADS_KV, head_dim, dtype=dtype, device=device)
    d_o = reference.random((BATCH, length, HEADS, head_dim), 3, device, dtype)
    return [t.detach() for t in tensors], d_o


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*ADAPTERS, *OF_RANKS])
def test_each_sequence_and_head_has_its_own_bits(name, dtype):
    if name.startswith("transformers"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    function = {**ADAPTERS, **OF_RANKS}[name]
    tensors, d_o = inputs(70, 32, dtype, "cpu")
    expect_own_bits(alone(lambda t, d: gradients(function, t, d)) if name in OF_RANKS else
                    lambda t, d: gradients(function, t, d), tensors, d_o)


@pytest.mark.skipif(NO_CUDA is not None, reason=f"for a GPU: {NO_CUDA}")
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("length,dtype", [(512, torch.bfloat16), (2048, torch.bfloat16), (2048, torch.float16),
                                          (4096, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", [n for n in ADAPTERS if not n.startswith("transformers")])
def test_each_sequence_and_head_has_its_own_bits_on_cuda(name, dtype, length, head_dim):
    tensors, d_o = inputs(length, head_dim, dtype, "cuda")
    expect_own_bits(lambda t, d: gradients(ADAPTERS[name], t, d), tensors, d_o)


@pytest.mark.parametrize("version", [flash_attn, flash_attn_3], ids=lambda m: m.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_sequence_of_a_cache_has_its_own_bits(version, dtype, device):
    """O and LSE of queries over a cache of keys, new rows among them, which has no gradient."""
    tensors, _ = inputs(70, 64, dtype, device)
    lengths = torch.tensor([60, 3, 33], dtype=torch.int32, device=device)
    call = dict(causal=True, return_softmax_lse=True)

    def results(rows):
        q, k, v = (t[rows].clone() for t in tensors)
        return version.flash_attn_with_kvcache(q[:, :3], k, v, k[:, :2] + 1, v[:, :2] - 1, cache_seqlens=lengths[rows], **call)
    want = results(slice(None))
    for b in range(BATCH):
        for got, whole in zip(results(slice(b, b + 1)), want):
            assert torch.equal(got, whole[b:b + 1])


def test_lengths_of_other_sequences_do_not_matter(device):
    """A ragged batch in which the sequence stands between longer ones, against the sequence alone."""
    tensors, d_o = inputs(300, 64, torch.bfloat16, device)
    q, k, v = (t.flatten(0, 1)[:700] for t in tensors)
    d_o = d_o.flatten(0, 1)[:700]
    begins = [0, 400, 470, 700]

    def results(rows):
        cu = torch.tensor([b - rows.start for b in begins if rows.start <= b <= rows.stop], dtype=torch.int32,
                          device=device)
        return gradients(lambda *t: flash_attn.flash_attn_varlen_func(*t, cu, cu, 400, 400, causal=True),
                         [t[rows] for t in (q, k, v)], d_o[rows])
    want = results(slice(0, 700))
    for rows in (slice(a, b) for a, b in zip(begins, begins[1:])):
        for name, a, e in zip(("o", "dq", "dk", "dv"), results(rows), want):
            assert torch.equal(a, e[rows]), f"{name} of the rows {rows.start} to {rows.stop}"


def test_the_provider_for_pytorchs_attention():
    from torch.nn import attention
    if not hasattr(attention, "register_flash_attention_impl"):
        pytest.skip(f"PyTorch {torch.__version__} has no register_flash_attention_impl")
    tt.register_provider()
    attention.activate_flash_attention_impl("tessera")
    try:
        tensors, d_o = inputs(70, 32, torch.float32, "cpu")
        expect_own_bits(lambda t, d: gradients(
            lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
                *heads_first(q, k, v), is_causal=True, enable_gqa=True).transpose(1, 2), t, d), tensors, d_o)
    finally:
        attention.restore_flash_attention_impl()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_core(dtype):
    tensors, d_o = inputs(70, 32, dtype, "cpu")
    expect_own_bits(lambda t, d: core(*(x.numpy() for x in (*t, d))), tensors, d_o)


def test_jax():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    from tessera.jax import dot_product_attention
    tensors, d_o = inputs(70, 32, torch.float32, "cpu")

    def results(t, d):
        q, k, v, d = (jax.numpy.asarray(x.numpy()) for x in (*t, d))
        o, back = jax.vjp(lambda *a: dot_product_attention(*a, is_causal=True), q, k, v)
        return [numpy.asarray(x) for x in (o, *back(d))]
    expect_own_bits(results, tensors, d_o)


# Sizes must not decide whether the residual is kept, or gradients would depend on the batch. No GPU is needed.

@pytest.mark.parametrize("name", [n for n in ADAPTERS if "compiled" not in n and "vmap" not in n])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_training_call_on_cuda_runs_one_operator_for_every_size(name, dtype):
    """The operator keeps the residual of O, from which the backward computes delta, for every size."""
    if name.startswith("transformers"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    chosen = set()
    for batch, length, heads in ((1, 16, 2), (1, 4096, 2), (64, 16, 2), (64, 4096, 64)):
        with FakeTensorMode(), reference.Names() as names:
            leaves = [torch.empty(batch, length, heads, 64, dtype=dtype, device="cuda",
                                  requires_grad=True) for _ in range(3)]
            ADAPTERS[name](*leaves)
        chosen.add(tuple(n for n in names.seen if n.startswith("tessera::")))
    assert chosen == {("tessera::forward_with_residual",)}
