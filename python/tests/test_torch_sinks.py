# SPDX-License-Identifier: Apache-2.0
"""sinks= of tessera.torch: O, LSE and all gradients against fp64, in every way of calling."""
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402

FEATURES = {"plain": {}, "causal": dict(causal="bottom-right"), "window": dict(window=(9, 4)),
            "softcap": dict(softcap=2.0, scale=0.3)}


def leaves_of(device, len_q=37, dtype=torch.float32):
    sinks = torch.tensor([0.5, -1.0, 6.0, 0.1], device=device).requires_grad_()
    return [*reference.inputs(len_q=len_q, device=device, dtype=dtype), sinks]


def call(q, k, v, sinks, **options):
    return tt.attention(q, k, v, sinks=sinks, return_lse=True, **options)


def gradients(function, leaves):
    """O, LSE, and the gradients of a loss of both."""
    o, lse = function(*leaves)
    d_o, dlse = reference.random(o.shape, 3, o.device), reference.random(lse.shape, 4, o.device)
    return o, lse, torch.autograd.grad((o * d_o).sum() + (lse * dlse).sum(), leaves)


def expect_same(function, want, leaves, rmse=1e-5):
    o, lse, found = gradients(function, leaves)
    o_want, lse_want, right = gradients(want, leaves)
    reference.expect_close(o, o_want, 3e-6, "o")
    reference.expect_lse(lse, lse_want)
    for name, a, b in zip(("dq", "dk", "dv", "dsinks"), found, right):
        reference.expect_close(a, b, rmse, name)


@pytest.mark.parametrize("len_q", [1, 37, 70], ids=["decoding", "more keys", "rows without a key"])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("math", [False, True], ids=["kernels", "math"])
def test_o_lse_and_gradients(name, len_q, math, device):
    options = FEATURES[name]
    expect_same(lambda *a: call(*a, math=math, **options),
                lambda q, k, v, s: reference.attention(q, k, v, sinks=s, **options), leaves_of(device, len_q))


def test_heads_first_and_ragged(device):
    q, k, v, sinks = leaves_of(device)
    o, lse = call(q, k, v, sinks, causal="top-left")
    turned, lse_too = call(*(t.transpose(1, 2) for t in (q, k, v)), sinks, causal="top-left", layout="bhsd")
    assert torch.equal(turned.transpose(1, 2), o) and torch.equal(lse, lse_too)
    rows = [t.flatten(0, 1) for t in (q, k, v)]
    cu = [torch.arange(3, device=device, dtype=torch.int32) * n for n in (37, 53)]
    ragged, of_rows = tt.varlen_attention(*rows, *cu, sinks=sinks, causal="top-left", return_lse=True)
    assert torch.equal(ragged.unflatten(0, (2, 37)), o)
    assert torch.equal(of_rows.unflatten(1, (2, 37)).transpose(0, 1), lse)


def test_rows_behind_the_last_offset_have_no_sinks():
    """Neither by kernels nor without: O is 0 and LSE -inf, which gives the sinks no gradient."""
    q, k, v, sinks = leaves_of("cpu")
    rows, cu = [t[0] for t in (q, k, v)], [torch.tensor([0, 5, n]) for n in (20, 30)]

    def ragged(sinks, **options):
        return tt.varlen_attention(*rows, *cu, sinks=sinks, return_lse=True, **options)
    ways = (ragged, lambda s: ragged(s, math=True),
            lambda s: [t[0] for t in torch.func.vmap(ragged)(s[None])])
    for way in ways:
        o, lse = way(sinks)
        assert not o[20:].any() and (lse[:, 20:] == float("-inf")).all() and lse[:, :20].isfinite().all()
        assert not torch.autograd.grad(lse[:, 20:].sum(), sinks)[0].any()


def test_compiled(device):
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaves = leaves_of(device)
    expect_same(lambda *a: compiled(*a, causal="bottom-right"),
                lambda q, k, v, s: reference.attention(q, k, v, causal="bottom-right", sinks=s), leaves)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_has_the_bits_of_eager(strict, device):
    class Layer(torch.nn.Module):
        def forward(self, *tensors):
            return call(*tensors)
    leaves = [t.detach() for t in leaves_of(device, dtype=torch.bfloat16)]
    program = torch.export.export(Layer(), tuple(leaves), strict=strict)
    for found, want in zip(program.module()(*leaves), call(*leaves)):
        assert torch.equal(found, want)


def test_float64_is_exact():
    """Kernels take sinks in float32, which would leave seven digits."""
    leaves = [t.detach().double().requires_grad_() for t in leaves_of("cpu", len_q=3)]
    expect_same(call, lambda q, k, v, s: reference.attention(q, k, v, sinks=s), leaves, 1e-13)
    o, lse = call(*leaves)
    want, lse_want = reference.attention(*leaves[:3], sinks=leaves[3])
    torch.testing.assert_close((o, lse), (want, lse_want), rtol=0, atol=1e-13)


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():
        q, k, sinks = torch.empty(2, 5, 4, 8, dtype=torch.bfloat16), torch.empty(2, 7, 2, 8, dtype=torch.bfloat16), \
            torch.empty(4)
        o, lse = call(q, k, k, sinks)
        assert o.shape == q.shape and o.dtype == torch.bfloat16 and lse.shape == (2, 4, 5)


