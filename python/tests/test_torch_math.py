# SPDX-License-Identifier: Apache-2.0
"""math=True: the call composed of PyTorch's own operators. It is what the kernels compute, dropout's draws included,
and has derivatives of any order, forward mode and the weights."""
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402
from tessera import flash_attn  # noqa: E402

FEATURES = {
    "plain": {}, "causal": dict(causal="bottom-right"), "top-left": dict(causal="top-left"),
    "window": dict(window=(9, 4)), "left window": dict(window=(5, None), causal="bottom-right"),
    "scale": dict(scale=0.3), "softcap": dict(softcap=2.0),
    "alibi": dict(alibi_slopes=torch.tensor([0.5, 0.3, 0.2, 0.1])),
    "alibi of each": dict(alibi_slopes=torch.rand(2, 4, generator=torch.Generator().manual_seed(1))),
    "dropout": dict(dropout_p=0.3, seed=5), "dropout and causal": dict(dropout_p=0.6, seed=7, causal="bottom-right"),
    "all": dict(dropout_p=0.2, seed=1, causal="bottom-right", window=(20, None), softcap=3.0, scale=0.4,
                alibi_slopes=torch.tensor([0.5, 0.3, 0.2, 0.1]))}


def bias_of(device):
    return reference.random((1, 4, 1, 53), 8, device).requires_grad_()


@pytest.mark.parametrize("len_q", [37, 70], ids=["more keys", "rows without a key"])
@pytest.mark.parametrize("name", FEATURES)
def test_it_is_what_the_kernels_compute(name, len_q, device):
    options = reference.moved(FEATURES[name], device)
    leaves = [*reference.inputs(len_q=len_q, device=device), bias_of(device)]
    results = [tt.attention(*leaves[:3], bias=leaves[3], return_lse=True, math=math, **options)
               for math in (True, False)]
    reference.expect_close(results[0][0], results[1][0], 3e-6, "o")
    reference.expect_lse(results[0][1], results[1][1])
    d_o = reference.random(results[0][0].shape, 3, device)
    gradients = [torch.autograd.grad((o * d_o).sum() + lse[lse.isfinite()].sin().sum(), leaves) for o, lse in results]
    for a, b in zip(*gradients):
        reference.expect_close(a, b, 2e-5, "gradient")


@pytest.mark.parametrize("name", ["plain", "causal", "window", "alibi of each", "dropout and causal", "all"])
def test_ragged(name, device):
    options = reference.moved(FEATURES[name], device)
    leaves = [t.detach()[0].requires_grad_() for t in reference.inputs(batch=1, device=device)]
    cu_q, cu_kv = torch.tensor([0, 13, 13, 37], device=device), torch.tensor([0, 20, 30, 53], device=device)
    if name == "alibi of each":
        options["alibi_slopes"] = torch.rand(3, 4, device=device)
    results = [tt.varlen_attention(*leaves, cu_q, cu_kv, return_lse=True, math=math, **options)
               for math in (True, False)]
    reference.expect_close(results[0][0], results[1][0], 3e-6, "o")
    reference.expect_lse(results[0][1], results[1][1])
    gradients = [torch.autograd.grad(o.sin().sum() + lse[lse.isfinite()].sum(), leaves) for o, lse in results]
    for a, b in zip(*gradients):
        reference.expect_close(a, b, 2e-5, "gradient")
    with pytest.raises(ValueError, match="^cu_seqlens_kv: expected values that rise"):
        tt.varlen_attention(*leaves, cu_q, cu_kv.flip(0), math=True)


def small(**more):
    q, k, v = reference.inputs(batch=1, len_q=3, len_kv=4, heads_q=2, heads_kv=1, head_dim=3, head_dim_v=2,
                               dtype=torch.float64)
    bias = torch.randn(1, 2, 1, 4, dtype=torch.float64, requires_grad=True,
                       generator=torch.Generator().manual_seed(2))
    return (q, k, v, bias), lambda *t: tt.attention(*t[:3], bias=t[3], return_lse=True, math=True, **more)


DERIVED = {"plain": {}, "causal and softcap": dict(causal="bottom-right", softcap=3.0), "window": dict(window=(1, 0)),
           "dropout": dict(dropout_p=0.4, seed=3), "alibi": dict(alibi_slopes=torch.tensor([0.5, 0.25]))}


@pytest.mark.parametrize("name", DERIVED)
def test_first_and_second_derivatives_and_forward_mode(name):
    inputs, function = small(**DERIVED[name])
    torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True)


def test_derivatives_where_a_query_sees_no_key():
    """Rows without a key: o is 0 and its derivatives are 0, not NaN."""
    q, k, v = reference.inputs(batch=1, len_q=4, len_kv=2, heads_q=2, heads_kv=1, head_dim=3, dtype=torch.float64)
    blocked = torch.zeros(4, 2, dtype=torch.float64)
    blocked[3] = float("-inf")

    def function(*t):
        return tt.attention(*t, bias=blocked, causal="bottom-right", math=True)
    torch.autograd.gradcheck(function, (q, k, v), check_forward_ad=True)
    torch.autograd.gradgradcheck(function, (q, k, v))


