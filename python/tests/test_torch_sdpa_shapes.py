# SPDX-License-Identifier: Apache-2.0
"""Shapes and arguments of torch's scaled_dot_product_attention beside PyTorch's own: what it takes, it takes with the
same result and gradients, and what it refuses, it refuses."""
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa  # noqa: E402

Q, K = (9, 16), (7, 16)  # len and head_dim of query, and of key and value
BROADCAST = [((1, 4), (2, 4), (2, 4)), ((2, 4), (1, 4), (1, 4)), ((2, 4), (2, 1), (2, 1)), ((2, 4), (2, 1), (2, 4)),
             ((2, 4), (2, 4), (2, 1)), ((2, 1), (2, 4), (2, 4)), ((1, 4), (1, 4), (2, 4)), ((2, 4), (1, 4), (2, 1)),
             ((), (2, 4), (2, 4)), ((2, 4), (4,), ()), ((4,), (2, 4), (2, 4)), ((4,), (1,), (1,)), ((), (3,), (3,)),
             ((2, 3, 4), (1, 3, 4), (2, 1, 4)), ((2, 3, 4), (4,), (4,)), ((2, 3, 4), (2, 3, 1), (1, 1, 1)),
             ((1, 1, 4), (2, 3, 4), (3, 4)), ((2, 1, 3, 1), (1, 2, 3, 4), (4,))]
GROUPED = [((2, 8), (2, 2), (2, 4)), ((2, 6), (2, 2), (2, 3)), ((2, 8), (1, 2), (2, 4)), ((8,), (2,), (2,)),
           ((1, 8), (3, 2), (3, 2)), ((2, 8), (2, 8), (2, 2)), ((2, 8), (2, 1), (2, 4)),
           ((5, 1, 8), (5, 3, 2), (1, 3, 2)), ((2, 3, 8), (2,), (4,))]


def sizes(leading):
    return [(*lead, *own) for lead, own in zip(leading, (Q, K, K))]


