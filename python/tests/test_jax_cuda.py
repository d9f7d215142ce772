# SPDX-License-Identifier: Apache-2.0
"""tessera.jax on a CUDA device: against fp64, and with the bits of tessera.torch."""
import numpy
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
import jax.numpy as jnp  # noqa: E402
from conftest import NO_CUDA  # noqa: E402
from reference import Reference, check_gradient, check_lse, check_o  # noqa: E402

from tessera import _jax_calls  # noqa: E402
from tessera.jax import dot_product_attention  # noqa: E402

if NO_CUDA:
    pytest.skip(NO_CUDA, allow_module_level=True)
if not _jax_calls.on_cuda():
    pytest.skip("JAX sees no CUDA device", allow_module_level=True)
import torch  # noqa: E402

import tessera.torch  # noqa: E402

CUDA = jax.devices("cuda")[0]
DTYPES = ["float32", "bfloat16", "float16"]


def inputs(rng, dtype, batch=2, t=200, s=264, heads=4, kv_heads=2, dim=64):
    shapes = ((batch, t, heads, dim), (batch, s, kv_heads, dim), (batch, s, kv_heads, dim))
    return [jax.device_put(jnp.asarray(rng.standard_normal(shape), dtype), CUDA) for shape in shapes]


def step(q, k, v, weights, lse_weights, **keywords):
    """(o, lse [B, T, N], (dq, dk, dv))."""
    def loss(q, k, v):
        o, lse = dot_product_attention(q, k, v, return_residual=True, **keywords)
        return (o.astype(jnp.float32) * weights).sum() + (lse * lse_weights).sum(), (o, lse)
    gradients, (o, lse) = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return o, lse, gradients


def weights_of(rng, q, dim):
    of_o = jnp.asarray(rng.standard_normal((*q.shape[:3], dim)), q.dtype).astype(jnp.float32)
    return [jax.device_put(a, CUDA) for a in (of_o, jnp.asarray(rng.standard_normal(q.shape[:3]), jnp.float32))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [20, 64, 128, 256])  # rows of 20 numbers are not aligned to 16 bytes
def test_against_fp64(rng, dtype, causal, dim):
    q, k, v = inputs(rng, dtype, dim=dim)
    weights = weights_of(rng, q, dim)
    o, lse, gradients = jax.jit(lambda *a: step(*a, is_causal=causal))(q, k, v, *weights)
    assert o.devices() == {CUDA}
    ref = Reference(*map(numpy.asarray, (q, k, v)), causal="top-left" if causal else None)
    check_o(numpy.asarray(o), ref, dtype)
    check_lse(numpy.asarray(lse).transpose(0, 2, 1), ref)
    expected = ref.backward(numpy.asarray(weights[0]), numpy.asarray(weights[1]).transpose(0, 2, 1))
    for name, got, right in zip(("dq", "dk", "dv"), gradients, expected):
        check_gradient(name, numpy.asarray(got), right, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
def test_the_bits_of_tessera_torch(rng, dtype, dim):
    q, k, v = inputs(rng, dtype, dim=dim)
    weights = weights_of(rng, q, dim)
    o, lse, gradients = jax.jit(lambda *a: step(*a, is_causal=True))(q, k, v, *weights)
    leaves = [torch.from_dlpack(a).clone().requires_grad_() for a in (q, k, v)]
    to, tlse = tessera.torch.attention(*leaves, causal="top-left", return_lse=True)
    wo, wl = (torch.from_dlpack(a) for a in weights)
    expected = torch.autograd.grad((to.float() * wo).sum() + (tlse * wl.transpose(1, 2)).sum(), leaves)
    assert torch.equal(torch.from_dlpack(o), to)
    assert torch.equal(torch.from_dlpack(lse), tlse.transpose(1, 2))
    for name, got, want in zip(("dq", "dk", "dv"), gradients, expected):
        assert torch.equal(torch.from_dlpack(got), want), name


def test_bias_and_vmap(rng):
    """A bias with its gradient, over two dimensions of the batch."""
    q, k, v = inputs(rng, "float32", t=33, s=33)
    bias = jax.device_put(jnp.asarray(rng.standard_normal((1, 4, 33, 33)), jnp.float32), CUDA)

    def gradients(device):
        def loss(q, k, v, bias):
            return jnp.sin(dot_product_attention(q, k, v, bias, is_causal=True)).sum()
        many = [jnp.stack([a, 2 * a, 3 * a]) for a in (q, k, v)]
        arrays = [jax.device_put(a, device) for a in (*many, bias)]
        return jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2, 3)), (0, 0, 0, None)))(*arrays)
    for name, a, b in zip(("dq", "dk", "dv", "dbias"), gradients(CUDA), gradients(jax.devices("cpu")[0])):
        a, b = numpy.asarray(a), numpy.asarray(b)
        assert numpy.abs(a - b).max() < 1e-5 * max(1, numpy.abs(b).max()), name


def test_what_no_kernel_runs_is_said(rng):
    with jax.enable_x64(True):
        q, k, v = inputs(rng, "float64")
        with pytest.raises(Exception, match="no kernel"):
            jax.block_until_ready(dot_product_attention(q, k, v))


def test_repeats_and_neighbours_change_no_bit(rng):
    q, k, v = inputs(rng, "bfloat16", batch=3, t=512, s=512)
    weights = weights_of(rng, q, 64)
    run = jax.jit(lambda *a: step(*a, is_causal=True))
    first, again = run(q, k, v, *weights), run(q, k, v, *weights)
    alone = run(*(a[1:2] for a in (q, k, v, *weights)))
    for a, b, c in zip(*map(jax.tree.leaves, (first, again, alone))):
        assert (a == b).all() and (a[1:2] == c).all()
