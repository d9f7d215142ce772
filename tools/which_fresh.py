# SPDX-License-Identifier: Apache-2.0
"""Held-out cases of which_traces.py, which judge the reader of traces. PyTorch's dispatcher gives the expected kernels."""
import math

from which_cases import Case, by_hand, captured, sdpa, tensors, with_backward


def asked(name, step, families="?"):
    return Case(name, families, step)


def fresh_sdpa_cases():
    import torch

    call = torch.nn.functional.scaled_dot_product_attention
    yield sdpa("fresh_latent", None, (2, 16, 512, 192), v=(2, 16, 512, 128), kv=(2, 16, 512, 192), is_causal=True)
    yield sdpa("fresh_512", None, (1, 4, 512, 512))
    yield sdpa("fresh_tiny", None, (1, 2, 16, 8))
    yield sdpa("fresh_mask_flash_dim", None, (2, 8, 640, 96), mask="bool", train=True)
    yield sdpa("fresh_float_mask", None, (2, 8, 777, 80), mask="float")
    yield sdpa("fresh_groups_train", None, (2, 32, 512, 128), kv=(2, 8, 512, 128), enable_gqa=True, is_causal=True, train=True)
    yield sdpa("fresh_groups_efficient", "efficient", (2, 8, 512, 64), mask="float", train=True)
    yield sdpa("fresh_math_half", "math", (2, 8, 384, 40), dtype="float16", train=True)
    yield sdpa("fresh_math_groups", "math", (2, 8, 384, 64), kv=(2, 2, 384, 64), enable_gqa=True)
    yield sdpa("fresh_flash_192", "flash", (2, 8, 640, 192), is_causal=True, train=True)
    yield sdpa("fresh_flash_32", "flash", (3, 5, 333, 32), dtype="float16", train=True)
    yield sdpa("fresh_cudnn_96", "cudnn", (2, 8, 768, 96), dtype="float16", train=True)
    yield sdpa("fresh_cudnn_groups", "cudnn", (2, 32, 512, 128), kv=(2, 4, 512, 128), enable_gqa=True)
    yield sdpa("fresh_efficient_256", "efficient", (1, 4, 512, 256), train=True)
    yield sdpa("fresh_efficient_odd", "efficient", (2, 3, 129, 24), dtype="float16", is_causal=True)
    q, k, v = tensors((8, 300, 64), (8, 300, 64), (8, 300, 64))
    yield asked("fresh_rank_3", lambda: call(q, k, v))
    wide = tensors((2, 300, 12, 64), (2, 300, 12, 64), (2, 300, 12, 64), grad=True)
    yield asked("fresh_strided_train", with_backward(lambda *t: call(*(x.transpose(1, 2) for x in t), is_causal=True), wide))

    from torch.nn.attention.varlen import varlen_attn

    packed = tensors((1500, 8, 128), (1500, 8, 128), (1500, 8, 128), grad=True)
    starts = torch.tensor([0, 100, 777, 1500], device="cuda", dtype=torch.int32)
    yield asked("fresh_varlen_train", lambda: varlen_attn(*packed, starts, starts, 800, 800).sum().backward(), "fa2")
    two, side = tensors((2, 8, 512, 64), (2, 8, 512, 64), (2, 8, 512, 64)), torch.cuda.Stream()

    def streams():
        call(*two)
        with torch.cuda.stream(side):
            by_hand(*two)

    yield asked("fresh_two_streams", streams, "cudnn,eager")
    inputs = tensors((2, 8, 512, 128), (2, 8, 512, 128), (2, 8, 512, 128), grad=True)
    for backend in ("flash", "cudnn"):
        case = sdpa("fresh_graph_" + backend, backend, (2, 8, 512, 128), is_causal=True, train=True)
        yield Case(case.name, case.families, captured(case.step))
    yield asked("fresh_checkpointed", lambda: torch.utils.checkpoint.checkpoint(
        lambda *t: call(*t, is_causal=True), *inputs, use_reentrant=False).sum().backward())


