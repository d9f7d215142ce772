# SPDX-License-Identifier: Apache-2.0
"""The residual of O: a forward that will have a backward keeps it where kernels write and read it, and nowhere else."""
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera  # noqa: E402
import tessera.flash_attn  # noqa: E402
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402
from conftest import NO_CUDA  # noqa: E402
from tessera.torch import _operators  # noqa: E402
from test_torch_operators import arguments, samples  # noqa: E402

on_cuda = pytest.mark.skipif(NO_CUDA is not None, reason=f"no kernel here has a residual of O: {NO_CUDA}")
LIMIT = 2 * 1.5 * 2**-8  # limit for gradients in bf16: docs/numerics.md


def inputs(**sizes):
    return reference.inputs(**{**dict(dtype=torch.bfloat16, device="cuda", head_dim=64), **sizes})


def backward_arguments(d_o, q, k, v, o, lse, o_residual, causal, heads_first=False):
    """The operator's arguments for a call without other features."""
    return (d_o, None, q, k, v, o, lse, *(None,) * 5, -1, -1, causal, -1, -1, None, 0.0, 0.0, None, False, heads_first,
            o_residual)


def kept_by(function):
    """Returns the result of `function`, and the shapes of the int8 tensors that autograd kept for it."""
    shapes = []

    def keep(tensor):
        if tensor.dtype == torch.int8:
            shapes.append(tuple(tensor.shape))
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return function(), shapes


@pytest.mark.parametrize("name", ["plain", "everything", "transposed bf16", "heads first", "ragged"])
def test_opcheck(name, device):
    args = samples(device)[name]
    torch.library.opcheck(torch.ops.tessera.attention_with_residual.default, args)
    detached = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    torch.library.opcheck(torch.ops.tessera.forward_with_residual.default, detached)
    o, lse, o_residual = torch.ops.tessera.forward_with_residual.default(*detached)
    backward = (torch.randn_like(o), None, *detached[:3], o, lse, *detached[3:-1], False, detached[-1], o_residual)
    torch.library.opcheck(torch.ops.tessera.attention_backward.default, backward)


@pytest.mark.parametrize("name", ["everything", "transposed bf16", "heads first", "ragged"])
def test_the_operator_with_it_is_the_one_without(name, device):
    """O and LSE are equal in every bit, and so are gradients if no residual is kept."""
    args = samples(device)[name]
    leaves = [t for t in args[:4] if t is not None]
    found = []
    for operator in (torch.ops.tessera.attention.default, torch.ops.tessera.attention_with_residual.default):
        o, lse = operator(*args)[:2]
        found.append((o, lse, *torch.autograd.grad(o.sin().sum() + lse.cos().sum(), leaves)))
    kept = _operators.keeps_residual(args[0])
    for i, (a, b) in enumerate(zip(*found)):
        if kept and i > 1:
            reference.expect_close(a, b, LIMIT, "gradient")
        else:
            assert torch.equal(a, b)


def test_compile_with_the_operator_itself(device):
    torch._dynamo.reset()
    q, k, v = samples(device)["transposed bf16"][:3]

    def block(q, k, v):
        o, lse, _ = torch.ops.tessera.attention_with_residual.default(*arguments(q * 1.5, k, v))
        return o.float().sin().sum() + lse.sum()
    got, want = torch.compile(block, fullgraph=True, backend="aot_eager")(q, k, v), block(q, k, v)
    for a, b in zip(torch.autograd.grad(got, (q, k, v)), torch.autograd.grad(want, (q, k, v))):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_cpu_keeps_none(dtype):
    leaves = reference.inputs(dtype=dtype)
    o, shapes = kept_by(lambda: tt.attention(*leaves, causal="bottom-right"))
    assert shapes == []
    o, lse, o_residual = torch.ops.tessera.forward_with_residual.default(*arguments(*(t.detach() for t in leaves)))
    assert o_residual.shape == (0,) and o_residual.dtype == torch.int8


