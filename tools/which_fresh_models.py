# SPDX-License-Identifier: Apache-2.0
"""Held-out cases of which_traces.py: models of transformers and timm."""
from which_cases import Case, raising

SIZES = dict(vocab_size=1024, hidden_size=256, num_attention_heads=4, num_hidden_layers=2)
GROUPED = dict(SIZES, num_key_value_heads=2, intermediate_size=512, head_dim=64)

# name, class of its configuration, sizes, method, trained
LANGUAGE_MODELS = (
    ("bloom", "BloomConfig", dict(vocab_size=1024, hidden_size=256, n_head=4, n_layer=2), "eager", True),
    ("opt", "OPTConfig", dict(SIZES, ffn_dim=512, word_embed_proj_dim=256), "sdpa", True),
    ("falcon", "FalconConfig", dict(SIZES, alibi=True), "eager", False),
    ("phi3", "Phi3Config", dict(GROUPED, pad_token_id=0), "sdpa", True),
    ("gemma3", "Gemma3TextConfig", dict(GROUPED, sliding_window=64), "sdpa", False),
    ("gemma3", "Gemma3TextConfig", dict(GROUPED, sliding_window=64), "eager", True),
    ("qwen3", "Qwen3Config", GROUPED, "sdpa", True),
    ("qwen3_moe", "Qwen3MoeConfig", dict(GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64), "eager", False),
    ("gpt_oss", "GptOssConfig", dict(GROUPED, num_local_experts=4, num_experts_per_tok=2), "eager", False),
    ("deepseek_v3", "DeepseekV3Config", dict(SIZES, num_key_value_heads=4, intermediate_size=512, moe_intermediate_size=64,
                                             n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, q_lora_rank=64,
                                             kv_lora_rank=64, first_k_dense_replace=1), "sdpa", False),
    ("roberta", "RobertaConfig", dict(SIZES, intermediate_size=512), "sdpa", True),
    ("gptj", "GPTJConfig", dict(vocab_size=1024, n_embd=256, n_head=4, n_layer=2, rotary_dim=32), "eager", True),
    ("granite", "GraniteConfig", {k: v for k, v in GROUPED.items() if k != "head_dim"}, "flex_attention", False),
    ("mamba", "MambaConfig", dict(vocab_size=1024, hidden_size=256, num_hidden_layers=2), None, False),
)

IMAGE_MODELS = (("swin_tiny_patch4_window7_224", "?"), ("deit3_small_patch16_224", "?"), ("convnext_tiny", "-"),
                ("resmlp_12_224", "-"), ("cait_xxs24_224", "eager"), ("beit_base_patch16_224", "?"))


def step_of(model, inputs, train):
    import torch

    def step():
        if train:
            model(**inputs).loss.backward()
            return
        with torch.no_grad():
            model(**inputs)

    return step


def language_cases():
    import torch
    import transformers as tf

    ids = torch.randint(1024, (2, 256), device="cuda")
    for name, config, sizes, how, train in LANGUAGE_MODELS:
        options = {"attn_implementation": how} if how else {}
        try:
            model = tf.AutoModelForCausalLM.from_config(getattr(tf, config)(**sizes), **options)
            model = model.to("cuda", torch.bfloat16).train(train)
        except Exception as error:  # a release without that model
            yield Case("fresh_" + name, "?", raising(error))
            continue
        family = {"eager": "eager", "flex_attention": "flex", None: "-"}.get(how, "?")
        yield Case(f"fresh_{name}_{how}{'_train' if train else ''}", family, step_of(model, dict(input_ids=ids, labels=ids), train))


def image_cases():
    import timm
    import torch
    import transformers as tf

    images = torch.randn(4, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    for name, family in IMAGE_MODELS:
        model = timm.create_model(name).to("cuda", torch.bfloat16)
        yield Case("fresh_" + name, family, lambda model=model: model(images).sum().backward())
    sound = tf.WhisperConfig(d_model=256, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
                             vocab_size=1024, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    for how in ("sdpa", "eager"):
        model = tf.AutoModelForSpeechSeq2Seq.from_config(sound, attn_implementation=how).to("cuda", torch.bfloat16)
        inputs = dict(input_features=torch.randn(1, 80, 3000, device="cuda", dtype=torch.bfloat16),
                      decoder_input_ids=torch.randint(1024, (1, 64), device="cuda"))
        yield Case(f"fresh_whisper_{how}", "eager" if how == "eager" else "?", step_of(model, inputs, False))
    clip = tf.CLIPVisionConfig(hidden_size=256, num_attention_heads=4, num_hidden_layers=2, intermediate_size=512)
    model = tf.CLIPVisionModel._from_config(clip, attn_implementation="eager").to("cuda", torch.bfloat16)
    yield Case("fresh_clip_eager", "eager", step_of(model, dict(pixel_values=images), False))
