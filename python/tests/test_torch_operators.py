# SPDX-License-Identifier: Apache-2.0
"""The operators as PyTorch's machinery sees them: opcheck, gradcheck, torch.compile, torch.export, torch.func."""
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402


def arguments(q, k, v, bias=None, alibi_slopes=None, cu=(None, None), seed=None, causal=1, window=(-1, -1), scale=None,
              softcap=0.0, dropout_p=0.0, heads_first=False):
    return (q, k, v, bias, alibi_slopes, *cu, seed, -1, -1, causal, *window, scale, softcap, dropout_p, None,
            heads_first)


def samples(device):
    q, k, v = reference.inputs(len_q=5, len_kv=7, head_dim=8, device=device)
    bias = torch.randn(1, 4, 5, 7, device=device, requires_grad=True)
    cu = torch.tensor([0, 2, 5], device=device), torch.tensor([0, 3, 7], device=device)
    packed = [t[0].detach().clone().requires_grad_() for t in (q, k, v)]
    return {"plain": arguments(q, k, v),
            "everything": arguments(q, k, v, bias, torch.rand(4, device=device), seed=torch.tensor([3]),
                                    window=(3, -1), scale=0.3,
                                    softcap=5.0, dropout_p=0.2),
            "transposed bf16": arguments(*(t.detach().transpose(1, 2).contiguous().transpose(1, 2).bfloat16()
                                           .requires_grad_() for t in (q, k, v))),
            "heads first": arguments(*(t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v)),
                                     heads_first=True),
            "ragged": arguments(*packed, cu=cu)}


@pytest.mark.parametrize("name", ["plain", "everything", "transposed bf16", "heads first", "ragged"])
def test_opcheck(name, device):
    args = samples(device)[name]
    torch.library.opcheck(torch.ops.tessera.attention.default, args)
    detached = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    torch.library.opcheck(torch.ops.tessera.forward.default, detached)
    o, lse = torch.ops.tessera.forward.default(*detached)
    d_o, dlse = torch.randn_like(o), torch.randn_like(lse)
    backward = (d_o, dlse, *detached[:3], o, lse, *detached[3:-1], detached[3] is not None, detached[-1])
    for operator in (torch.ops.tessera.backward, torch.ops.tessera.attention_backward):
        torch.library.opcheck(operator.default, backward)
    if name in ("plain", "heads first"):
        for operator in (torch.ops.tessera.forward_o, torch.ops.tessera.forward_few,
                         torch.ops.tessera.forward_few_with_residual):
            torch.library.opcheck(operator.default, (*detached[:3], 1, detached[-1]))


@pytest.mark.parametrize("features", [{}, dict(causal="bottom-right", softcap=3.0), dict(window=(2, 1), scale=0.7),
                                      dict(dropout_p=0.3, seed=4), dict(alibi_slopes=torch.tensor([0.5, 0.25]))],
                         ids=lambda f: "+".join(f) or "plain")
def test_gradcheck_fp64(features):
    """The reference kernel: fp64 through and through, by finite differences; O and LSE, and the bias."""
    q, k, v = reference.inputs(batch=1, len_q=3, len_kv=4, heads_q=2, heads_kv=1, head_dim=4, head_dim_v=3,
                               dtype=torch.float64)
    bias = torch.randn(1, 2, 1, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda *t: tt.attention(*t[:3], bias=t[3], return_lse=True, **features), (q, k, v, bias))


def test_gradcheck_fp32(device):
    q, k, v = reference.inputs(batch=1, len_q=3, len_kv=4, heads_q=2, heads_kv=1, head_dim=4, device=device)
    torch.autograd.gradcheck(lambda *t: tt.attention(*t, causal="bottom-right", return_lse=True), (q, k, v), eps=1e-2,
                             atol=2e-3, rtol=2e-3)


