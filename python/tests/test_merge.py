# SPDX-License-Identifier: Apache-2.0
"""tessera.merge(): the whole from two parts, and its gradients, against fp64."""
import numpy
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402
from seeds import random_seed  # noqa: E402

SINKS = torch.tensor([0.5, -1.0, 6.0, 0.1])


def cuts(count, len_kv, seed):
    """`count` random cuts of the keys, the ends among them."""
    drawn = torch.randint(0, len_kv + 1, (count - 2,), generator=torch.Generator().manual_seed(random_seed(seed)))
    return [0, len_kv, *drawn.tolist()]


def parts(q, k, v, cut, sinks=None, **options):
    """(o1, lse1, o2, lse2) of the keys before the cut, and of the others with the sinks."""
    one = tt.attention(q, k[:, :cut], v[:, :cut], return_lse=True, **options)
    return *one, *tt.attention(q, k[:, cut:], v[:, cut:], sinks=sinks, return_lse=True, **options)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_part_and_the_rest_are_the_whole(dtype, sinks, device):
    q, k, v = (t.detach() for t in reference.inputs(device=device, dtype=dtype))
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("fp64 has no kernel for CUDA")
    sinks = None if sinks is None else sinks.to(device)
    want, want_lse = reference.attention(q, k, v, sinks=sinks)
    for cut in cuts(12, k.shape[1], 1):
        o, lse = tessera.merge(*parts(q, k, v, cut, sinks))
        assert o.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        reference.expect_close(o, want, {torch.float64: 1e-13, torch.float32: 3e-6}.get(dtype, 3 * torch.finfo(dtype).eps),
                               "o")
        reference.expect_lse(lse, want_lse)


def test_order_and_number_do_not_matter():
    q, k, v = (t.detach() for t in reference.inputs())
    o1, lse1, o2, lse2 = parts(q, k, v, 20)
    merged, swapped = tessera.merge(o1, lse1, o2, lse2), tessera.merge(o2, lse2, o1, lse1)
    assert torch.equal(merged[0], swapped[0]) and torch.equal(merged[1], swapped[1])
    o, lse = None, None
    for begin in range(0, k.shape[1], 7):
        part = tt.attention(q, k[:, begin:begin + 7], v[:, begin:begin + 7], return_lse=True)
        o, lse = part if o is None else tessera.merge(o, lse, *part)
    want, want_lse = reference.attention(q, k, v)
    reference.expect_close(o, want, 3e-6, "o")
    reference.expect_lse(lse, want_lse)


def test_lse_far_apart_and_very_large():
    """No exponential overflows, and a small weight keeps its digits."""
    o1, o2 = torch.ones(1, 4, 1, 2), torch.full((1, 4, 1, 2), 3.0)
    lse1 = torch.tensor([[[5e4, -1e30, 300.0, 0.0]]])
    lse2 = torch.tensor([[[5e4, 1e30, 200.0, -20.0]]])
    o, lse = tessera.merge(o1, lse1, torch.where(torch.arange(4)[:, None, None] == 3, 1e9 * o2, o2), lse2)
    small = numpy.exp(-20.0)
    want = torch.tensor([2.0, 3.0, 1.0, (1 + 3e9 * small) / (1 + small)], dtype=torch.float32)
    torch.testing.assert_close(o[0, :, 0, 0], want, rtol=3e-7, atol=0)
    torch.testing.assert_close(lse[0, 0], torch.tensor([5e4 + numpy.log(2.0), 1e30, 300.0, numpy.log1p(small)]).float())


@pytest.mark.parametrize("none", [float("-inf"), float("inf")])
def test_rows_without_a_key_are_not_read(none):
    """flash_attn 2.8 gives such rows +inf. Their O may be anything, and their gradients are 0."""
    o1, o2 = (reference.random((1, 3, 2, 4), seed).requires_grad_() for seed in (1, 2))
    lse1, lse2 = (reference.random((1, 2, 3), seed) for seed in (3, 4))
    lse1[..., 0] = lse1[..., 2] = lse2[..., 1] = lse2[..., 2] = none
    with torch.no_grad():
        o1[:, [0, 2]], o2[:, [1, 2]] = float("nan"), float("nan")
    lse1, lse2 = lse1.requires_grad_(), lse2.requires_grad_()
    o, lse = tessera.merge(o1, lse1, o2, lse2)
    assert torch.equal(o[:, 0], o2[:, 0]) and torch.equal(o[:, 1], o1[:, 1]) and o[:, 2].eq(0).all()
    assert torch.equal(lse[..., 0], lse2[..., 0]) and torch.equal(lse[..., 1], lse1[..., 1])
    assert lse[..., 2].eq(float("-inf")).all()
    do1, dlse1, do2, dlse2 = torch.autograd.grad((o.sum(), lse[..., :2].sum()), (o1, lse1, o2, lse2))
    assert do1[:, [0, 2]].eq(0).all() and do1[:, 1].eq(1).all() and do2[:, [1, 2]].eq(0).all() and do2[:, 0].eq(1).all()
    assert dlse1[0, 0].tolist() == [0, 1, 0] and dlse2[0, 0].tolist() == [1, 0, 0]


