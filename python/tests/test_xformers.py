# SPDX-License-Identifier: Apache-2.0
"""tessera.xformers: every class of attn_bias beside its own materialize(), which is held against a loop over pairs."""
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import torch_reference as reference  # noqa: E402
from tessera import xformers  # noqa: E402
from tessera.xformers import memory_efficient_attention  # noqa: E402

INF = float("inf")


def by_definition(q, k, v, bias=None, scale=None):
    """softmax(scale q k^T + bias) v in fp64, [B, M, H, K]; 0 where a query sees no key. Also LSE [B, H, M]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * torch.einsum("bihd,bjhd->bhij", q.double(), k.double())
    scores = scores if bias is None else scores + bias.double()
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse == -INF, 0.0, lse)[..., None]).exp()
    return torch.einsum("bhij,bjhd->bihd", weights, v.double()), lse


def tensors(len_q, len_kv, batch=1, heads=3, dim=8, device="cpu"):
    generator = torch.Generator().manual_seed(len_q)
    shapes = (batch, len_q, heads, dim), (batch, len_kv, heads, dim), (batch, len_kv, heads, dim)
    return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]


BIAS = torch.randn(2, 3, 13, 17, generator=torch.Generator().manual_seed(1))
Q, K = [5, 3, 8], [6, 3, 9]
X = xformers
# name -> (mask, seen(query, key) in a sequence of len_q and len_kv, sequences or None, batch and lengths)
BANDS = {
    "LowerTriangularMask": (X.LowerTriangularMask(), lambda i, j, m, n: j <= i),
    "LowerTriangularFromBottomRightMask": (X.LowerTriangularFromBottomRightMask(), lambda i, j, m, n: j <= i + n - m),
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        X.LowerTriangularFromBottomRightMask().make_local_attention(4),
        lambda i, j, m, n: i + n - m - 4 < j <= i + n - m),
    "LocalAttentionFromBottomRightMask": (X.LocalAttentionFromBottomRightMask(2, 3),
                                          lambda i, j, m, n: -2 <= j - (i + n - m) <= 3),
}
RAGGED = {
    "BlockDiagonalMask": (X.BlockDiagonalMask.from_seqlens(Q, K), lambda i, j, m, n: True),
    "BlockDiagonalCausalMask": (X.BlockDiagonalCausalMask.from_seqlens(Q, K), lambda i, j, m, n: j <= i),
    "make_causal": (X.BlockDiagonalMask.from_seqlens(Q, K).make_causal(), lambda i, j, m, n: j <= i),
    "BlockDiagonalCausalFromBottomRightMask": (
        X.BlockDiagonalMask.from_seqlens(Q, K).make_causal_from_bottomright(), lambda i, j, m, n: j <= i + n - m),
    "BlockDiagonalCausalLocalAttentionMask": (
        X.BlockDiagonalMask.from_seqlens(K).make_local_attention(2), lambda i, j, m, n: i - 2 < j <= i),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        X.BlockDiagonalMask.from_seqlens(Q, K).make_local_attention_from_bottomright(2),
        lambda i, j, m, n: i + n - m - 2 < j <= i + n - m),
    "BlockDiagonalPaddedKeysMask": (X.BlockDiagonalPaddedKeysMask.from_seqlens(Q, 11, K), lambda i, j, m, n: True),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (
        X.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(Q, 11, K), lambda i, j, m, n: j <= i + n - m),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (
        X.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(Q, 11, K, 2),
        lambda i, j, m, n: i + n - m - 2 < j <= i + n - m),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (
        X.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(Q, 11, K, 1, 2),
        lambda i, j, m, n: -1 <= j - (i + n - m) <= 2),
    "BlockDiagonalGappyKeysMask": (
        X.BlockDiagonalGappyKeysMask.from_seqlens(Q, [2, 8, 13, 25], K), lambda i, j, m, n: True),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (
        X.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(Q, [2, 8, 13, 25], K),
        lambda i, j, m, n: j <= i + n - m),
}
KEYS_OF = {"Padded": (33, [0, 11, 22]), "Gappy": (25, [2, 8, 13])}


def expected_mask(name):
    """bool [queries, keys], from the definition of each pair."""
    if name in BANDS:
        return torch.tensor([[BANDS[name][1](i, j, 13, 17) for j in range(17)] for i in range(13)])
    lengths_q = K if name == "BlockDiagonalCausalLocalAttentionMask" else Q
    total, starts = next((v for k, v in KEYS_OF.items() if k in name), (sum(K), [0, 6, 9]))
    seen, begin = torch.zeros(sum(lengths_q), total, dtype=torch.bool), 0
    for m, n, start in zip(lengths_q, K, starts):
        for i in range(m):
            for j in range(n):
                seen[begin + i, start + j] = RAGGED[name][1](i, j, m, n)
        begin += m
    return seen


@pytest.mark.parametrize("name", [*BANDS, *RAGGED])
def test_a_mask_means_its_definition(name, device):
    mask = {**BANDS, **RAGGED}[name][0]
    seen = expected_mask(name)
    bias = torch.zeros(seen.shape).masked_fill(~seen, -INF)
    assert torch.equal(mask.materialize((2, 3, *seen.shape)), bias.expand(2, 3, *seen.shape))
    q, k, v = tensors(*seen.shape, batch=2 if name in BANDS else 1, device=device)
    o = memory_efficient_attention(q, k, v, mask.to(device) if name in RAGGED else mask, scale=0.5)
    want, want_lse = by_definition(q, k, v, bias.to(device), 0.5)
    reference.expect_close(o, want, 2e-6, "out")
    d = torch.randn_like(o)
    gradients = torch.autograd.grad(o, (q, k, v), d)
    for got, right in zip(gradients, torch.autograd.grad(want.nan_to_num(), (q, k, v), d.double())):
        assert torch.allclose(got, right.nan_to_num(), atol=1e-5)
    again, lse = X.memory_efficient_attention_forward_requires_grad(q, k, v, mask, scale=0.5)
    assert torch.equal(again, o) and not again.requires_grad
    assert torch.allclose(lse.double(), want_lse, atol=1e-5)
    for got, right in zip(X.memory_efficient_attention_backward(d, again, lse, q, k, v, mask, scale=0.5), gradients):
        assert torch.equal(got, right)


@pytest.mark.parametrize("causal", [False, True])
def test_a_tensor_is_added_and_gets_a_gradient(causal, device):
    bias = BIAS.to(device).requires_grad_()
    q, k, v = tensors(13, 17, 2, device=device)
    o = memory_efficient_attention(q, k, v, X.LowerTriangularMask().add_bias(bias) if causal else bias)
    hidden = X.LowerTriangularMask().materialize((13, 17), device=device) if causal else 0
    want, _ = by_definition(q, k, v, bias + hidden)
    reference.expect_close(o, want, 2e-6, "out")
    d = torch.randn_like(o)
    inputs = q, k, v, bias
    for got, right in zip(torch.autograd.grad(o, inputs, d), torch.autograd.grad(want, inputs, d.double())):
        assert torch.allclose(got, right.to(got.dtype), atol=1e-5)
    if causal:
        whole = X.LowerTriangularMaskWithTensorBias(bias).materialize(bias.shape, device=device)
        assert torch.equal(whole, bias + hidden)


def test_three_and_five_dimensions():
    q, k, v = tensors(13, 17, 2)
    flat = memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], BIAS[:, 0])
    assert torch.equal(flat, memory_efficient_attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], BIAS[:, :1])[:, :, 0])
    groups = torch.randn(2, 13, 2, 3, 8, requires_grad=True)
    keys, values = (torch.randn(2, 17, 2, 1, 8, requires_grad=True) for _ in range(2))
    bias = torch.randn(2, 2, 3, 13, 17)

    def run(k, v):
        o = memory_efficient_attention(groups, k, v, bias)
        return o, torch.autograd.grad(o.sin().sum(), (groups, keys, values))
    (o, fast), (want, slow) = run(*(t.expand(2, 17, 2, 3, 8) for t in (keys, values))), \
        run(*(t.repeat(1, 1, 1, 3, 1) for t in (keys, values)))
    assert o.shape == groups.shape and torch.allclose(o, want, atol=1e-6)
    by_hand, _ = by_definition(groups.flatten(2, 3), *(t.repeat(1, 1, 1, 3, 1).flatten(2, 3) for t in (keys, values)),
                               bias.flatten(1, 2))
    assert torch.allclose(o.flatten(2, 3).double(), by_hand, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(fast, slow))


def test_lists_of_tensors_and_back():
    parts = [torch.randn(1, 3, 2, 8), torch.randn(2, 5, 2, 8), torch.randn(1, 1, 2, 8)]
    mask, joined = X.BlockDiagonalMask.from_tensor_list(parts)
    assert joined.shape == (1, 14, 2, 8)
    o = mask.split(memory_efficient_attention(joined, joined, joined, mask))
    for got, part in zip(o, parts):
        assert torch.allclose(got, memory_efficient_attention(part, part, part), atol=1e-6)
    keys = [torch.randn(t.shape[0], t.shape[1] + 2, 2, 8) for t in parts]
    mask, q, k, v = X.BlockDiagonalCausalFromBottomRightMask.from_tensor_lists_qkv(parts, keys, keys)
    o = mask.split_queries(memory_efficient_attention(q, k, v, mask))
    for got, part, key in zip(o, parts, keys):
        want = memory_efficient_attention(part, key, key, X.LowerTriangularFromBottomRightMask())
        assert torch.allclose(got, want, atol=1e-6)
    assert [t.shape for t in mask.split_kv(k)] == [t.shape for t in keys]
    with pytest.raises(ValueError, match="^split: expected equal lengths"):
        mask.split(q)


def test_parts_of_the_keys_merge(device):
    q, k, v = tensors(13, 17, 2, device=device)
    parts = [X.memory_efficient_attention_partial(q, k[:, s], v[:, s]) for s in (slice(0, 9), slice(9, 17))]
    o, lse = X.merge_attentions(*zip(*parts))
    want, want_lse = by_definition(q, k, v)
    reference.expect_close(o, want, 2e-6, "out")
    assert torch.allclose(lse.double(), want_lse, atol=1e-5)
    d = torch.randn_like(o)
    for got, right in zip(torch.autograd.grad(o, (q, k, v), d), torch.autograd.grad(want, (q, k, v), d.double())):
        assert torch.allclose(got, right.float(), atol=1e-5)
    none = torch.full_like(lse, -INF)
    alone, total = X.merge_attentions((o, torch.zeros_like(o)), (lse, none))
    assert torch.allclose(alone, o, atol=1e-6) and torch.allclose(total, lse)
    empty, _ = X.merge_attentions((torch.zeros_like(o),) * 2, (none, none))
    assert not empty.any() and X.merge_attentions((o,), (lse,), write_lse=False)[1] is None


def test_dropout_scale_dtype_and_op():
    q, k, v = (t.detach() for t in tensors(40, 40, 2))
    torch.manual_seed(3)
    dropped = memory_efficient_attention(q, k, v, p=0.5)
    assert not torch.allclose(dropped, memory_efficient_attention(q, k, v))
    assert memory_efficient_attention(q, k, v, output_dtype=torch.bfloat16).dtype == torch.bfloat16
    whole = memory_efficient_attention(q, k, v, scale=0.1)
    op = X.MemoryEfficientAttentionFlashAttentionOp
    assert torch.equal(memory_efficient_attention(q, k, v, scale=0.1, op=op), whole)
    assert torch.equal(X.memory_efficient_attention_forward(q, k, v, scale=0.1), whole)
    with pytest.raises(NotImplementedError, match="^p: expected 0"):
        X.memory_efficient_attention_forward_requires_grad(q, k, v, p=0.5)


@pytest.mark.parametrize("call, words", [
    (lambda q: memory_efficient_attention(q, q, q, "causal"), "^attn_bias: expected None, a tensor or an Attention"),
    (lambda q: memory_efficient_attention(q, q, q, X.AttentionBias()), "^attn_bias: expected .*got a AttentionBias"),
    (lambda q: memory_efficient_attention(q, q[:, :, 0], q), "^key: expected as many dimensions"),
    (lambda q: memory_efficient_attention(q, q, q, torch.zeros(1, 1, 1, 1, 4)), "^attn_bias: expected 4 dimensions"),
    (lambda q: memory_efficient_attention(q, q, q, q[:, :, 0] > 0), "^attn_bias: expected numbers .* got bool"),
    (lambda q: memory_efficient_attention(q, q, q, X.BlockDiagonalMask.from_seqlens([2, 3])),
     "^query: expected a batch of 1 with 5 rows"),
    (lambda q: X.BlockDiagonalMask.from_seqlens([2, 3], [4]), "^kv_seqlen: expected 2 lengths"),
    (lambda q: X.BlockDiagonalCausalFromBottomRightMask.from_seqlens([4], [3]), "^kv_seqlen: expected at least the 4"),
    (lambda q: X.BlockDiagonalPaddedKeysMask.from_seqlens([4], 3, [4]), "^kv_seqlen: expected at most kv_padding, 3"),
    (lambda q: X.BlockDiagonalGappyKeysMask.from_seqlens([4], [0], [4]), "^kv_seqstarts: expected 2 starts"),
    (lambda q: X.LocalAttentionFromBottomRightMask(-1, 2), "^window_left: expected an integer from 0"),
    (lambda q: X.BlockDiagonalMask.from_seqlens([4]).make_local_attention(0), "^window_size: expected an integer"),
    (lambda q: X.BlockDiagonalMask.from_seqlens([2, 3]).split(q), r"^x: expected shape \[1, 5, \.\.\]"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_wrong_arguments_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.zeros(1, 4, 2, 8))


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy", reason="NumPy is not installed")
    q, k, v = tensors(9, 9)
    for ours, theirs in ((X.LocalAttentionFromBottomRightMask(numpy.int64(3), numpy.int32(1)),
                          X.LocalAttentionFromBottomRightMask(3, 1)),
                         (X.BlockDiagonalMask.from_seqlens(numpy.array([4, 5])).make_local_attention(numpy.int64(2)),
                          X.BlockDiagonalMask.from_seqlens([4, 5]).make_local_attention(2))):
        assert torch.equal(memory_efficient_attention(q, k, v, ours), memory_efficient_attention(q, k, v, theirs))


def test_a_window_that_lies_differently_in_each_sequence_is_refused():
    q, k, v = tensors(sum(Q), sum(K))
    mask = X.BlockDiagonalMask.from_seqlens(Q, K).make_local_attention(2)
    with pytest.raises(NotImplementedError, match="^attn_bias: expected one window for all sequences"):
        memory_efficient_attention(q, k, v, mask)
    with pytest.raises(NotImplementedError, match="^kv_seqstarts: expected sequences of keys in ascending order"):
        X.BlockDiagonalGappyKeysMask.from_seqlens([1, 1], [4, 0, 8], [2, 2])


def test_lengths_of_sequences_are_integers_from_0_on():
    for words, call in (("q_seqlen.1.", lambda: xformers.BlockDiagonalMask.from_seqlens([4, 4.5])),
                        ("q_seqlen.0.", lambda: xformers.BlockDiagonalMask.from_seqlens([-4, 5])),
                        ("kv_seqlen.1.", lambda: xformers.BlockDiagonalMask.from_seqlens([4, 5], [4, -5])),
                        ("kv_seqlen.0.", lambda: xformers.BlockDiagonalGappyKeysMask.from_seqlens([1], [0, 9], [3.5])),
                        ("kv_seqstarts.0.", lambda: xformers.BlockDiagonalGappyKeysMask.from_seqlens([1], [-1, 9], [3])),
                        ("kv_padding", lambda: xformers.BlockDiagonalPaddedKeysMask.from_seqlens([1], 0, [0]))):
        with pytest.raises(ValueError, match=f"^{words}: expected an integer from [01] on, got "):
            call()
    mask = xformers.BlockDiagonalMask.from_seqlens(torch.tensor([4, 5]))
    assert mask.q_seqinfo.seqstart_py == [0, 4, 9]
