# SPDX-License-Identifier: Apache-2.0
"""mask= of tessera.torch.attention and attention_weights: against fp64, and under every transform of PyTorch."""
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402
from seeds import random_seed  # noqa: E402
from test_torch_attention import FP32_GRADIENT, FP32_O, HALF, check  # noqa: E402

SHAPES = [(37, 53), (4, 37, 1), (2, 1, 1, 53), (2, 4, 37, 53)]


def mask_of(shape, device="cpu", seed=6):
    """Some queries see no key, and some keys are seen by no query."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(random_seed(seed))) > 0.3
    if shape[-2] > 1:
        mask[..., :3, :] = False
    if shape[-1] > 1:
        mask[..., 40:] = False
    return mask.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_mask_hides_keys(shape, dtype, device):
    limits = (FP32_O, FP32_GRADIENT) if dtype == torch.float32 else (HALF[dtype], 2 * HALF[dtype])
    inputs, features = reference.inputs(dtype=dtype, device=device), dict(mask=mask_of(shape, device), softcap=2.0)
    check(inputs, dict(features, window=(30, 40)), *limits)
    o, lse = tt.attention(*inputs, return_lse=True, **features)
    blind = ~features["mask"].any(-1).expand(2, 4, 37)
    assert blind.any() == (shape[-2] > 1)
    assert (lse[blind] == float("-inf")).all() and lse[~blind].isfinite().all()
    assert (o.transpose(1, 2)[blind] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias_shape", [(37, 53), (4, 1, 53), (2, 4, 37, 53)], ids=str)
def test_a_bias_beside_a_mask_gets_its_gradient(shape, bias_shape, dtype, device):
    bias = reference.random(bias_shape, 3, device, dtype).requires_grad_()
    limits = (FP32_O, FP32_GRADIENT) if dtype == torch.float32 else (HALF[dtype], 2 * HALF[dtype])
    check(reference.inputs(dtype=dtype, device=device), dict(mask=mask_of(shape, device)), *limits, bias)


def test_sinks_and_dropout_beside_a_mask(device):
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    mask, sinks = mask_of((2, 1, 37, 53), device), torch.tensor([0.5, -1.0, 2.0, 0.1], device=device)
    o, lse = tt.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True)
    want_o, want_lse = reference.attention(q, k, v, mask=mask, sinks=sinks)
    reference.expect_close(o, want_o, FP32_O, "o")
    reference.expect_lse(lse, want_lse)
    bias = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, float("-inf"))
    dropout = dict(dropout_p=0.4, seed=3)
    assert torch.equal(tt.attention(q, k, v, mask=mask, **dropout), tt.attention(q, k, v, bias=bias, **dropout))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_math_and_weights(with_bias, layout, device):
    turned = [t.detach().transpose(1, 2) if layout == "bhsd" else t.detach() for t in reference.inputs(device=device)]
    leaves = [t.requires_grad_() for t in turned]
    bias = reference.random((4, 1, 53), 3, device).requires_grad_() if with_bias else None
    options = dict(mask=mask_of((2, 1, 37, 53), device), bias=bias, layout=layout)
    wanted = leaves + ([bias] if with_bias else [])
    o, lse = tt.attention(*leaves, return_lse=True, math=True, **options)
    want, want_lse = tt.attention(*leaves, return_lse=True, **options)
    torch.testing.assert_close(o, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(o.sin().sum(), wanted), torch.autograd.grad(want.sin().sum(), wanted)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    weights = tt.attention_weights(*leaves[:2], **options)
    assert weights.shape == (2, 4, 37, 53) and (weights[:, :, :3] == 0).all() and (weights[..., 40:] == 0).all()
    values = leaves[2] if layout == "bhsd" else leaves[2].transpose(1, 2)
    got = weights @ values.repeat_interleave(2, 1)
    torch.testing.assert_close(got if layout == "bhsd" else got.transpose(1, 2), o, rtol=1e-5, atol=1e-5)


def test_second_derivatives_and_forward_mode():
    q, k, v = (t.detach().double().requires_grad_() for t in reference.inputs(1, 4, 5, 2, 1, 3))
    bias = reference.random((2, 1, 5), 3).double().requires_grad_()
    mask = torch.tensor([[0, 0, 0, 0, 0], [1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]], dtype=torch.bool)

    def function(q, k, v, bias):
        return tt.attention(q, k, v, bias=bias, mask=mask, math=True)
    torch.autograd.gradcheck(function, (q, k, v, bias), check_forward_ad=True)
    torch.autograd.gradgradcheck(function, (q, k, v, bias))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("math", [False, True])
def test_compiled(dynamic, math, device):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def function(q, k, v, mask, bias):
        return tt.attention(q, k, v, mask=mask, bias=bias, return_lse=True, math=math)
    for len_q, len_kv in ((37, 53), (41, 67)):
        for mask_shape in ((2, 1, len_q, len_kv), (2, 1, 1, len_kv)):
            for bias_shape in (None, (4, 1, len_kv)) if not math else ((4, 1, len_kv),):
                leaves = reference.inputs(len_q=len_q, len_kv=len_kv, device=device)
                bias = None if bias_shape is None else reference.random(bias_shape, 3, device).requires_grad_()
                wanted, mask = leaves + ([] if bias is None else [bias]), mask_of(mask_shape, device)
                got, want = function(*leaves, mask, bias), tt.attention(*leaves, mask=mask, bias=bias, return_lse=True,
                                                                        math=math)
                gradients = [torch.autograd.grad(r[0].sin().sum(), wanted) for r in (got, want)]
                for a, b in zip((*got, *gradients[0]), (*want, *gradients[1])):
                    if math:
                        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
                    else:
                        assert torch.equal(a, b)


@pytest.mark.parametrize("in_dims", [(0, None, None), (None, 0, None), (None, None, 0), (0, 1, 2)], ids=str)
def test_vmap_is_a_loop(in_dims, device):
    """Over q, the mask and the bias, with gradients."""
    q, k, v = (t.detach() for t in reference.inputs(batch=3, len_q=9, len_kv=13, heads_q=2, head_dim=8, device=device))

    def loss(q, mask, bias):
        return tt.attention(q[None], k[:1], v[:1], mask=mask, bias=bias).sin().sum()
    mask = torch.rand(3, 1, 9, 13, generator=torch.Generator().manual_seed(random_seed(2))).to(device) > 0.4
    bias = reference.random((3, 2, 9, 13), 5, device)
    mapped = tuple(t.movedim(0, dim) if dim is not None else t[0] for t, dim in zip((q, mask, bias), in_dims))
    derivative = torch.func.grad(loss, (0, 2))
    got = torch.func.vmap(derivative, in_dims)(*mapped)
    each = [derivative(*(t if dim is None else t.select(dim, i) for t, dim in zip(mapped, in_dims))) for i in range(3)]
    for a, b in zip(got, zip(*each)):
        torch.testing.assert_close(a, torch.stack(b), rtol=1e-5, atol=1e-6)


def test_under_autocast(device):
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    mask, bias = mask_of((2, 1, 37, 53), device), reference.random((4, 37, 53), 3, device, torch.float16)
    with torch.autocast(device, torch.bfloat16):
        got = [tt.attention(q, k, v, mask=mask), tt.attention(q, k, v, mask=mask, bias=bias),
               tt.attention_weights(q, k, mask=mask)]
    half = [t.bfloat16() for t in (q, k, v)]
    want = [tt.attention(*half, mask=mask), tt.attention(*half, mask=mask, bias=bias.bfloat16()),
            tt.attention_weights(*half[:2], mask=mask)]
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want))


def test_export(device):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, mask):
            return tt.attention(q, k, v, mask=mask)
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    mask = mask_of((2, 1, 37, 53), device)
    program = torch.export.export(Layer(), (q, k, v, mask))
    assert torch.equal(program.module()(q, k, v, mask), tt.attention(q, k, v, mask=mask))


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """Within it, `largest` is the number of elements of the largest tensor that an operator with one result made."""
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point() and not func.is_view:
            self.largest = max(self.largest, result.untyped_storage().nbytes() // result.itemsize)
        return result


def test_dimensions_that_a_mask_repeats_take_no_memory(device):
    q, k, v = (t.detach() for t in reference.inputs(device=device, head_dim=8))
    mask = mask_of((2, 1, 1, 53), device)
    for same in (mask, mask.expand(2, 4, 37, 53)):
        with Sizes() as sizes:
            o = tt.attention(q, k, v, mask=same)
        assert sizes.largest == 2 * 53
        assert torch.equal(o, tt.attention(q, k, v, mask=mask))


def meta(t):
    return t.to("meta")


WRONG = {
    "floats": (dict(mask=torch.ones(37, 53)), "mask: expected dtype bool, True where the key takes part, got float32"),
    "bytes": (dict(mask=torch.ones(37, 53, dtype=torch.uint8)), "mask: expected dtype bool, .* got uint8"),
    "keys": (dict(mask=torch.ones(37, 52, dtype=torch.bool)),
             r"mask: expected \[2, 4, 37, 53\], any size also 1, got \[1, 1, 37, 52\]"),
    "batch": (dict(mask=torch.ones(3, 1, 1, 1, dtype=torch.bool)), r"mask: expected .* got \[3, 1, 1, 1\]"),
    "5 dimensions": (dict(mask=torch.ones(1, 1, 1, 37, 53, dtype=torch.bool)),
                     "mask: expected at most 4 dimensions, got 5"),
    "a list": (dict(mask=[[True]]), "mask: expected a torch.Tensor, got a list"),
    "sparse": (dict(mask=torch.ones(37, 53, dtype=torch.bool).to_sparse()), "mask: expected a strided tensor"),
    "the bias": (dict(mask=torch.ones(37, 53, dtype=torch.bool), bias=torch.zeros(3, 1, 1, 1)),
                 r"bias: expected \[2, 4, 37, 53\], any size also 1, got \[3, 1, 1, 1\]"),
    "dtype of the bias": (dict(mask=torch.ones(37, 53, dtype=torch.bool), bias=torch.zeros(1, dtype=torch.int32)),
                          "bias: expected dtype .*32, got int32"),
    "a bool bias": (dict(bias=torch.ones(37, 53, dtype=torch.bool)),
                    "bias: .* got bool; mask= takes one, True where the key takes part"),
    "q": (dict(mask=torch.ones(37, 53, dtype=torch.bool), q=torch.zeros(37, 4, 32)), "q: expected 4 dimensions"),
    "k": (dict(mask=torch.ones(37, 53, dtype=torch.bool), k=torch.zeros(53, 2, 32)), "k: expected 4 dimensions"),
    "integers": (dict(mask=torch.ones(37, 53, dtype=torch.bool), q=torch.zeros(2, 37, 4, 32, dtype=torch.int32)),
                 "q: expected dtype")}


@pytest.mark.parametrize("name", WRONG)
def test_masks_that_are_refused(name, device):
    change, words = WRONG[name]
    given = {**dict(zip("qkv", (t.detach() for t in reference.inputs()))), **change}
    for moved in (lambda t: t.to(device), meta):
        call = {n: moved(t) if getattr(t, "layout", None) == torch.strided else t for n, t in given.items()}
        for math in (False, True):
            with pytest.raises(ValueError, match="^" + words):
                tt.attention(**call, math=math)
        del call["v"]
        with pytest.raises(ValueError, match="^" + words):
            tt.attention_weights(**call)


def test_a_mask_on_another_device_is_named(device):
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    with pytest.raises(ValueError, match=f"^mask: expected a tensor on {q.device}, where q is, got one on meta"):
        tt.attention(q, k, v, mask=torch.ones(37, 53, dtype=torch.bool, device="meta"))
    o = tt.attention(*map(meta, (q, k, v)), mask=torch.ones(37, 53, dtype=torch.bool, device="meta"))
    assert o.is_meta and o.shape == q.shape


def test_a_causal_bias_beside_a_mask(device):
    from torch.nn.attention.bias import causal_lower_right
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    mask = mask_of((2, 1, 37, 53), device)
    got = tt.attention(q, k, v, bias=causal_lower_right(37, 53), mask=mask)
    assert torch.equal(got, tt.attention(q, k, v, causal="bottom-right", mask=mask))
    with pytest.raises(ValueError, match="^mask: expected a torch.Tensor whose memory holds its numbers, got a Causal"):
        tt.attention(q, k, v, mask=causal_lower_right(37, 53))