def tensors(shapes, device="cpu", dtype=torch.float32):
    return [reference.random(shape, seed, device, dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def expect_as_torch(leaves, **options):
    """O and the gradients of ours are those of PyTorch in fp64."""
    got = tt.scaled_dot_product_attention(*leaves, **options)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = torch_sdpa(*(t.double() for t in leaves), **{
            n: o.double() if torch.is_tensor(o) and o.is_floating_point() else o for n, o in options.items()})
    reference.expect_close(got, want, 2e-6, "o")
    d_o = reference.random(got.shape, 9, got.device)
    for a, b in zip(torch.autograd.grad(got, leaves, d_o), torch.autograd.grad(want, leaves, d_o.double())):
        reference.expect_close(a, b, 1e-5, "gradient")


@pytest.mark.parametrize("math", [False, True], ids=["kernel", "math"])
@pytest.mark.parametrize("leading", BROADCAST, ids=str)
def test_batch_and_heads_broadcast(leading, math, device):
    leaves = tensors(sizes(leading), device)
    if math:
        torch.testing.assert_close(tt.scaled_dot_product_attention(*leaves, math=True),
                                   tt.scaled_dot_product_attention(*leaves))
        return
    expect_as_torch(leaves)
    shape = torch.broadcast_shapes(*leading[:2])  # PyTorch's scores have no dimension of value alone
    expect_as_torch(leaves, attn_mask=reference.random((*shape, 9, 7), 5, device))
    if len(shape) > 1:
        expect_as_torch(leaves, attn_mask=reference.random((1, shape[-1], 9, 1), 5, device))
    expect_as_torch(leaves, attn_mask=reference.random((9, 7), 5, device) > -1)


@pytest.mark.parametrize("leading", GROUPED, ids=str)
def test_grouped_heads_of_any_counts_and_batch_broadcast(leading, device):
    leaves = tensors(sizes(leading), device)
    expect_as_torch(leaves, enable_gqa=True)
    expect_as_torch(leaves, enable_gqa=True, is_causal=True)


def test_broadcast_compiled(device):
    torch._dynamo.reset()
    compiled = torch.compile(tt.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    for leading in (((1, 4), (2, 4), (2, 4)), ((2, 4), (2, 1), (2, 1))):
        leaves = tensors(sizes(leading), device)
        torch.testing.assert_close(compiled(*leaves), tt.scaled_dot_product_attention(*leaves))
    leaves = tensors(sizes(((2, 8), (2, 2), (2, 4))), device)
    torch.testing.assert_close(compiled(*leaves, enable_gqa=True),
                               tt.scaled_dot_product_attention(*leaves, enable_gqa=True))


REFUSED = {  # what PyTorch refuses too, and the argument that ours names
    "batch": (((3, 4), (2, 4), (2, 4)), {}, "^key: "), "heads": (((2, 4), (2, 2), (2, 2)), {}, "^key: .*4"),
    "heads of value": (((2, 4), (2, 4), (2, 2)), {}, "^value: "),
    "grouped heads": (((2, 8), (2, 3), (2, 3)), dict(enable_gqa=True), "^key: .*divides the 8"),
    "more heads of keys": (((2, 2), (2, 4), (2, 4)), dict(enable_gqa=True), "^key: .*divides the 2"),
    "grouped without heads": (((8,), (), ()), dict(enable_gqa=True), "^key: expected 3 dimensions"),
    "grouped batch": (((3, 4), (2, 4), (2, 4)), dict(enable_gqa=True), "^key: "),
    "mask of 0 dimensions": (((2, 4),) * 3, dict(attn_mask=torch.zeros(())), "^attn_mask: expected a shape of 2"),
    "mask of 1 dimension": (((2, 4),) * 3, dict(attn_mask=torch.zeros(7)), "^attn_mask: expected a shape of 2"),
    "bool mask of 1 dimension": (((2, 4),) * 3, dict(attn_mask=torch.ones(7).bool()), "^attn_mask: "),
    "mask of 5 dimensions": (((2, 4),) * 3, dict(attn_mask=torch.zeros(1, 2, 4, 9, 7)), "^attn_mask: "),
    "mask for 5": (((2, 3, 4),) * 3, dict(attn_mask=torch.zeros(2, 4, 9, 7)), "^attn_mask: "),
    "mask of fp64": (((2, 4),) * 3, dict(attn_mask=torch.zeros(9, 7).double()), "^attn_mask: .*float64"),
    "mask of integers": (((2, 4),) * 3, dict(attn_mask=torch.ones(9, 7).long()), "^attn_mask: .*int64"),
    "is_causal=1": (((2, 4),) * 3, dict(is_causal=1), "^is_causal: expected a bool"),
    "enable_gqa=1": (((2, 4),) * 3, dict(enable_gqa=1), "^enable_gqa: expected a bool"),
    "causal and a mask": (((2, 4),) * 3, dict(is_causal=True, attn_mask=torch.zeros(9, 7)), "^attn_mask: "),
    "dropout_p": (((2, 4),) * 3, dict(dropout_p=1.5), "^dropout_p: "),
    "dropout_p of text": (((2, 4),) * 3, dict(dropout_p="0.1"), "^dropout_p: ")}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses(name, device):
    leading, options, words = REFUSED[name]
    options = reference.moved(options, device)
    leaves = tensors(sizes(leading), device)
    if device == "cpu" and name != "causal and a mask":  # which some kernels and releases of PyTorch take
        with pytest.raises((RuntimeError, TypeError, IndexError)):
            torch_sdpa(*leaves, **options)
    for math in (False, True):
        with pytest.raises(ValueError, match=words):
            tt.scaled_dot_product_attention(*leaves, **options, math=math)


@pytest.mark.parametrize("dropout_p", [1, 1.0, True])
def test_a_dropout_that_keeps_nothing(dropout_p, device):
    leaves = tensors(sizes(((2, 4), (1, 4), (2, 1))), device)
    mask = torch.zeros(9, 7, device=device, requires_grad=True)
    o = tt.scaled_dot_product_attention(*leaves, attn_mask=mask, dropout_p=dropout_p)
    assert o.shape == (2, 4, *Q) and not o.any()
    assert all(not g.any() for g in torch.autograd.grad(o.sum(), [*leaves, mask]))


MIXED = {"v in bf16": (torch.float32, torch.float32, torch.bfloat16), "k in fp16": (torch.float32, torch.float16,
                                                                                  torch.float32),
         "all in fp32": (torch.float32,) * 3, "all in fp64": (torch.float64,) * 3}


@pytest.mark.parametrize("function", ["sdpa", "attention", "varlen_attention"])
@pytest.mark.parametrize("name", MIXED)
def test_autocast_takes_and_gives_the_dtypes_of_torch(name, function, device):
    if device == "cuda" and name == "all in fp64":
        pytest.skip("no CUDA kernel takes fp64")
    leaves = [reference.random((2, 4, 9, 16), s, device).to(d).requires_grad_() for s, d in enumerate(MIXED[name])]
    mask = reference.random((9, 9), 4, device)
    results = []
    for dtype in (torch.bfloat16, torch.float16) if device == "cuda" else (torch.bfloat16,):
        with torch.autocast(device, dtype=dtype):
            own_mask = mask.double() if name == "all in fp64" else mask  # autocast leaves fp64 alone
            want = torch_sdpa(*leaves, attn_mask=own_mask if function == "sdpa" else None)
            if function == "sdpa":
                got = tt.scaled_dot_product_attention(*leaves, attn_mask=mask)
                assert tt.scaled_dot_product_attention(*leaves, attn_mask=mask.half()).dtype == want.dtype
            elif function == "attention":
                got = tt.attention(*leaves, layout="bhsd")
            else:
                cu = torch.tensor([0, 9, 18], device=device)
                got = tt.varlen_attention(*(t.transpose(1, 2).flatten(0, 1) for t in leaves), cu, cu)
                got = got.unflatten(0, (2, 9)).transpose(1, 2)
        assert got.dtype == want.dtype
        results = torch.autograd.grad(got.float().sum(), leaves), torch.autograd.grad(want.float().sum(), leaves)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        for a, b in zip(*results):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)
