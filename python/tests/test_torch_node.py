# SPDX-License-Identifier: Apache-2.0
"""O by PyTorch's own node of autograd (tessera.torch._node): the same bits as by a torch.autograd.Function, which runs
where LSE is asked for, and only where nothing but a plain eager call would notice."""
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402
from tessera import flash_attn  # noqa: E402
from tessera.torch import _node, _operators  # noqa: E402

ATEN = {"cpu": torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
        "cuda": torch.ops.aten._scaled_dot_product_flash_attention_for_cpu}
NODES = {"cpu": "ScaledDotProductFusedAttentionOverrideable", "cuda": "ScaledDotProductFlashAttentionForCpu"}
WITH_LSE_AND_REST = 256 * 5 + 2 * 37 * 4 * 64  # bytes, with inputs() of head_dim 64: LSE is 1,184


def by_pytorch(o):
    return type(o.grad_fn).__name__.startswith(NODES[o.device.type])


def test_this_pytorch_has_the_operators():
    assert _node.on_cpu is not None and _node.on_cuda is not None


CALLS = {"plain": {}, "bottom-right": dict(causal="bottom-right"), "top-left": dict(causal="top-left"),
         "window": dict(window=(9, 3)), "window to the left": dict(window=(7, None), causal="bottom-right"),
         "the widest window": dict(window=(2**21 - 2, 2)),
         "scale": dict(scale=0.3), "integer scale": dict(scale=1), "heads first": dict(layout="bhsd", causal="top-left")}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_as_with_lse(name, dtype, device):
    leaves = reference.inputs(dtype=dtype, device=device)
    if name == "heads first":
        leaves = [t.detach().transpose(1, 2).requires_grad_() for t in leaves]
    got = tt.attention(*leaves, **CALLS[name])
    want, _ = tt.attention(*leaves, **CALLS[name], return_lse=True)
    assert by_pytorch(got) and not by_pytorch(want)
    assert torch.equal(got, want) and got.stride() == want.stride()
    d_o = reference.random(got.shape, 4, device, dtype)
    for a, b in zip(torch.autograd.grad(got, leaves, d_o), torch.autograd.grad(want, leaves, d_o)):
        assert torch.equal(a, b)


def test_gradients_are_right(device):
    leaves = reference.inputs(device=device)
    o = tt.attention(*leaves, causal="bottom-right")
    want, _ = reference.attention(*leaves, causal="bottom-right")
    for name, a, b in zip(("dq", "dk", "dv"), torch.autograd.grad(o.sin().sum(), leaves),
                          torch.autograd.grad(want.sin().sum(), leaves)):
        reference.expect_close(a, b, 1e-5, name)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_only_some_want_gradients(wanted, device):
    tensors = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(reference.inputs(device=device))]
    leaves = [t for t in tensors if t.requires_grad]
    o = tt.attention(*tensors)
    assert by_pytorch(o)
    want = torch.autograd.grad(tt.attention(*tensors, return_lse=True)[0].sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(o.sum(), leaves), want))


def test_the_residual_of_o_goes_to_the_backward(monkeypatch, device):
    """Where the forward keeps it (bf16 on CUDA), autograd keeps one tensor more, and gradients have the bits that they
    have with LSE."""
    monkeypatch.setattr(_operators, "LEAST_FOR_REST", 0)
    leaves = reference.inputs(dtype=torch.bfloat16, device=device, head_dim=64)
    o = tt.attention(*leaves)
    assert by_pytorch(o)
    kept = o.grad_fn._saved_logsumexp
    assert (kept.dtype, kept.shape) == ((torch.int8, (WITH_LSE_AND_REST,)) if device == "cuda" else
                                        (torch.float32, (2, 4, 37)))
    want = torch.autograd.grad(tt.attention(*leaves, return_lse=True)[0].sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(o.sum(), leaves), want))


def test_adapters_take_it(device):
    leaves = reference.inputs(heads_kv=4, device=device)
    heads_first = [t.detach().transpose(1, 2).requires_grad_() for t in leaves]
    assert by_pytorch(flash_attn.flash_attn_func(*leaves, causal=True))
    assert by_pytorch(tt.scaled_dot_product_attention(*heads_first, is_causal=True))
    assert not by_pytorch(flash_attn.flash_attn_func(*leaves, causal=True, return_attn_probs=True)[0])


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_kernel_that_writes_no_residual(heads_first, monkeypatch, device):
    """Rows that are not aligned go to a kernel that may not write it: what is kept says so."""
    monkeypatch.setattr(_operators, "LEAST_FOR_REST", 0)
    leaves = reference.inputs(dtype=torch.bfloat16, device=device, head_dim=64)
    if heads_first:
        leaves = [t.detach().transpose(1, 2).requires_grad_() for t in leaves]
    slices = [torch.nn.functional.pad(t.detach(), (3, 5))[..., 3:-5].requires_grad_() for t in leaves]
    layout = dict(layout="bhsd" if heads_first else "bshd")
    got, want = tt.attention(*slices, **layout), tt.attention(*slices, **layout, return_lse=True)[0]
    assert by_pytorch(got) and torch.equal(got, want)
    for a, b in zip(torch.autograd.grad(got.sum(), slices), torch.autograd.grad(want.sum(), slices)):
        assert torch.equal(a, b)


