# SPDX-License-Identifier: Apache-2.0
"""Held-out cases of which_traces.py: blocks of models, training steps and compiled code.

The expected kernels are recorded as "forward | backward" ("-": none) before a trace is read; "?" asks PyTorch's dispatcher."""
import math

from which_cases import Case, by_hand, captured, language_step, raising, tensors, with_backward


def calls():
    """Single calls, and training steps around them."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    sdpa, nested = torch.nn.functional.scaled_dot_product_attention, torch.nested.nested_tensor
    flash = lambda *t, **o: with_kernel(SDPBackend.FLASH_ATTENTION, *t, **o)  # noqa: E731

    def with_kernel(backend, *qkv, **options):
        with sdpa_kernel(backend):
            return sdpa(*qkv, **options)

    one_head = tensors((2, 24, 700, 64), (2, 1, 700, 64), (2, 1, 700, 64), dtype="float32", grad=True)
    scaler = torch.amp.GradScaler("cuda")

    def amp():
        with torch.autocast("cuda", torch.float16):
            loss = sdpa(*(t * 1.0 for t in one_head), is_causal=True, enable_gqa=True).square().mean()
        scaler.scale(loss).backward()

    yield Case("block_amp_one_key_head_train", "cudnn | cudnn", amp)
    full = tensors((2, 6, 320, 48), (2, 6, 450, 48), (2, 6, 450, 48), dtype="float32", grad=True)
    bias = torch.randn(6, 320, 450, device="cuda")
    yield Case("block_fp32_bias_train", "mem-efficient | mem-efficient", with_backward(lambda *t: sdpa(*t, attn_mask=bias), full))
    double = tensors((1, 4, 200, 32), (1, 4, 200, 32), (1, 4, 200, 32), dtype="float64", grad=True)
    yield Case("block_fp64_train", "math | math", with_backward(lambda *t: sdpa(*t, is_causal=True), double))
    q, k, v = tensors((2, 8, 512, 64), (2, 8, 512, 64), (2, 8, 512, 64))
    query = q.clone().requires_grad_()
    yield Case("block_frozen_keys_train", "cudnn | cudnn", with_backward(lambda x: sdpa(x, k, v, is_causal=True), [query]))
    odd = tensors((2, 8, 300, 20), (2, 8, 300, 20), (2, 8, 300, 20), dtype="float16")
    yield Case("block_dim_20", "? | -", lambda: sdpa(*odd))
    ragged = [nested([torch.randn(8, n, 64, device="cuda", dtype=torch.float16) for n in (90, 400, 33)]) for _ in "qkv"]
    yield Case("block_nested_strided", "fa2 | -", lambda: sdpa(*ragged))
    rows = [torch.randn(n, 8, 64, device="cuda", dtype=torch.bfloat16) for n in (128, 900, 64)]
    jagged = nested(rows, layout=torch.jagged, requires_grad=True)

    def jagged_step():
        x = jagged.transpose(1, 2)
        sdpa(x, x * 1.0, x * 2.0, is_causal=True).transpose(1, 2).values().sum().backward()

    yield Case("block_jagged_train", "fa2 | fa2", jagged_step)
    side = torch.cuda.Stream()

    def heads_in_parts():
        for part, stream in enumerate((torch.cuda.current_stream(), side) * 2):
            with torch.cuda.stream(stream):
                flash(*(t[:, 2 * part:2 * part + 2] for t in (q, k, v)))

    yield Case("block_heads_on_streams", "fa2 | -", heads_in_parts)

    def ring():
        total = None
        for a, b in zip(k.chunk(4, 2), v.chunk(4, 2)):
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, a, b)[:2]
            if total is None:
                total, all_lse = out.float(), lse
            else:
                joined = torch.logaddexp(all_lse, lse)
                total = total * (all_lse - joined).exp().unsqueeze(-1) + out * (lse - joined).exp().unsqueeze(-1)
                all_lse = joined
        return total

    yield Case("block_ring", "fa2 | -", ring)
    both = [t.clone().requires_grad_() for t in (q, k, v)]
    yield Case("block_flash_then_hand_train", "eager, fa2 | eager, fa2", with_backward(lambda *t: by_hand(flash(*t), *t[1:]), both))
    yield Case("block_graph_efficient_train", "mem-efficient | mem-efficient",
               captured(with_backward(lambda *t: with_kernel(SDPBackend.EFFICIENT_ATTENTION, *t), both)))
    plain = torch.nn.Transformer(256, 4, 2, 2, 512, dropout=0.1, batch_first=True, device="cuda", dtype=torch.bfloat16)
    source, target = tensors((4, 200, 256), (4, 150, 256))
    causal = torch.nn.Transformer.generate_square_subsequent_mask(150, device="cuda", dtype=torch.bfloat16)
    yield Case("block_transformer_train", "? | ?", lambda: plain(source, target, tgt_mask=causal, tgt_is_causal=True).sum().backward())


def hands():
    """Attention by hand, and code that only looks like attention."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    q, k, v = tensors((24, 384, 64), (24, 384, 64), (24, 384, 64), dtype="float32")
    place = torch.arange(384, device="cuda")
    slopes = -torch.arange(24, device="cuda").view(24, 1, 1) * (place[:, None] - place).abs()
    yield Case("block_baddbmm_fp32", "eager | -", lambda: torch.bmm(torch.baddbmm(slopes.float(), q, k.mT, alpha=0.125).softmax(-1), v))
    feature = torch.randn(2, 512, 24, 24, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
    norm, proj = nn.GroupNorm(32, 512).cuda().half(), nn.Conv2d(512, 1536, 1).cuda().half()

    def spatial():  # one head over the pixels, as in autoencoders of diffusion models
        a, b, c = proj(norm(feature)).flatten(2).chunk(3, 1)
        weights = torch.softmax(torch.bmm(a.mT, b) * 512 ** -0.5, -1)
        return torch.bmm(c, weights.mT)

    yield Case("block_pixels", "eager | -", lambda: spatial())
    four = tensors((2, 8, 256, 64), (2, 8, 256, 64), (2, 8, 256, 64), grad=True)
    yield Case("block_checkpointed_hand_train", "eager | eager",
               lambda: checkpoint(by_hand, *four, use_reentrant=False).sum().backward())

    def upcast(q, k, v):
        return (q.float() @ k.float().mT / 8).softmax(-1).to(v.dtype) @ v

    yield Case("block_upcast", "eager | -", lambda: upcast(*(t.detach() for t in four)))
    yield Case("block_logsumexp", "eager | -", lambda: with_logsumexp(*(t.detach() for t in four)))
    traced = torch.jit.trace(lambda *t: torch.dropout((t[0] @ t[1].mT * 0.125).softmax(-1), 0.1, True) @ t[2],
                             [t.detach() for t in four], check_trace=False)
    yield Case("block_jit_traced", "eager | -", lambda: traced(*(t.detach() for t in four)))

    def linear(q, k, v):
        k = torch.nn.functional.elu(k) + 1
        return (torch.nn.functional.elu(q) + 1) @ (k.mT @ v)

    yield Case("block_linear_attention_train", "- | -", with_backward(linear, four))
    yield Case("block_sigmoid_attention_train", "- | -", with_backward(lambda q, k, v: torch.sigmoid(q @ k.mT / 8 - 5) @ v, four))
    student, teacher = nn.Linear(256, 2048).cuda(), nn.Linear(256, 2048).cuda()
    x = torch.randn(512, 256, device="cuda")

    def distil():
        loss = nn.functional.kl_div(student(x).log_softmax(-1), teacher(x).softmax(-1).detach(), reduction="batchmean")
        loss.backward()

    yield Case("block_distillation_train", "- | -", distil)
    experts = torch.randn(4, 256, 256, device="cuda")
    yield Case("block_soft_experts", "- | -",
               lambda: torch.einsum("ne,end->nd", student(x)[:, :4].softmax(-1), torch.einsum("nd,edf->enf", x, experts)))
    block = Block().cuda().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(block.parameters(), fused=True)
    tokens = torch.randn(4, 256, 256, device="cuda", dtype=torch.bfloat16)

    def accumulate():  # two parts of a batch, then clipping and a step, as in data parallelism
        for part in tokens.chunk(2):
            block(part).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(block.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    yield Case("block_accumulated_train", "cudnn | cudnn", accumulate)
    talk = torch.randn(8, 8, device="cuda", dtype=torch.bfloat16)
    yield Case("block_talking_heads", "eager | -", lambda: torch.einsum(
        "bhqk,hg->bgqk", by_hand_weights(*four[:2]), talk) @ four[2].detach())


def by_hand_weights(q, k):
    return (q.detach() @ k.detach().mT / 8).softmax(-1)


def with_logsumexp(q, k, v):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


def Block():  # noqa: N802 - a class that needs torch
    import torch
    from torch import nn

    class Decoder(nn.Module):
        """Self-attention, then attention to the first half of the tokens, then a gated layer."""

        def __init__(self):
            super().__init__()
            self.qkv, self.kv, self.out, self.up = nn.Linear(256, 768), nn.Linear(256, 512), nn.Linear(256, 256), nn.Linear(256, 1024)
            self.down, self.norm = nn.Linear(512, 256), nn.LayerNorm(256)

        def forward(self, x):
            heads = lambda t: t.unflatten(-1, (4, 64)).transpose(1, 2)  # noqa: E731
            q, k, v = map(heads, self.qkv(self.norm(x)).chunk(3, -1))
            x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            k, v = map(heads, self.kv(x[:, :x.shape[1] // 2]).chunk(2, -1))
            x = x + self.out(nn.functional.scaled_dot_product_attention(heads(x), k, v).transpose(1, 2).flatten(2))
            gate, up = self.up(x).chunk(2, -1)
            return x + self.down(nn.functional.silu(gate) * up)

    torch.manual_seed(0)
    return Decoder()


def compiled():
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    x = torch.randn(4, 256, 256, device="cuda", dtype=torch.bfloat16)
    graphed = torch.compile(Block().cuda().to(torch.bfloat16), mode="reduce-overhead")
    yield Case("block_compiled_graph_train", "cudnn | cudnn", lambda: graphed(x).sum().backward())
    autocast = torch.compile(Block().cuda())

    def half():
        with torch.autocast("cuda", torch.bfloat16):
            loss = autocast(x.float()).square().mean()
        loss.backward()

    yield Case("block_compiled_autocast_train", "cudnn | cudnn", half)
    flash = torch.cuda.make_graphed_callables(Block().cuda().to(torch.bfloat16), (x.clone().requires_grad_(),))
    yield Case("block_graphed_callable_train", "cudnn | cudnn", lambda: flash(x.clone().requires_grad_()).sum().backward())
    call = torch.compile(flex_attention, dynamic=False)
    inputs = tensors((2, 8, 512, 64), (2, 2, 512, 64), (2, 2, 512, 64), grad=True)
    window = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 100), None, None, 512, 512, device="cuda")
    cap = lambda score, b, h, q, k: 30.0 * torch.tanh(score / 30.0)  # noqa: E731
    yield Case("block_flex_cap_window_train", "flex | flex",
               with_backward(lambda *t: call(*t, score_mod=cap, block_mask=window, enable_gqa=True), inputs))
    one = tensors((4, 16, 1, 128), (4, 4, 600, 128), (4, 4, 600, 128))
    table = torch.randn(16, device="cuda")
    sink = lambda score, b, h, q, k: score + table[h]  # noqa: E731
    yield Case("block_flex_decode_bias", "flex | -", lambda: call(*one, score_mod=sink, enable_gqa=True))
    tuned = torch.compile(lambda q, k, v: ((30 * torch.tanh(q @ k.mT / 240)).softmax(-1) @ v), mode="max-autotune-no-cudagraphs")
    square = tensors((2, 8, 512, 64), (2, 8, 512, 64), (2, 8, 512, 64))
    with torch.no_grad():
        yield Case("block_tuned_hand", "eager | -", lambda: tuned(*square))
    dynamic = torch.compile(torch.nn.functional.scaled_dot_product_attention, dynamic=True)

    def efficient():
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return dynamic(*square)

    yield Case("block_compiled_efficient", "mem-efficient | -", efficient)


LANGUAGE = (  # name, configuration, sizes, method, trained
    ("mpt", "MptConfig", dict(vocab_size=512, d_model=256, n_heads=4, n_layers=2), "eager", True),
    ("olmo2", "Olmo2Config", {}, "sdpa", True),
    ("cohere", "CohereConfig", {}, "eager", False),
    ("starcoder2", "Starcoder2Config", dict(vocab_size=512, hidden_size=256, num_attention_heads=4, num_key_value_heads=2,
                                            num_hidden_layers=2, intermediate_size=512), "flex_attention", False),
    ("xlnet", "XLNetConfig", dict(vocab_size=512, d_model=256, n_head=4, n_layer=2, d_inner=512), None, True),
    ("deberta_v2", "DebertaV2Config", {}, None, True),
    ("bart", "BartConfig", dict(vocab_size=512, d_model=256, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                                decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512), "sdpa", True),
    ("mamba2", "Mamba2Config", dict(vocab_size=512, hidden_size=256, num_hidden_layers=2, num_heads=8, head_dim=64), None, False),
    ("fnet", "FNetConfig", dict(vocab_size=512, hidden_size=256, num_hidden_layers=2, intermediate_size=512), None, True),
    ("modernbert", "ModernBertConfig", {}, "sdpa", True),
)
FAMILIES = {"mpt": "eager | eager", "cohere": "eager | -", "starcoder2": "flex | -", "xlnet": "eager | eager", "deberta_v2": "eager | eager",
            "mamba2": "- | -", "fnet": "- | -"}
SIZES = dict(vocab_size=512, hidden_size=256, num_attention_heads=4, num_hidden_layers=2, intermediate_size=512, pad_token_id=0)


def language():
    import torch
    import transformers as tf

    ids = torch.randint(1, 512, (2, 192), device="cuda")
    for name, config, sizes, how, train in LANGUAGE:
        maker = tf.AutoModelForMaskedLM if name in ("deberta_v2", "fnet", "modernbert") else \
            tf.AutoModelForSeq2SeqLM if name == "bart" else tf.AutoModelForCausalLM
        try:
            model = maker.from_config(getattr(tf, config)(**(sizes or SIZES)), **({"attn_implementation": how} if how else {}))
            model = model.to("cuda", torch.float32 if name == "fnet" else torch.bfloat16).train(train)
        except Exception as error:  # a release without that model
            yield Case("block_" + name, "?", raising(error))
            continue
        yield Case(f"block_{name}{'_train' if train else ''}", FAMILIES.get(name, "? | ?"), language_step(model, ids, train))


def images():
    """Models of torchvision, torchaudio and timm."""
    import timm
    import torch
    import torchaudio
    import torchvision

    pictures = torch.randn(4, 3, 224, 224, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    models = (("swin_t", "eager | eager", torchvision.models.swin_t()), ("vit_b_16", "cudnn | cudnn", torchvision.models.vit_b_16()),
              ("mobilenet_v3", "- | -", torchvision.models.mobilenet_v3_small()),
              ("coatnet", "? | ?", timm.create_model("coatnet_0_rw_224")), ("xcit", "? | ?", timm.create_model("xcit_nano_12_p16_224")))
    for name, families, model in models:
        model = model.to("cuda", torch.bfloat16).to(memory_format=torch.channels_last)
        yield Case(f"block_{name}_train", families, lambda model=model: model(pictures).sum().backward())
    sound = torch.randn(2, 8000, device="cuda", dtype=torch.float16)
    model = torchaudio.models.wav2vec2_base(aux_num_out=32).to("cuda", torch.float16).eval()

    def listen():
        with torch.no_grad():
            return model(sound)

    yield Case("block_wav2vec2", "? | -", listen)
    conformer = torchaudio.models.Conformer(80, 4, 128, 2, 31).cuda()
    frames, lengths = torch.randn(2, 300, 80, device="cuda"), torch.tensor([300, 222], device="cuda")
    yield Case("block_conformer_train", "? | ?", lambda: conformer(frames, lengths)[0].sum().backward())


def jax_blocks():
    import jax
    import jax.numpy as jnp

    q = jax.random.normal(jax.random.key(0), (2, 512, 8, 64), jnp.float16)
    kv = jax.random.normal(jax.random.key(1), (2, 512, 2, 64), jnp.float16)
    bias = jax.random.normal(jax.random.key(2), (1, 8, 512, 512), jnp.float16)
    call = jax.jit(lambda x, y: jax.nn.dot_product_attention(x, y, y, bias=bias, implementation="cudnn"))
    yield Case("block_jax_bias_groups", "cudnn | -", lambda: call(q, kv).block_until_ready())
    near = jax.jit(jax.grad(lambda x, y: jax.nn.dot_product_attention(
        x, y, y, is_causal=True, local_window_size=(64, 0), implementation="cudnn").astype(jnp.float32).sum()))
    yield Case("block_jax_window_train", "cudnn | cudnn", lambda: near(q, kv).block_until_ready())


GROUPS = {"block_calls": calls, "block_hands": hands, "block_compiled": compiled, "block_language": language, "block_images": images,
          "block_jax": jax_blocks}