def test_a_second_derivative_is_an_error(device):
    q, k, v = reference.inputs(device=device)
    first, = torch.autograd.grad(tt.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(first.sum(), q)
    o, _ = torch.ops.tessera.attention.default(*arguments(q, k, v))
    first, = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.autograd.grad(first.sum(), q)


def block(q, k, v, bias):
    o, lse = tt.attention(q * 1.5, k, v, causal="bottom-right", bias=bias, return_lse=True)
    return torch.nn.functional.gelu(o), lse


@pytest.mark.parametrize("dynamic,backend", [(False, "aot_eager"), (True, "inductor")], ids=["static", "dynamic"])
def test_compile_fullgraph_with_backward(dynamic, backend, device):
    torch._dynamo.reset()
    torch.manual_seed(0)  # the limit below is near the rounding of some draws
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend=backend)
    for length in (24, 33) if dynamic else (24,):
        leaves = [*reference.inputs(len_q=length, len_kv=length, device=device),
                  torch.randn(1, 4, length, length, device=device, requires_grad=True)]
        got, want = compiled(*leaves), block(*leaves)
        gradients = [torch.autograd.grad(r[0].sum() + r[1].sum(), leaves) for r in (got, want)]
        for a, b in zip((*got, *gradients[0]), (*want, *gradients[1])):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_compile_with_dropout_and_varlen(device):
    torch._dynamo.reset()
    q, k, v = (t.detach()[0] for t in reference.inputs(batch=1, len_q=30, len_kv=30, device=device))
    cu = torch.tensor([0, 13, 30], dtype=torch.int32, device=device)

    def step(q, k, v, cu, seed):
        return tt.varlen_attention(q, k, v, cu, cu, max_len_q=17, max_len_kv=17, dropout_p=0.2, seed=seed)
    seed = torch.tensor([4])
    assert torch.equal(torch.compile(step, fullgraph=True)(q, k, v, cu, seed), step(q, k, v, cu, seed))


def test_export(device):
    class Block(torch.nn.Module):
        def forward(self, q, k, v):
            return tt.attention(q, k, v, causal="top-left", return_lse=True)
    q, k, v = (t.detach() for t in reference.inputs(len_q=12, len_kv=12, device=device))
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(Block(), (q, k, v), dynamic_shapes=({1: length},) * 3)
    assert "tessera.attention" in str(program.graph)
    other = [t.detach() for t in reference.inputs(len_q=20, len_kv=20, seed=3, device=device)]
    for a, b in zip(program.module()(*other), Block()(*other)):
        assert torch.equal(a, b)


def loss(q, k, v, bias=None, **features):
    o, lse = tt.attention(q, k, v, bias=bias, return_lse=True, **features)
    return o.sin().sum() + lse.cos().sum()


def test_func_grad_is_autograd(device):
    leaves = reference.inputs(device=device)
    want = torch.autograd.grad(loss(*leaves), leaves)
    for a, b in zip(torch.func.grad(loss, (0, 1, 2))(*(t.detach() for t in leaves)), want):
        assert torch.equal(a, b)


@pytest.mark.parametrize("features", [dict(causal="bottom-right"), dict(dropout_p=0.3, seed=2),
                                      dict(alibi_slopes=torch.tensor([0.5, 0.3, 0.2, 0.1]))],
                         ids=lambda f: next(iter(f)))
@pytest.mark.parametrize("in_dims", [(0, None, None, None), (2, 1, 0, 3), (None, 0, None, 0)], ids=str)
def test_vmap_is_a_loop(features, in_dims, device):
    """vmap(f)(x)[i] == f(x[i]), for the function and for its gradients: the bias's too."""
    size, features = 3, reference.moved(features, device)
    whole = [t.detach() for t in reference.inputs(len_q=6, len_kv=9, device=device)]
    whole.append(torch.randn(1, 4, 1, 9, device=device))
    mapped = [t if d is None else torch.stack([t + i for i in range(size)], d) for t, d in zip(whole, in_dims)]
    entries = [[t if d is None else t.select(d, i) for t, d in zip(mapped, in_dims)] for i in range(size)]

    def value(*t):
        return tt.attention(*t[:3], bias=t[3], return_lse=True, **features)

    def gradients(*t):
        return torch.func.grad(lambda *u: loss(*u, **features), (0, 1, 2, 3))(*t)
    for function in (value, gradients):
        got = torch.func.vmap(function, in_dims=in_dims)(*mapped)
        want = [function(*e) for e in entries]
        for a, b in zip(got, zip(*want)):
            torch.testing.assert_close(a, torch.stack(b), rtol=1e-5, atol=1e-6)