@pytest.mark.parametrize("call", [dict(), dict(softcap=2.0), dict(layout="bhsd")], ids=str)
def test_a_residual_that_was_not_written_changes_nothing(call, monkeypatch):
    """Autograd keeps the residual, here the empty one that the CPU's kernels return, and hands it to the backward."""
    leaves = reference.inputs(len_q=20, len_kv=20, heads_q=4, heads_kv=4, dtype=torch.bfloat16)
    found = []
    for keep in (False, True):
        monkeypatch.setattr(_operators, "keeps_residual", lambda *_: keep)
        results, shapes = kept_by(lambda: tt.attention(*leaves, return_lse=True, **call))
        assert shapes == ([(0,)] if keep else [])
        both = results[0].float().sin().sum() + results[1].sum()
        found.append([*results, *torch.autograd.grad(both, leaves, retain_graph=True),
                      *torch.autograd.grad(results[0].float().sum(), leaves)])
    for a, b in zip(*found):
        assert torch.equal(a, b)


def test_a_residual_of_another_shape(device):
    """An error where it is read; the CPU's kernels do not look at it."""
    q, k, v = (t.detach() for t in reference.inputs(dtype=torch.bfloat16, device=device))
    o, lse = tt.attention(q, k, v, return_lse=True)
    for wrong in (torch.zeros(1, 2, 3, 4, dtype=torch.int8, device=device), torch.zeros(o.shape, device=device)):
        call = backward_arguments(o, q, k, v, o, lse, wrong, 0)
        if device == "cpu":
            torch.ops.tessera.backward.default(*call)
        else:
            with pytest.raises(RuntimeError, match="o_residual: expected"):
                torch.ops.tessera.backward.default(*call)


CALLS = {
    "plain": dict(),
    "causal window": dict(causal="bottom-right", window=(30, None)),
    "softcap": dict(softcap=3.0),
    "alibi": dict(alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
    "fa2": dict(kernel="cuda.fa2"),
}


@on_cuda
@pytest.mark.parametrize("name", CALLS)
def test_it_is_kept_and_gradients_are_right(name):
    leaves, call = inputs(), reference.moved(CALLS[name], "cuda")
    o, shapes = kept_by(lambda: tt.attention(*leaves, **call))
    assert shapes == [tuple(o.shape)]
    call.pop("kernel", None)
    want, _ = reference.attention(*leaves, **call)
    d_o = reference.random(o.shape, 7, "cuda", o.dtype)
    for which, a, b in zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, d_o),
                           torch.autograd.grad(want, leaves, d_o.double())):
        reference.expect_close(a, b, LIMIT, which)


@on_cuda
@pytest.mark.parametrize("call", [dict(dropout_p=0.95, seed=1), dict(dropout_p=0.1, seed=1, kernel="cuda.fa2"),
                                  dict(kernel="cuda.fa1"), dict(dtype=torch.float32)], ids=str)
def test_it_is_not_kept(call):
    call = dict(call)
    leaves = inputs(dtype=call.pop("dtype", torch.bfloat16))
    assert kept_by(lambda: tt.attention(*leaves, **call))[1] == []


