# SPDX-License-Identifier: Apache-2.0
"""Held-out cases of which_traces.py: code that a compiler split, second derivatives, token by token decoding, several
attention kernels in one step.

The expected kernels are recorded as "forward | backward" ("-": none) before a trace is read; "?" asks PyTorch's dispatcher."""

from which_cases import Case, by_hand, captured, language_step, raising, tensors, with_backward


def compiled():
    import torch
    from torch import nn

    wide = tensors((1, 4, 256, 64), (1, 4, 9000, 64), (1, 4, 9000, 64))
    capped = torch.compile(lambda q, k, v: (20 * torch.tanh(q @ k.mT / 160)).softmax(-1) @ v)
    with torch.no_grad():
        yield Case("served_compiled_long_rows", "eager | -", lambda: capped(*wide))
    four = tensors((2, 8, 320, 64), (2, 8, 320, 64), (2, 8, 320, 64), grad=True)
    hidden = torch.ones(320, 320, device="cuda", dtype=torch.bool).triu(1)
    slopes = torch.randn(8, 1, 1, device="cuda", requires_grad=True)
    place = torch.arange(320, device="cuda")

    def distances(q, k, v):  # learned slopes, whose gradient is an extra sum
        scores = (q @ k.mT).float() / 8 - slopes * (place[:, None] - place).abs()
        return scores.masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype) @ v

    sloped = torch.compile(distances)
    yield Case("served_compiled_slopes_train", "eager | eager", with_backward(sloped, four))
    dropped = torch.compile(lambda q, k, v: nn.functional.dropout((20 * torch.tanh(q @ k.mT / 160)).softmax(-1), 0.1) @ v)
    yield Case("served_compiled_dropout_train", "eager | eager", with_backward(dropped, four))
    sinks = torch.zeros(8, 1, 1, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def sunk(q, k, v):
        scores = torch.cat([20 * torch.tanh(q @ k.mT / 160), sinks.expand(2, 8, 320, 1)], -1)
        return scores.softmax(-1)[..., :-1] @ v

    learned = torch.compile(sunk)
    yield Case("served_compiled_sinks_train", "eager | eager", with_backward(learned, four))
    head, x = nn.Linear(256, 5000, device="cuda", dtype=torch.bfloat16), torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    target = torch.zeros(512, device="cuda", dtype=torch.long)
    loss = torch.compile(lambda t: nn.functional.cross_entropy(head(t).float(), target))
    yield Case("served_compiled_loss_train", "- | -", lambda: loss(x).backward())
    experts, gate = torch.randn(8, 256, 256, device="cuda", dtype=torch.bfloat16), nn.Linear(256, 8, device="cuda", dtype=torch.bfloat16)

    def route(t):
        weights, chosen = gate(t).float().softmax(-1).topk(2, -1)
        return (torch.einsum("nd,edf->nef", t, experts).gather(1, chosen.unsqueeze(-1).expand(-1, -1, 256)) * weights.unsqueeze(-1)).sum(1)

    routed = torch.compile(route)
    yield Case("served_compiled_router_train", "- | -", lambda: routed(x).sum().backward())


def mixed():
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn

    sdpa = torch.nn.functional.scaled_dot_product_attention
    four = tensors((2, 8, 384, 64), (2, 8, 384, 64), (2, 8, 384, 64), grad=True)
    detached = [t.detach() for t in four]

    def by(name, *qkv):
        with sdpa_kernel(getattr(SDPBackend, name)):
            return sdpa(*qkv, is_causal=True)

    def all_of_them(q, k, v):
        for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
            q = by(name, q, k, v)
        return by_hand(q, k, v)

    every = "cudnn, eager, fa2, math, mem-efficient"
    yield Case("served_all_backends_train", f"{every} | {every}", with_backward(all_of_them, four))
    inner = captured(lambda: by("FLASH_ATTENTION", *detached))

    def in_and_out():
        inner()
        by("CUDNN_ATTENTION", *detached)

    yield Case("served_graph_and_call", "cudnn, fa2 | -", in_and_out)
    single = tensors((2, 4, 200, 64), (2, 4, 200, 64), (2, 4, 200, 64), dtype="float32", grad=True)

    def penalty():
        grads = torch.autograd.grad(by_hand(*single).square().sum(), single, create_graph=True)
        sum(g.square().sum() for g in grads).backward()

    yield Case("served_penalty_train", "eager | eager", penalty)
    packed = tensors((900, 16, 64), (900, 4, 64), (900, 4, 64), dtype="float16")
    starts = torch.tensor([0, 1, 300, 900], device="cuda", dtype=torch.int32)
    packed[1:] = [t.repeat_interleave(4, 1) for t in packed[1:]]
    yield Case("served_varlen", "fa2 | -", lambda: varlen_attn(*packed, starts, starts, 600, 600))
    cache = tensors((4, 8, 1024, 64), (4, 8, 1024, 64))

    def chunks():  # prefill in chunks over a cache, every chunk with a mask of its own
        for start in (0, 256, 512):
            q, = tensors((4, 8, 256, 64))
            seen = torch.ones(256, start + 256, device="cuda", dtype=torch.bool).tril(start)
            sdpa(q, *(t[:, :, :start + 256] for t in cache), attn_mask=seen)

    yield Case("served_chunked_prefill", "? | -", chunks)
    query, = tensors((4, 8, 1, 64))
    yield Case("served_decode", "? | -", lambda: sdpa(query, *cache))
    grouped = tensors((4, 32, 1, 128), (4, 8, 777, 128), (4, 8, 777, 128), dtype="float16")
    yield Case("served_decode_groups", "? | -", lambda: sdpa(*grouped, enable_gqa=True))
    yield Case("served_softmax_mixer", "- | -", lambda: torch.softmax(detached[0] + detached[1], -1).sum())


def after():
    """Code that resembles attention and is none, and attention in shapes that the other sets lack."""
    import torch
    from torch import nn

    x = torch.randn(4, 128, 256, device="cuda", dtype=torch.bfloat16)
    gate = nn.Linear(256, 8, device="cuda", dtype=torch.bfloat16)
    experts = torch.randn(4, 128, 8, 64, device="cuda", dtype=torch.bfloat16)

    def soft(t):  # every token mixes eight experts
        return torch.einsum("bte,bted->btd", gate(t).softmax(-1), experts)

    yield Case("served_soft_mixture_train", "- | -", lambda: soft(x).sum().backward())
    mixture = torch.compile(soft)
    yield Case("served_compiled_mixture_train", "- | -", lambda: mixture(x).sum().backward())
    words, book = nn.Linear(256, 320, device="cuda", dtype=torch.bfloat16), torch.randn(320, 64, device="cuda", dtype=torch.bfloat16)
    yield Case("served_soft_code_book_train", "- | -", lambda: (words(x).softmax(-1) @ book).sum().backward())
    code = torch.compile(lambda t: words(t).softmax(-1) @ book)
    yield Case("served_compiled_code_book_train", "- | -", lambda: code(x).sum().backward())
    four = tensors((2, 8, 256, 64), (2, 8, 256, 64), (2, 8, 256, 64), grad=True)
    yield Case("served_two_softmaxes_train", "- | -",  # softmaxes over features and over tokens, no scores ("efficient attention")
               with_backward(lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v), four))
    pointed = tensors((4, 40, 64), (4, 90, 64))
    aim = torch.zeros(160, device="cuda", dtype=torch.long)
    yield Case("served_pointer_loss", "- | -", lambda: nn.functional.cross_entropy((pointed[0] @ pointed[1].mT).flatten(0, 1).float(), aim))
    grouped = tensors((2, 2, 4, 200, 64), (2, 2, 200, 64), (2, 2, 200, 64), grad=True)

    def five(q, k, v):
        weights = torch.einsum("bghqd,bgkd->bghqk", q, k).div(8).softmax(-1)
        return torch.einsum("bghqk,bgkd->bghqd", weights, v)

    yield Case("served_grouped_einsum_train", "eager | eager", with_backward(five, grouped))
    grouped_compiled = torch.compile(five)
    yield Case("served_compiled_grouped_train", "eager | eager", with_backward(grouped_compiled, grouped))
    mha = nn.MultiheadAttention(256, 4, batch_first=True, device="cuda", dtype=torch.bfloat16)
    yield Case("served_weights_wanted_train", "eager | eager", lambda: mha(x, x, x, need_weights=True)[0].sum().backward())
    yield Case("served_weights_wanted", "eager | -", lambda: mha(x.detach(), x.detach(), x.detach(), need_weights=True))
    rows, columns = (torch.randn(256, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))

    def decomposed(q, k, v):  # the bias is a GEMM of Q with tables of positions, as in SAM
        side = q.unflatten(2, (16, 16))
        bias = torch.einsum("bhxyd,ykd->bhxyk", side, rows[:16]).unsqueeze(-2) + \
            torch.einsum("bhxyd,xkd->bhxyk", side, columns[:16]).unsqueeze(-1)
        return ((q @ k.mT / 8).view(2, 8, 16, 16, 16, 16) + bias).view(2, 8, 256, 256).softmax(-1) @ v

    yield Case("served_decomposed_bias_train", "eager | eager", with_backward(decomposed, four))
    clusters = tensors((2, 8, 256, 64))[0]
    centres = nn.Parameter(torch.randn(32, 64, device="cuda", dtype=torch.bfloat16))
    yield Case("served_clusters_train", "- | -", lambda: ((clusters @ centres.mT).softmax(-1) @ centres).sum().backward())


