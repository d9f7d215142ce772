# SPDX-License-Identifier: Apache-2.0
"""Held-out cases of which_traces.py: PyTorch's rarer choices, typical training steps, custom Triton kernels.

The expected kernels are recorded as "forward | backward" ("-": none) before a trace is read; "?" asks PyTorch's dispatcher."""

from which_cases import Case, captured, language_step, raising, tensors, with_backward


def calls():
    """PyTorch's choice where its first one is refused, and training steps."""
    import torch
    from torch import nn
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.checkpoint import checkpoint

    sdpa, nested = nn.functional.scaled_dot_product_attention, torch.nested.nested_tensor
    yield Case("step_gpt_scaled_train", "cudnn | cudnn", training_step(half=True))
    yield Case("step_gpt_graph_train", "cudnn | cudnn", captured(training_step(half=False, capturable=True)))
    three = tensors((2, 8, 640, 64), (2, 8, 640, 64), (2, 8, 640, 64), grad=True)
    place = torch.arange(640, device="cuda")
    window = (place[:, None] >= place) & (place[:, None] - place < 128)
    yield Case("step_window_mask_train", "cudnn | cudnn", with_backward(lambda *t: sdpa(*t, attn_mask=window), three))
    learned = torch.zeros(8, 640, 640, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    yield Case("step_learned_bias_train", "mem-efficient | mem-efficient",
               with_backward(lambda *t: sdpa(*t, attn_mask=learned.unsqueeze(0).expand(2, -1, -1, -1)), three))
    wide = tensors((2, 4, 512, 256), (2, 4, 512, 256), (2, 4, 512, 256), dtype="float16", grad=True)
    yield Case("step_256_train", "cudnn | cudnn", with_backward(lambda *t: sdpa(*t, is_causal=True), wide))
    latent = tensors((2, 8, 512, 192), (2, 8, 512, 192), (2, 8, 512, 128), grad=True)
    yield Case("step_latent_train", "cudnn | cudnn", with_backward(lambda *t: sdpa(*t, is_causal=True), latent))
    one = tensors((2, 8, 300, 64), (2, 8, 1, 64), (2, 8, 1, 64))
    yield Case("step_one_key", "fa2 | -", lambda: sdpa(*one))
    yield Case("step_dropout_sixteenth_train", "cudnn | cudnn", with_backward(lambda *t: sdpa(*t, dropout_p=0.25), three))
    yield Case("step_dropout_odd_train", "cudnn | cudnn", with_backward(lambda *t: sdpa(*t, dropout_p=0.3), three))
    cross = tensors((8, 16, 300, 64), (8, 16, 77, 64), (8, 16, 77, 64), dtype="float16", grad=True)
    yield Case("step_cross_train", "cudnn | cudnn", with_backward(sdpa, cross))
    single = tensors((2, 8, 384, 64), (2, 8, 384, 64), (2, 8, 384, 64), dtype="float32", grad=True)
    yield Case("step_fp32_causal_train", "mem-efficient | mem-efficient", with_backward(lambda *t: sdpa(*t, is_causal=True), single))

    def strict():
        torch.use_deterministic_algorithms(True)
        try:
            with_backward(lambda *t: sdpa(*t, is_causal=True), three)()
        finally:
            torch.use_deterministic_algorithms(False)

    yield Case("step_deterministic_train", "fa2 | fa2", strict)

    def flash(*qkv):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa(*qkv, is_causal=True)

    yield Case("step_flash_checkpointed_train", "fa2 | fa2",
               with_backward(lambda *t: checkpoint(flash, *t, use_reentrant=False), three))
    rows = [torch.randn(n, 8, 64, device="cuda", dtype=torch.float16) for n in (77, 512, 300, 1)]
    jagged = nested(rows, layout=torch.jagged)
    yield Case("step_jagged_causal", "fa2 | -",
               lambda: sdpa(*(jagged.transpose(1, 2) * factor for factor in (1.0, 0.5, 2.0)), is_causal=True))
    mha = nn.MultiheadAttention(256, 4, batch_first=True, device="cuda", dtype=torch.bfloat16)
    tokens, = tensors((4, 200, 256), grad=True)
    padding = torch.zeros(4, 200, device="cuda", dtype=torch.bool)
    padding[1, 100:] = True
    yield Case("step_mha_padding_train", "? | ?",
               lambda: mha(tokens, tokens, tokens, key_padding_mask=padding, need_weights=False)[0].sum().backward())
    yield Case("step_vmap", "? | -", lambda: torch.vmap(lambda q, k, v: sdpa(q, k, v))(*(t.detach() for t in three)))
    yield Case("step_double_backward_train", "math | math", lambda: twice(single))


def twice(inputs):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(*inputs)
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    sum(g.square().sum() for g in grads).backward()
    for t in inputs:
        t.grad = None


def training_step(half, capturable=False):
    """A small GPT's step as in many scripts: autocast, a scaled loss, clipping, AdamW; or in one CUDA graph."""
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LayerNorm(512), nn.LayerNorm(512)
            self.qkv, self.out, self.up, self.down = nn.Linear(512, 1536), nn.Linear(512, 512), nn.Linear(512, 2048), nn.Linear(2048, 512)

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (8, 64)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
            x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.down(nn.functional.gelu(self.up(self.second(x))))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4096, 512), Layer(), Layer(), Layer(), Layer(), nn.LayerNorm(512), nn.Linear(512, 4096)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=capturable, fused=not capturable)
    scaler = torch.amp.GradScaler("cuda", enabled=half)
    ids = torch.randint(4096, (8, 1025), device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=not capturable)
        with torch.autocast("cuda", torch.float16 if half else torch.bfloat16, cache_enabled=not capturable):
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        scaler.scale(loss).backward()
        if half:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def hands():
    """Attention by hand in forms that other sets lack, and code that only looks like it."""
    import torch
    from torch import nn

    four = tensors((2, 8, 320, 64), (2, 2, 320, 64), (2, 2, 320, 64), dtype="float16", grad=True)
    hidden = torch.ones(320, 320, device="cuda", dtype=torch.bool).triu(1)

    def groups(q, k, v):  # fp32 in the softmax, key heads repeated
        k, v = (t.repeat_interleave(4, 1) for t in (k, v))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k).float().mul(0.125).masked_fill(hidden, -1e9)
        return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype), v)

    yield Case("step_groups_by_hand_train", "eager | eager", with_backward(groups, four))
    same = tensors((2, 8, 256, 32), (2, 8, 256, 32), (2, 8, 256, 32), grad=True)
    tau = torch.full((8, 1, 1), 10.0, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    yield Case("step_cosine_train", "eager | eager", with_backward(lambda *t: cosine(tau, *t), same))

    def chunks(q, k, v):  # every chunk of 64 queries sees itself and the previous one, as in Longformer
        q, k, v = (t.unflatten(2, (4, 64)) for t in (q, k, v))
        k, v = (torch.cat([torch.roll(t, 1, 2), t], 3) for t in (k, v))
        return (torch.softmax(q @ k.mT * 0.17, -1) @ v).flatten(2, 3)

    yield Case("step_chunks_train", "eager | eager", with_backward(chunks, same))
    keys, values = tensors((4, 8, 512, 64), (4, 8, 512, 64), dtype="float16")
    query, = tensors((4, 8, 1, 64), dtype="float16")

    def tokens():  # a decoding loop, by hand
        for length in (509, 510, 511, 512):
            weights = torch.matmul(query, keys[:, :, :length].mT / 8).softmax(-1)
            torch.matmul(weights, values[:, :, :length])

    yield Case("step_decode_loop", "eager | -", tokens)
    yield Case("step_squared_relu", "- | -", lambda: torch.relu(same[0].detach() @ same[1].detach().mT).square() @ same[2].detach())
    features = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)

    def random_features():  # no softmax over keys, as in Performer
        q, k = ((t.detach() @ features - 2).exp() for t in same[:2])
        return (q @ (k.mT @ same[2].detach())) / (q @ k.sum(2).unsqueeze(-1))

    yield Case("step_random_features", "- | -", random_features)
    student = nn.Linear(256, 128).cuda()
    images, bank = torch.randn(512, 256, device="cuda"), torch.randn(8192, 128, device="cuda")
    yield Case("step_contrastive_train", "- | -", lambda: nn.functional.cross_entropy(
        nn.functional.normalize(student(images), dim=-1) @ bank.mT / 0.07, torch.zeros(512, device="cuda", dtype=torch.long)).backward())
    weights = torch.randn(256, 16, device="cuda")
    yield Case("step_router_topk", "- | -", lambda: torch.topk((images @ weights).softmax(-1), 2)[0].sum())