@on_cuda
def test_plans_say_the_same():
    """keeps_residual() is what the plans of both passes say."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for call in (dict(), dict(dropout_p=0.1), dict(softcap=2.0), dict(kernel="cuda.fa1"), dict(kernel="cuda.fa2")):
            if call.get("kernel") == "cuda.fa1" and dtype == torch.float32:
                continue
            q, k, v = (t.detach() for t in inputs(dtype=dtype))
            both = all("o_residual" in str(tessera.plan(q, k, v, backward=b, **call)) for b in (False, True))
            kernel = call.get("kernel") and call["kernel"] + ".forward"
            assert _operators.keeps_residual(q, call.get("dropout_p", 0.0), kernel) == both, (dtype, call)


@on_cuda
def test_ragged_and_flash_attn_keep_it():
    q, k, v = (t.detach().flatten(0, 1).requires_grad_() for t in inputs(len_q=53))
    cu = torch.tensor([0, 20, 106], dtype=torch.int32, device="cuda")
    o, shapes = kept_by(lambda: tessera.flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 86, 86, causal=True))
    assert shapes == [tuple(o.shape)]
    sequences = [[t[a:b][None] for t in (q, k, v)] for a, b in ((0, 20), (20, 106))]
    want = torch.cat([reference.attention(*m, causal="bottom-right")[0][0] for m in sequences])
    for a, b in zip(torch.autograd.grad(o.float().square().sum(), (q, k, v)),
                    torch.autograd.grad(want.square().sum(), (q, k, v))):
        reference.expect_close(a, b, 2 * LIMIT, "gradient")
    leaves = inputs()
    assert kept_by(lambda: tessera.flash_attn.flash_attn_func(*leaves))[1] == [(2, 37, 4, 64)]
    turned = [t.detach().transpose(1, 2).requires_grad_() for t in leaves]
    assert kept_by(lambda: tt.scaled_dot_product_attention(*turned, enable_gqa=True))[1] == [(2, 4, 37, 64)]


@on_cuda
@pytest.mark.parametrize("dynamic,backend", [(False, "inductor"), (True, "aot_eager")], ids=["static", "dynamic"])
def test_a_compiled_call_keeps_it(dynamic, backend):
    torch._dynamo.reset()
    leaves = inputs()

    def block(q, k, v):
        return tt.attention(q * 1.5, k, v, causal="bottom-right")
    got, shapes = kept_by(lambda: torch.compile(block, fullgraph=True, dynamic=dynamic, backend=backend)(*leaves))
    assert shapes == [tuple(got.shape)]
    d_o = reference.random(got.shape, 7, "cuda", got.dtype)
    for a, b in zip(torch.autograd.grad(got, leaves, d_o), torch.autograd.grad(block(*leaves), leaves, d_o)):
        assert torch.equal(a, b)


@on_cuda
def test_rows_that_fa3_cannot_read():
    """The next kernel writes it, too."""
    slices = [torch.nn.functional.pad(t.detach(), (3, 5))[..., 3:-5].requires_grad_() for t in inputs()]
    o, shapes = kept_by(lambda: tt.attention(*slices))
    assert shapes == [tuple(o.shape)]
    want, _ = reference.attention(*slices)
    for a, b in zip(torch.autograd.grad(o.sum(), slices), torch.autograd.grad(want.sum(), slices)):
        reference.expect_close(a, b, LIMIT, "gradient")


@on_cuda
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_the_core_api_gives_it_and_takes_it(layout):
    q, k, v = (t.detach() for t in inputs(heads_q=4, heads_kv=2, len_q=320, len_kv=320))
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    do = torch.randn_like(q)
    o, lse, o_residual = tessera.attention(q, k, v, causal="top-left", layout=layout, return_lse=True,
                                           return_o_residual=True)
    assert o_residual.dtype == torch.int8 and o_residual.shape == o.shape
    want = torch.ops.tessera.forward_with_residual.default(*arguments(q, k, v, causal=2, heads_first=layout == "bhsd"))
    assert all(torch.equal(a, b) for a, b in zip((o, lse, o_residual), want))
    scores = dict(causal="top-left", layout=layout)
    got = tessera.attention_backward(do, q, k, v, o, lse, o_residual=o_residual, **scores)
    want = torch.ops.tessera.backward.default(*backward_arguments(do, q, k, v, o, lse, o_residual, 2, layout == "bhsd"))
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    for a, b in zip(got, tessera.attention_backward(do, q, k, v, o, lse, **scores)):
        reference.expect_close(a, b, LIMIT, "gradient")