def test_second_derivatives_of_sdpa_and_varlen():
    q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in small()[0][:3])
    options = dict(is_causal=True, enable_gqa=True, math=True)
    torch.autograd.gradgradcheck(lambda *t: tt.scaled_dot_product_attention(*t, **options), (q, k, v))
    rows = [t.detach()[0].requires_grad_() for t in small()[0][:3]]
    cu = torch.tensor([0, 1, 3]), torch.tensor([0, 2, 4])
    torch.autograd.gradgradcheck(lambda *t: tt.varlen_attention(*t, *cu, math=True), rows)


def test_torch_func(device):
    q, k, v = (t.detach() for t in reference.inputs(len_q=3, len_kv=4, head_dim=4, device=device))

    def loss(q):
        return tt.attention(q, k, v, causal="bottom-right", math=True).sin().sum()
    hessian = torch.func.hessian(loss)(q)
    assert hessian.shape == (*q.shape, *q.shape)
    tangent = torch.randn_like(q)
    _, by_forward = torch.func.jvp(torch.func.grad(loss), (q,), (tangent,))
    torch.testing.assert_close(by_forward, (hessian * tangent).sum((-4, -3, -2, -1)), rtol=1e-4, atol=1e-5)
    mapped = torch.func.vmap(lambda q: tt.attention(q, k, v, math=True))(torch.stack((q, 2 * q)))
    torch.testing.assert_close(mapped[1], tt.attention(2 * q, k, v), rtol=1e-5, atol=1e-5)
    torch.func.vmap(lambda q: tt.attention(q, k, v, math=True, dropout_p=0.5, seed=1))(torch.stack((q, 2 * q)))


def test_half_precision_and_compile(device):
    q, k, v = (t.detach().bfloat16() for t in reference.inputs(device=device))
    o = tt.attention(q, k, v, math=True)
    want, _ = reference.attention(q, k, v)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o, want.bfloat16(), rtol=1e-2, atol=1e-3)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: tt.attention(*t, causal="top-left", math=True), fullgraph=True,
                             backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), tt.attention(q, k, v, causal="top-left", math=True))


@pytest.mark.parametrize("name", [n for n in FEATURES if "dropout" not in n and n != "all"])
def test_weights(name, device):
    """They are the weights: rows sum to 1, and their product with v is O."""
    options = reference.moved(FEATURES[name], device)
    q, k, v = reference.inputs(device=device)
    bias = bias_of(device)
    weights = tt.attention_weights(q, k, bias=bias, **options)
    assert weights.shape == (2, 4, 37, 53) and weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 37, device=device))
    o = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(2, 2))
    reference.expect_close(o, tt.attention(q, k, v, bias=bias, **options), 3e-6, "o")
    heads_first = tt.attention_weights(q.transpose(1, 2), k.transpose(1, 2), bias=bias, layout="bhsd", **options)
    assert torch.equal(heads_first, weights)
    weights.sum().backward()
    assert q.grad is not None


def test_weights_of_a_query_that_sees_no_key():
    q, k, _ = reference.inputs(len_q=53, len_kv=37)
    weights = tt.attention_weights(q, k, causal="bottom-right")
    assert not weights[:, :, :16].any() and weights[:, :, 16:].sum(-1).allclose(torch.ones(()))


def test_what_it_refuses():
    q, k, v = reference.inputs()
    with pytest.raises(ValueError, match="^kernel: expected None with math=True"):
        tt.attention(q, k, v, kernel="reference", math=True)
    with pytest.raises(ValueError, match="^layout: "):
        tt.attention_weights(q, k, layout="sbhd")
    with pytest.raises(ValueError, match="^k: expected shape"):
        tt.attention_weights(q, k[:1])


CALLS = {"attention": tt.attention, "scaled_dot_product_attention": tt.scaled_dot_product_attention,
         "flash_attn": flash_attn.flash_attn_func}


@pytest.mark.parametrize("name", CALLS)
def test_errors_of_the_kernels_name_the_way_out(name, device):
    q, k, v = (torch.randn(1, 4, 4, 8, device=device, requires_grad=True) for _ in range(3))
    first, = torch.autograd.grad(CALLS[name](q, k, v).sin().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives; math=True of tessera.torch.attention"):
        first.sum().backward()
    with pytest.raises(NotImplementedError, match="forward mode .*; math=True of tessera.torch.attention"):
        torch.func.jvp(lambda q: CALLS[name](q, k.detach(), v.detach()), (q.detach(),), (q.detach(),))
    with pytest.raises(NotImplementedError, match="math=True of tessera.torch.attention"):
        torch.func.hessian(lambda q: CALLS[name](q, k.detach(), v.detach()).sum())(q.detach())