def test_gradients_are_those_of_the_whole(device):
    for cut in cuts(6, 53, 2):
        q, k, v = reference.inputs(device=device)
        sinks = SINKS.to(device).requires_grad_()
        leaves = (q, k, v, sinks)
        o, lse = tessera.merge(*parts(q, k, v, cut, sinks))
        want = reference.attention(q, k, v, sinks=sinks)
        d_o, dlse = reference.random(o.shape, 3, device), reference.random(lse.shape, 4, device)
        found = torch.autograd.grad((o * d_o).sum() + (lse * dlse).sum(), leaves)
        right = torch.autograd.grad((want[0] * d_o).sum() + (want[1] * dlse).sum(), leaves)
        for name, a, b in zip(("dq", "dk", "dv", "dsinks"), found, right):
            reference.expect_close(a, b, 2e-5, f"{name}, cut {cut}")


def test_gradients_of_all_four():
    """Derivatives of merge() in both orders of its parts, with equal LSE too."""
    o1, o2 = (reference.random((1, 2, 2, 3), seed, dtype=torch.float64).requires_grad_() for seed in (1, 2))
    lse1, lse2 = (reference.random((1, 2, 2), seed, dtype=torch.float64) for seed in (3, 4))
    lse2[0, 0] = lse1[0, 0]
    arguments = (o1, lse1.requires_grad_(), o2, lse2.requires_grad_())
    assert torch.autograd.gradcheck(tessera.merge, arguments)
    assert torch.autograd.gradgradcheck(tessera.merge, arguments)


def test_layouts_numpy_and_ragged_rows():
    q, k, v = (t.detach() for t in reference.inputs())
    of_parts = parts(q, k, v, 20)
    o, lse = tessera.merge(*of_parts)
    o1, lse1, o2, lse2 = of_parts
    turned, same = tessera.merge(o1.transpose(1, 2), lse1, o2.transpose(1, 2), lse2, layout="bhsd")
    assert torch.equal(turned.transpose(1, 2), o) and torch.equal(same, lse)
    rows = [t.flatten(0, 1) if t.dim() == 4 else t.transpose(0, 1).flatten(1) for t in of_parts]
    flat, of_rows = tessera.merge(*rows)
    assert torch.equal(flat, o.flatten(0, 1)) and torch.equal(of_rows, lse.transpose(0, 1).flatten(1))
    of_numpy, lse_numpy = tessera.merge(*(t.numpy() for t in of_parts))
    assert type(of_numpy) is numpy.ndarray and of_numpy.dtype == numpy.float32 == lse_numpy.dtype
    torch.testing.assert_close(torch.from_numpy(of_numpy), o, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.from_numpy(lse_numpy), lse, rtol=1e-6, atol=1e-6)


def test_jax():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    q, k, v = (t.detach() for t in reference.inputs())
    of_torch = parts(q, k, v, 20)
    of_torch[1][0, 0, 0] = float("-inf")
    arrays = [jax.numpy.asarray(t.numpy()) for t in of_torch]
    for found, want in zip(jax.jit(tessera.merge)(*arrays), tessera.merge(*of_torch)):
        numpy.testing.assert_allclose(numpy.asarray(found), want.numpy(), rtol=1e-5, atol=1e-6)
    leaves = [t.clone().requires_grad_() for t in of_torch]
    o, lse = tessera.merge(*leaves)
    right = torch.autograd.grad(o.sin().sum() + lse.sum(), leaves)
    found = jax.grad(lambda a: sum(f(x).sum() for f, x in zip((jax.numpy.sin, lambda x: x), tessera.merge(*a))))(arrays)
    for a, b in zip(found, right):
        numpy.testing.assert_allclose(numpy.asarray(a), b.numpy(), rtol=1e-4, atol=1e-5)


def test_compiled():
    q, k, v = (t.detach() for t in reference.inputs())
    of_parts = parts(q, k, v, 20)
    compiled = torch.compile(tessera.merge, fullgraph=True, backend="aot_eager")
    for found, want in zip(compiled(*of_parts), tessera.merge(*of_parts)):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("change,words", [
    (dict(o1=[1.0]), "^o1: expected an array of NumPy, PyTorch or JAX, got a list"),
    (dict(o2=numpy.zeros((2, 3, 4, 8))), "^o2: expected a Tensor, as o1 is one, got a ndarray"),
    (dict(o2=torch.zeros(2, 3, 4, 9)), r"^o2: expected shape \[2, 3, 4, 8\], got \[2, 3, 4, 9\]"),
    (dict(lse2=torch.zeros(2, 3, 4)), r"^lse2: expected shape \[2, 4, 3\], got \[2, 3, 4\]"),
    (dict(lse1=torch.zeros(2, 4, 3, dtype=torch.int32)), "^lse1: expected a floating dtype, got torch.int32"),
    (dict(o1=torch.zeros(3, 4)), "^o1: expected .batch"), (dict(layout="sbhd"), "^layout: expected 'bshd' or 'bhsd'")],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_refusals_name_the_argument(change, words):
    good = dict(o1=torch.zeros(2, 3, 4, 8), lse1=torch.zeros(2, 4, 3), o2=torch.zeros(2, 3, 4, 8),
                lse2=torch.zeros(2, 4, 3))
    with pytest.raises(ValueError, match=words):
        tessera.merge(**{**good, **change})