SIZES = dict(vocab_size=512, hidden_size=256, num_attention_heads=4, num_hidden_layers=2, intermediate_size=512, pad_token_id=0)
MODELS = (  # name, configuration, sizes, maker, method, trained, expected kernels
    ("gemma2", "Gemma2Config", dict(num_key_value_heads=2, head_dim=64, sliding_window=64), "CausalLM", "eager", True, "eager | eager"),
    ("mixtral", "MixtralConfig", dict(num_key_value_heads=2, num_local_experts=4), "CausalLM", "sdpa", True, "? | ?"),
    ("esm", "EsmConfig", dict(mask_token_id=1), "MaskedLM", "eager", True, "eager | eager"),
    ("ctrl", "CTRLConfig", dict(vocab_size=512, n_embd=256, dff=512, n_layer=2, n_head=4), "CausalLM", None, False, "eager | -"),
    ("codegen", "CodeGenConfig", dict(vocab_size=512, n_embd=256, n_layer=2, n_head=4, rotary_dim=32), "CausalLM", None, True,
     "eager | eager"),
    ("qwen3_next", "Qwen3NextConfig", dict(num_key_value_heads=2, head_dim=64, num_experts=4, num_experts_per_tok=2,
                                           moe_intermediate_size=64, shared_expert_intermediate_size=64, num_hidden_layers=4), "CausalLM",
     "sdpa", False, "? | -"),
    ("bamba", "BambaConfig", dict(num_key_value_heads=2, mamba_n_heads=8, mamba_d_head=64, attn_layer_indices=[1]), "CausalLM", "eager",
     False, "eager | -"),
    ("deepseek_v2", "DeepseekV2Config", dict(num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=64, n_routed_experts=4, n_group=1,
                                             topk_group=1, num_experts_per_tok=2, moe_intermediate_size=64, first_k_dense_replace=1),
     "CausalLM", "eager", False, "eager | -"),
)