def test_a_window_that_is_too_wide_for_the_operator(device):
    leaves = reference.inputs(device=device)
    o = tt.attention(*leaves, window=(2**21, None))
    assert not by_pytorch(o)
    assert torch.equal(o, tt.attention(*leaves, window=(2**20, None)))


def test_a_first_call_in_inference_mode(device):
    """What is kept of a call for the next ones must not be a tensor of inference mode, which no backward may keep."""
    leaves = reference.inputs(device=device)
    _node.code.cache_clear()
    with torch.inference_mode():
        tt.attention(*leaves, scale=0.37)
    assert torch.autograd.grad(tt.attention(*leaves, scale=0.37).sum(), leaves)[0].shape == leaves[0].shape


def test_checkpointing(device):
    from torch.utils.checkpoint import checkpoint
    leaves = reference.inputs(device=device)
    for reentrant in (False, True):
        o = checkpoint(lambda *t: tt.attention(*t, causal="bottom-right"), *leaves, use_reentrant=reentrant)
        want = torch.autograd.grad(tt.attention(*leaves, causal="bottom-right").sum(), leaves)
        o.sum().backward()
        assert all(torch.equal(t.grad, g) for t, g in zip(leaves, want))
        for t in leaves:
            t.grad = None


def test_what_traces_sees_tesseras_operators(device):
    leaves = reference.inputs(device=device)
    with reference.Names() as names:
        tt.attention(*leaves).sum().backward()
    assert {"tessera::plain", "tessera::plain_backward"} <= set(names.seen)
    assert not any(name.startswith("aten::_scaled_dot_product") for name in names.seen)


class Subclass(torch.Tensor):
    pass


def test_subclasses_and_pytorchs_without_the_operator(device, monkeypatch):
    leaves = reference.inputs(device=device)
    own = leaves[0].detach().as_subclass(Subclass).requires_grad_()
    assert not by_pytorch(tt.attention(own, *leaves[1:]))
    assert by_pytorch(tt.attention(torch.nn.Parameter(leaves[0].detach()), *leaves[1:]))
    want = torch.autograd.grad(tt.attention(*leaves).sum(), leaves)
    monkeypatch.setattr(_node, "on_cpu", None)
    monkeypatch.setattr(_node, "on_cuda", None)
    o = tt.attention(*leaves)
    assert not by_pytorch(o)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(o.sum(), leaves), want))


CODE = _node.code(0, True, -1, -1, _operators.LEAST_FOR_REST)
WRONG = {"no settings": {}, "a probability": dict(dropout_p=0.1), "half a number": dict(dropout_p=float("nan")),
         "a number that is too large": dict(dropout_p=2.0**53), "other settings too": dict(dropout_p=CODE, is_causal=True)}


@pytest.mark.parametrize("name", WRONG)
def test_pytorchs_operator_is_for_tessera_only(name, device):
    """Nobody who calls it as PyTorch describes it gets a number that means something else."""
    q, k, v = (t.detach().transpose(1, 2) for t in reference.inputs(device=device))
    with pytest.raises(RuntimeError, match="dropout_p: expected"):
        ATEN[device].default(q, k, v, **WRONG[name])
    bias = dict(attn_bias=torch.zeros(1)) if device == "cpu" else dict(attn_mask=torch.zeros(1, device=device))
    with pytest.raises(RuntimeError, match="dropout_p: expected"):
        ATEN[device].default(q, k, v, dropout_p=CODE, **bias)


@pytest.mark.parametrize("heads_first", [False, True])
def test_codes_are_read_as_they_are_written(heads_first, device):
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    if heads_first:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    for causal, left, right in ((0, -1, -1), (1, -1, -1), (2, 0, -1), (0, 2, 7), (1, 11, 0), (2, 2**21 - 2, 3)):
        o = _node.attention(q, k, v, causal, heads_first, 0.4, left, right)
        want = _operators.plain(_operators._plain_o, q, k, v, causal, heads_first, 0.4, left, right)
        assert torch.equal(o, want), (causal, left, right)


@pytest.mark.parametrize("scale", [float("nan"), "x", [1.0]], ids=str)
def test_scales_that_are_none(scale, device):
    with pytest.raises(ValueError, match="^scale: "):
        tt.attention(*reference.inputs(device=device), scale=scale)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t.sum()

    @staticmethod
    def backward(ctx, d_o):
        return None


def test_an_o_whose_gradient_is_none(device):
    leaves = reference.inputs(dtype=torch.float32, device=device)
    o = tt.attention(*leaves)
    assert by_pytorch(o)
    NoGradient.apply(o).backward()
    assert all(t.grad is None for t in leaves)


def test_hooks_on_what_is_saved(device):
    leaves = reference.inputs(dtype=torch.float32, device=device)
    tt.attention(*leaves).sum().backward()
    want = [t.grad.clone() for t in leaves]
    for t in leaves:
        t.grad = None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        o = tt.attention(*leaves)
    assert not by_pytorch(o)
    o.sum().backward()
    assert all(torch.equal(t.grad, w) for t, w in zip(leaves, want))


def test_checkpoints_under_a_mode_that_came_later(device):
    leaves = reference.inputs(dtype=torch.float32, device=device)
    o = torch.utils.checkpoint.checkpoint(lambda *t: tt.attention(*t), *leaves, use_reentrant=False)
    with reference.Names():
        o.sum().backward()
    assert all(t.grad is not None for t in leaves)