def test_under_vmap(device):
    q, k, v, sinks = (t.detach() for t in leaves_of(device))
    many = torch.stack((sinks, 2 * sinks))
    found = torch.func.vmap(lambda s: call(q, k, v, s)[0])(many)
    for i in range(2):
        reference.expect_close(found[i], call(q, k, v, many[i])[0], 1e-6, "o")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype, device):
    q, k, v, sinks = leaves_of(device, dtype=dtype)
    o, lse = call(q, k, v, sinks.to(dtype))
    want, lse_want = reference.attention(q, k, v, sinks=sinks.to(dtype))
    assert o.dtype == dtype
    reference.expect_close(o, want, 3 * torch.finfo(dtype).eps, "o")
    reference.expect_lse(lse, lse_want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_has_the_bits_of_kernels_with_sinks(dtype):
    """O, LSE and all gradients of tessera.attention(), which runs them: O is not read and written once more."""
    import tessera
    leaves = leaves_of("cpu", dtype=dtype)
    with reference.Names() as names:
        o, lse = call(*leaves, causal="bottom-right")
    assert "tessera::attention_with_sinks" in names.seen and "aten::sigmoid" not in names.seen
    q, k, v, sinks = (t.detach() for t in leaves)
    want, want_lse = tessera.attention(q, k, v, sinks=sinks, causal="bottom-right", return_lse=True)
    assert torch.equal(o, want) and torch.equal(lse, want_lse)
    d_o, dlse = reference.random(o.shape, 3).to(dtype), reference.random(lse.shape, 4)
    right = tessera.attention_backward(d_o, q, k, v, want, want_lse, dlse=dlse, sinks=sinks, causal="bottom-right",
                                       sinks_gradient=True)
    for a, b in zip(torch.autograd.grad((o, lse), leaves, (d_o, dlse)), right):
        assert torch.equal(a, b)


def test_the_operator_keeps_the_rules_of_pytorch():
    q, k, v, sinks = leaves_of("cpu", len_q=5)
    arguments = (q, k, v, *(None,) * 5, -1, -1, 1, -1, -1, None, 0.0, 0.0, None, False, sinks)
    torch.library.opcheck(torch.ops.tessera.attention_with_sinks.default, arguments)


@pytest.mark.parametrize("len_q,len_kv", [(200, 200), (3, 700)], ids=["queries of several tiles", "few queries"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_take_sinks_in_both_passes(dtype, len_q, len_kv, device):
    """No operator of PyTorch computes O from LSE, and gradients of 16 bits are those of the exact inputs."""
    leaves = [t.detach().requires_grad_() for t in reference.inputs(len_q=len_q, len_kv=len_kv, device=device, dtype=dtype)]
    leaves.append(torch.tensor([0.5, -1.0, 6.0, 0.1], device=device).requires_grad_())
    with reference.Names() as names:
        o, lse = call(*leaves, causal="bottom-right")
    assert any(name.startswith("tessera::attention_with_sinks") for name in names.seen)
    assert "aten::sigmoid" not in names.seen
    want, lse_want = reference.attention(*leaves[:3], sinks=leaves[3], causal="bottom-right")
    few = {torch.float32: 3e-6}.get(dtype, 3 * torch.finfo(dtype).eps)
    of_sinks = 1e-3 if device == "cuda" and dtype != torch.float32 else 1e-5  # there delta comes from O and its residual
    reference.expect_close(o, want, few, "o")
    reference.expect_lse(lse, lse_want)
    d_o, dlse = reference.random(o.shape, 3, device).to(dtype), reference.random(lse.shape, 4, device)
    found = torch.autograd.grad((o, lse), leaves, (d_o, dlse))
    right = torch.autograd.grad((want, lse_want), leaves, (d_o.to(want.dtype), dlse.to(lse_want.dtype)))
    for name, a, b in zip(("dq", "dk", "dv", "dsinks"), found, right):
        reference.expect_close(a, b, of_sinks if name == "dsinks" else max(1e-5, few), name)


@pytest.mark.parametrize("sinks,words", [
    (torch.zeros(3), r"^sinks: expected shape \[4\], got \[3\]"), (torch.zeros(4, dtype=torch.int32), "^sinks: "),
    (0.5, "^sinks: expected a torch.Tensor"), (torch.zeros(4, 1), "^sinks: ")])
def test_wrong_sinks_are_refused(sinks, words):
    q, k, v, _ = leaves_of("cpu")
    with pytest.raises(ValueError, match=words):
        call(q, k, v, sinks)