def models():
    import torch
    import transformers as tf

    ids = torch.randint(2, 512, (2, 192), device="cuda")
    for name, config, sizes, maker, how, train, families in MODELS:
        name = f"served_{name}{'_train' if train else ''}"
        try:
            sizes = sizes if "vocab_size" in sizes else {**SIZES, **sizes}
            maker = getattr(tf, "AutoModelFor" + maker)
            model = maker.from_config(getattr(tf, config)(**sizes), **({"attn_implementation": how} if how else {}))
            model = model.to("cuda", torch.bfloat16).train(train)
        except Exception as error:  # a release without that model
            yield Case(name, families, raising(error))
            continue
        yield Case(name, families, language_step(model, ids, train))
    for how, families in (("sdpa", "? | -"), ("eager", "eager | -")):
        llama = tf.LlamaForCausalLM._from_config(tf.LlamaConfig(num_key_value_heads=2, **SIZES), attn_implementation=how)
        llama = llama.to("cuda", torch.bfloat16).eval()
        yield Case("served_generate_" + how, families,
                   lambda llama=llama: llama.generate(ids[:, :40], max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0))
    swin = tf.Swinv2Model(tf.Swinv2Config(image_size=64, embed_dim=48, depths=[2, 2], num_heads=[3, 6], window_size=4)).to("cuda")
    pictures = torch.randn(2, 3, 64, 64, device="cuda")
    yield Case("served_swinv2_train", "eager | eager", lambda: swin(pictures).last_hidden_state.square().mean().backward())


GROUPS = {"served_compiled": compiled, "served_mixed": mixed, "served_models": models, "served_after": after}
