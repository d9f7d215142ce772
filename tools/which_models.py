# SPDX-License-Identifier: Apache-2.0
"""Cases of which_traces.py: attention inside models of transformers and timm, and in JAX."""
from contextlib import nullcontext

from which_cases import Case, tensors, with_backward


def model_cases():
    import torch
    import transformers as tf

    sizes = dict(vocab_size=4096, hidden_size=512, num_attention_heads=8, num_hidden_layers=2, max_position_embeddings=2048)
    llama = dict(sizes, num_key_value_heads=2, intermediate_size=1024)
    configs = {
        "llama": lambda: (tf.LlamaConfig(**llama), tf.AutoModelForCausalLM),
        "gpt2": lambda: (tf.GPT2Config(vocab_size=4096, n_embd=512, n_head=8, n_layer=2, n_positions=2048), tf.AutoModelForCausalLM),
        "bert": lambda: (tf.BertConfig(**sizes, intermediate_size=1024), tf.AutoModelForMaskedLM),
        "gemma2": lambda: (tf.Gemma2Config(**llama, head_dim=64, sliding_window=256), tf.AutoModelForCausalLM),
    }
    ids = torch.randint(4096, (4, 512), device="cuda")
    padding = torch.ones_like(ids)
    padding[0, :100] = 0
    for kind, how, padded, train in (
        ("llama", "sdpa", False, True),
        ("llama", "eager", False, True),
        ("llama", "sdpa", True, False),
        ("llama", "flex_attention", False, False),
        ("gpt2", "eager", False, False),
        ("gpt2", "sdpa", False, False),
        ("bert", "sdpa", True, True),
        ("bert", "eager", True, False),
        ("gemma2", "eager", False, False),
    ):
        config, maker = configs[kind]()
        model = maker.from_config(config, attn_implementation=how).to("cuda", torch.bfloat16).train(train)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(model=model, optimizer=optimizer, padded=padded, train=train):
            with nullcontext() if train else torch.no_grad():
                out = model(input_ids=ids, attention_mask=padding if padded else None, labels=ids)
            if train:
                out.loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        name = f"{kind}_{how}{'_padded' if padded else ''}{'_train' if train else ''}"
        yield Case(name, {"eager": "eager", "flex_attention": "flex"}.get(how, "?"), step)
    model = tf.AutoModelForCausalLM.from_config(configs["llama"]()[0], attn_implementation="sdpa").to("cuda", torch.bfloat16).eval()
    yield Case("llama_generate", "?", lambda: model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0))


def more_cases():
    """Cases that the reader of traces was not developed on."""
    import timm
    import torch
    import transformers as tf
    from torch.nn.attention.bias import causal_lower_right

    call = torch.nn.functional.scaled_dot_product_attention
    q, k, v = tensors((2, 16, 256, 64), (2, 16, 1024, 64), (2, 16, 1024, 64))
    yield Case("lower_right", "?", lambda: call(q, k, v, attn_mask=causal_lower_right(256, 1024)))
    inputs = tensors((4, 8, 512, 64), (4, 8, 512, 64), (4, 8, 512, 64), dtype="float32", grad=True)

    def autocast(*qkv):
        with torch.autocast("cuda", torch.float16):
            return call(*(t * 1.0 for t in qkv), is_causal=True)

    yield Case("autocast_train", "?", with_backward(autocast, inputs))
    yield Case("float_mask_math", "?", lambda: call(*(t.double() for t in inputs)))
    images = torch.randn(8, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    for name, family in (("vit_small_patch16_224", "?"), ("resnet18", "-"), ("mixer_s32_224", "-")):
        model = timm.create_model(name).to("cuda", torch.bfloat16).eval()
        yield Case(name, family, lambda model=model: model(images).softmax(-1))
    model = timm.create_model("vit_small_patch16_224").to("cuda", torch.bfloat16)
    for block in model.blocks:
        block.attn.fused_attn = False
    yield Case("vit_unfused_train", "eager", lambda: model(images).sum().backward())
    ids = torch.randint(4096, (4, 384), device="cuda")
    sizes = dict(vocab_size=4096, hidden_size=512, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=2)
    mixtral = dict(sizes, intermediate_size=512, num_local_experts=4)
    for name, config, how in (
        ("mixtral", tf.MixtralConfig(**mixtral), "eager"),
        ("mixtral", tf.MixtralConfig(**mixtral), "sdpa"),
        ("qwen2", tf.Qwen2Config(**sizes, intermediate_size=512), "sdpa"),
        ("neox", tf.GPTNeoXConfig(vocab_size=4096, hidden_size=512, num_attention_heads=8, num_hidden_layers=2), "eager"),
        ("mistral_window", tf.MistralConfig(**sizes, intermediate_size=512, sliding_window=128), "sdpa"),
    ):
        model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=how).to("cuda", torch.bfloat16)
        yield Case(f"{name}_{how}_train", {"eager": "eager"}.get(how, "?"), lambda m=model: m(input_ids=ids, labels=ids).loss.backward())
    t5 = tf.T5Config(vocab_size=4096, d_model=512, d_kv=64, num_heads=8, num_layers=2, decoder_start_token_id=0)
    model = tf.AutoModelForSeq2SeqLM.from_config(t5, attn_implementation="eager").to("cuda", torch.bfloat16)
    yield Case("t5_eager_train", "eager", lambda: model(input_ids=ids, labels=ids).loss.backward())
    model = tf.AutoModelForCausalLM.from_config(tf.Qwen2Config(**sizes, intermediate_size=512), attn_implementation="eager")
    compiled = torch.compile(model.to("cuda", torch.bfloat16))
    yield Case("qwen2_compiled_eager_train", "eager", lambda: compiled(input_ids=ids, labels=ids).loss.backward())


def pallas_cases():
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu import attention

    q = jax.random.normal(jax.random.key(0), (2, 1024, 8, 64), jnp.bfloat16)
    call = jax.jit(lambda x: attention.mha(x, x, x, segment_ids=None, causal=True))
    yield Case("jax_pallas", "triton", lambda: call(q).block_until_ready())
    grad = jax.jit(jax.grad(lambda x: call(x).astype(jnp.float32).sum()))
    yield Case("jax_pallas_train", "triton", lambda: grad(q).block_until_ready())


def jax_cases():
    import jax
    import jax.numpy as jnp

    q = jax.random.normal(jax.random.key(0), (4, 1024, 16, 64), jnp.bfloat16)
    for how, family in (("cudnn", "cudnn"), ("xla", "eager")):
        call = jax.jit(lambda x, how=how: jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation=how))
        grad = jax.jit(jax.grad(lambda x, call=call: call(x).astype(jnp.float32).sum()))
        yield Case(f"jax_{how}", family, lambda call=call: call(q).block_until_ready())
        yield Case(f"jax_{how}_train", family, lambda grad=grad: grad(q).block_until_ready())
