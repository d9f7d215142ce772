#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a small random model in the format of Hugging Face transformers: config.json and model.safetensors.

  random_model.py qwen3|llama3 FOLDER

qwen3: norms of Q and K, heads_q * head_dim over hidden_size, an output matrix of its own. llama3: Llama 3.1's rotary
frequencies and tied embeddings. The numbers depend on the name alone (Python's generator is the same in every version),
so tests know what the models say. No size is a multiple of a vector's, so that tails of loops are tested too.
"""
import array
import json
import pathlib
import random
import struct
import sys

SHAPES = {
    "qwen3": dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=97, hidden_size=44, intermediate_size=76,
        num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=26, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=1e6), use_sliding_window=False),
    "llama3": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=97, hidden_size=60, intermediate_size=84,
        num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=1, head_dim=12, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0,
                             high_freq_factor=4.0, original_max_position_embeddings=64)),
}
COMMON = dict(attention_bias=False, bos_token_id=None, dtype="float32", eos_token_id=0, hidden_act="silu",
              max_position_embeddings=512, mlp_bias=False, pad_token_id=None, rms_norm_eps=1e-6)


def shapes_of(config: dict):
    """(name, shape) of every tensor."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = (config[heads] * dim for heads in ("num_attention_heads", "num_key_value_heads"))
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}."
        yield layer + "input_layernorm.weight", (hidden,)
        for name, shape in (("q", (q, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden)), ("o", (hidden, q))):
            yield f"{layer}self_attn.{name}_proj.weight", shape
        if config["model_type"] == "qwen3":
            yield layer + "self_attn.q_norm.weight", (dim,)
            yield layer + "self_attn.k_norm.weight", (dim,)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            yield f"{layer}mlp.{name}_proj.weight", shape
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def values(rng: random.Random, shape: tuple) -> array.array:
    """Norms from 0.5 to 1.5; matrices that keep the size of their input, so that logits differ clearly."""
    if len(shape) == 1:
        return array.array("f", (rng.uniform(0.5, 1.5) for _ in range(shape[0])))
    limit = (6 / shape[1]) ** 0.5
    return array.array("f", (rng.uniform(-limit, limit) for _ in range(shape[0] * shape[1])))


def write(name: str, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {**COMMON, **SHAPES[name]}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    rng = random.Random(name)
    header, payload = {}, b""
    for tensor, shape in shapes_of(config):
        data = values(rng, shape)
        if sys.byteorder == "big":
            data.byteswap()
        header[tensor] = dict(dtype="F32", shape=shape, data_offsets=[len(payload), len(payload) + 4 * len(data)])
        payload += data.tobytes()
    header["__metadata__"] = dict(format="pt")
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + payload)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        sys.exit(__doc__)
    write(sys.argv[1], pathlib.Path(sys.argv[2]))