def cosine(tau, q, k, v):  # used by Swin V2
    from torch.nn.functional import normalize

    return (normalize(q, dim=-1) @ normalize(k, dim=-1).mT * tau).softmax(-1) @ v


def compiled():
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    same = tensors((2, 8, 256, 64), (2, 8, 256, 64), (2, 8, 256, 64), grad=True)
    tau = torch.full((8, 1, 1), 10.0, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    call = torch.compile(cosine)
    yield Case("step_compiled_cosine_train", "eager | eager", with_backward(lambda *t: call(tau, *t), same))
    flex = torch.compile(flex_attention, dynamic=False)
    side = lambda q, k: (q // 16 - k // 16).abs()  # noqa: E731
    near = create_block_mask(lambda b, h, q, k: (side(q, k) <= 3) & ((q % 16 - k % 16).abs() <= 3), None, None, 256, 256, device="cuda")
    yield Case("step_flex_neighbours_train", "flex | flex", with_backward(lambda *t: flex(*t, block_mask=near), same))
    table = torch.zeros(8, 511, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    yield Case("step_flex_learned_bias_train", "flex | flex",
               with_backward(lambda *t: flex(*t, score_mod=lambda s, b, h, q, k: s + table[h, q - k + 255]), same))
    plain = [t.detach().half() for t in same]
    yield Case("step_flex_lse", "flex | -", lambda: flex(*plain, score_mod=lambda s, b, h, q, k: s * 0.5, return_lse=True)[1].sum())
    sink = torch.zeros(8, device="cuda", dtype=torch.float16)

    def sinks(q, k, v):
        scores = torch.cat([q @ k.mT / 8, sink.view(1, 8, 1, 1).expand(2, 8, 256, 1)], -1)
        return (scores - scores.amax(-1, keepdim=True)).softmax(-1)[..., :-1] @ v

    hand = torch.compile(sinks)
    with torch.no_grad():
        yield Case("step_compiled_sinks", "eager | -", lambda: hand(*plain))


def written_in_triton():
    import which_triton as own

    q, k, v = tensors((2, 8, 512, 64), (2, 8, 512, 64), (2, 8, 512, 64), dtype="float16")
    yield Case("step_triton_attention", "triton | -", lambda: own.attention(q, k, v))
    yield Case("step_triton_softmax", "eager | -", lambda: own.softmax(q @ k.mT) @ v)


LANGUAGE = (  # name, configuration, sizes, method, trained
    ("distilbert", "DistilBertConfig", dict(vocab_size=512, dim=256, n_heads=4, n_layers=2, hidden_dim=512), "sdpa", True),
    ("electra", "ElectraConfig", {}, "eager", True),
    ("gpt_neo", "GPTNeoConfig", dict(vocab_size=512, hidden_size=256, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
                                     window_size=64), "eager", True),
    ("glm4", "Glm4Config", dict(num_key_value_heads=2, head_dim=64), "sdpa", True),
    ("stablelm", "StableLmConfig", dict(num_key_value_heads=4), "eager", False),
    ("olmoe", "OlmoeConfig", dict(num_key_value_heads=2, num_experts=4, num_experts_per_tok=2), "sdpa", False),
    ("falcon_mamba", "FalconMambaConfig", dict(vocab_size=512, hidden_size=256, num_hidden_layers=2), None, False),
    ("smollm3", "SmolLM3Config", dict(num_key_value_heads=2), "flex_attention", False),
    ("bloom", "BloomConfig", dict(vocab_size=512, hidden_size=256, n_head=4, n_layer=2), None, False),
)
OF_MODELS = {"electra": "eager | eager", "gpt_neo": "eager | eager", "stablelm": "eager | -", "falcon_mamba": "- | -", "smollm3": "flex | -",
             "bloom": "eager | -"}
SIZES = dict(vocab_size=512, hidden_size=256, num_attention_heads=4, num_hidden_layers=2, intermediate_size=512, pad_token_id=0)


def language():
    import torch
    import transformers as tf

    ids = torch.randint(1, 512, (2, 192), device="cuda")
    for name, config, sizes, how, train in LANGUAGE:
        maker = tf.AutoModelForMaskedLM if name in ("distilbert", "electra") else tf.AutoModelForCausalLM
        try:
            sizes = sizes if "vocab_size" in sizes else {**SIZES, **sizes}
            model = maker.from_config(getattr(tf, config)(**sizes), **({"attn_implementation": how} if how else {}))
            model = model.to("cuda", torch.bfloat16).train(train)
        except Exception as error:  # a release without that model
            yield Case("step_" + name, "?", raising(error))
            continue
        families = OF_MODELS.get(name, "? | ?" if train else "? | -")
        yield Case(f"step_{name}{'_train' if train else ''}", families, language_step(model, ids, train))
    for name, config, maker, options in (
            ("vit", "ViTConfig", "AutoModel", dict(hidden_size=256, num_attention_heads=4, num_hidden_layers=2, intermediate_size=512)),
            ("dinov2", "Dinov2Config", "AutoModel", dict(hidden_size=256, num_attention_heads=4, num_hidden_layers=2))):
        how = "eager" if name == "dinov2" else "sdpa"
        model = getattr(tf, maker).from_config(getattr(tf, config)(**options), attn_implementation=how).to("cuda", torch.float16)
        pictures = torch.randn(2, 3, 224, 224, device="cuda", dtype=torch.float16)
        yield Case(f"step_{name}_train", "eager | eager" if how == "eager" else "? | ?",
                   lambda model=model: model(pictures).last_hidden_state.float().square().mean().backward())
    whisper = tf.WhisperConfig(vocab_size=512, d_model=256, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, pad_token_id=0,
                               decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, decoder_start_token_id=1, bos_token_id=1,
                               eos_token_id=2, num_mel_bins=80, max_source_positions=200)
    model = tf.WhisperForConditionalGeneration(whisper).to("cuda", torch.bfloat16)
    sound = torch.randn(2, 80, 400, device="cuda", dtype=torch.bfloat16)
    yield Case("step_whisper_train", "? | ?", lambda: model(input_features=sound, labels=ids[:, :64]).loss.backward())


GROUPS = {"step_calls": calls, "step_hands": hands, "step_compiled": compiled, "step_triton": written_in_triton, "step_language": language}