def fresh_hand_cases():
    """Attention by hand in forms that the reader was not developed on."""
    import torch

    flat = tensors((16, 512, 64), (16, 512, 64), (16, 512, 64), grad=True)
    bias = torch.randn(16, 1, 512, device="cuda", dtype=torch.bfloat16)

    def baddbmm(q, k, v):  # used by BLOOM
        return torch.bmm(torch.baddbmm(bias, q, k.mT, beta=1.0, alpha=0.125).softmax(-1), v)

    yield Case("fresh_baddbmm_train", "eager", with_backward(baddbmm, flat))
    four = tensors((2, 8, 512, 64), (2, 8, 512, 64), (2, 8, 512, 64), dtype="float32", grad=True)
    mask = torch.ones(512, 512, device="cuda", dtype=torch.bool).triu(1)

    def filled(q, k, v):
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(mask, float("-inf"))
        return torch.nn.functional.dropout(scores.softmax(-1), 0.1) @ v

    yield Case("fresh_filled_dropout_train", "eager", with_backward(filled, four))

    def sinks(q, k, v):  # an extra column takes a part of the weights, as in gpt-oss
        sink = torch.zeros(2, 8, 512, 1, device="cuda")
        scores = torch.cat([q @ k.mT / math.sqrt(64), sink], dim=-1)
        return scores.softmax(-1)[..., :-1] @ v

    yield Case("fresh_sinks", "eager", lambda: sinks(*four))

    def exps(q, k, v):  # without PyTorch's softmax
        scores = q @ k.mT / 8
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return (weights / weights.sum(-1, keepdim=True)) @ v

    yield Case("fresh_exps", "eager", lambda: exps(*four))
    layer = torch.nn.TransformerDecoderLayer(256, 4, batch_first=True, device="cuda")
    x, memory = tensors((4, 128, 256), (4, 192, 256), dtype="float32")
    yield asked("fresh_decoder_train", lambda: layer(x, memory).sum().backward())
    half = tensors((4, 8, 1, 64), (4, 8, 900, 64), (4, 8, 900, 64), dtype="float16")
    yield Case("fresh_decode_by_hand", "eager", lambda: by_hand(*half))
    yield Case("fresh_graph_decode_by_hand", "eager", captured(lambda: by_hand(*half)))
    gate, experts = tensors((2048, 64), (64, 512))
    yield Case("fresh_router", "-", lambda: torch.topk(torch.softmax(gate @ experts[:, :8], -1), 2)[0] @ experts[:2])
    pooled = tensors((4, 64, 512), (512, 512))
    yield Case("fresh_softmax_only", "-", lambda: torch.relu(pooled[0] @ pooled[1]).softmax(-1).sum())


def fresh_compiled_cases():
    import torch

    call = torch.nn.functional.scaled_dot_product_attention
    layer = torch.nn.TransformerEncoderLayer(256, 4, batch_first=True, device="cuda", dtype=torch.bfloat16)
    x, = tensors((4, 512, 256))
    block = torch.compile(layer)
    yield Case("fresh_compiled_block_train", "cudnn", lambda: block(x).sum().backward())
    inputs = tensors((2, 8, 512, 64), (2, 8, 512, 64), (2, 8, 512, 64), grad=True)
    masked = torch.compile(lambda *t: call(*t, attn_mask=torch.ones(512, 512, device="cuda", dtype=torch.bool).tril()))
    yield Case("fresh_compiled_mask_train", "cudnn", with_backward(masked, inputs))
    plain = torch.compile(lambda q, k, v: torch.matmul(q, k.transpose(-2, -1)).div(8.0).softmax(-1).matmul(v))
    with torch.no_grad():
        plain(*inputs)
    yield Case("fresh_compiled_pattern", "cudnn", lambda: plain(*(t.detach() for t in inputs)))
    hand = torch.compile(lambda *t: by_hand(*t, mask=torch.zeros(512, 512, device="cuda", dtype=torch.bfloat16)))
    yield Case("fresh_compiled_hand_train", "eager", with_backward(hand, inputs))


def fresh_flex_cases():
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    document = torch.arange(1024, device="cuda") // 300
    blocks = create_block_mask(lambda b, h, q, k: (q >= k) & (document[q] == document[k]), None, None, 1024, 1024, device="cuda")
    inputs = tensors((2, 8, 1024, 128), (2, 2, 1024, 128), (2, 2, 1024, 128), grad=True)
    yield Case("fresh_flex_documents_train", "flex",
               with_backward(lambda *t: compiled(*t, block_mask=blocks, enable_gqa=True), inputs))
    plain = tensors((2, 8, 1024, 64), (2, 8, 1024, 64), (2, 8, 1024, 64))
    alibi = lambda score, b, h, q, k: score - (q - k) * torch.exp2(-(h + 1.0))  # noqa: E731
    yield Case("fresh_flex_alibi", "flex", lambda: compiled(*plain, score_mod=alibi))
    yield Case("fresh_flex_graph", "flex", captured(lambda: compiled(*plain, score_mod=alibi)))
