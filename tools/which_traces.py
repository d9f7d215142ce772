#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs attention in many ways on a GPU, with a profiler's trace of each: what `tessera which` is tried on.

Each case asks for one kernel by PyTorch's own means, so what ran is known. FOLDER gets NAME.json.gz for each case, and
GROUP.tsv with a line for each: its name, and the families of attention that ran ("?": not known beforehand, "-": none), or why
it failed. Exit status 77 without PyTorch or without a GPU.

Usage: which_traces.py FOLDER GROUP...    GROUP: sdpa, eager, graphs, flex, compiled, models, more, jax, pallas
--bare instead of FOLDER: no traces, for another profiler around it.
"""
import glob
import gzip
import json
import math
import os
import re
import shutil
import sys
import tempfile
from contextlib import nullcontext

FAMILIES = {"FLASH_ATTENTION": "fa2", "EFFICIENT_ATTENTION": "mem-efficient", "CUDNN_ATTENTION": "cudnn", "MATH": "math"}
SHORT = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH"}


class Case:
    def __init__(self, name, families, step, shapes=True, stack=False):
        self.name, self.families, self.step, self.shapes, self.stack = name, families, step, shapes, stack


def tensors(*shapes, dtype="bfloat16", grad=False):
    import torch

    return [torch.randn(shape, device="cuda", dtype=getattr(torch, dtype), requires_grad=grad) for shape in shapes]


def with_backward(forward, inputs):
    """A step of training: forward, and backward with a gradient of noise."""
    import torch

    def step():
        out = forward(*inputs)
        out.backward(torch.ones_like(out))
        for tensor in inputs:
            tensor.grad = None

    return step


def sdpa(name, backend, q, kv=None, v=None, dtype="bfloat16", mask=None, train=False, **options):
    """One call of scaled_dot_product_attention by the backend, or by PyTorch's own choice (None)."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kv = kv or q
    inputs = tensors(q, kv, v or kv, dtype=dtype, grad=train)
    if mask == "bool":
        options["attn_mask"] = torch.ones(q[0], 1, q[2], kv[2], device="cuda", dtype=torch.bool).tril()
    elif mask == "float":
        options["attn_mask"] = torch.zeros(q[2], kv[2], device="cuda", dtype=inputs[0].dtype)

    def forward(*qkv):
        with sdpa_kernel(getattr(SDPBackend, SHORT[backend])) if backend else nullcontext():
            return torch.nn.functional.scaled_dot_product_attention(*qkv, **options)

    family = FAMILIES[SHORT[backend]] if backend else "?"
    return Case(name, family, with_backward(forward, inputs) if train else lambda: forward(*inputs))


def sdpa_cases():
    d64, d128, long = (4, 16, 1024, 64), (4, 16, 1024, 128), (1, 32, 4096, 128)
    yield sdpa("default_causal", None, long, is_causal=True)
    yield sdpa("default_mask", None, d128, mask="bool")
    yield sdpa("default_train", None, d64, is_causal=True, train=True)
    yield sdpa("default_fp32", None, d64, dtype="float32")
    yield sdpa("default_gqa", None, d128, kv=(4, 4, 1024, 128), enable_gqa=True)
    yield sdpa("default_decode", None, (8, 16, 1, 128), kv=(8, 16, 2048, 128))
    for backend in ("flash", "cudnn", "efficient", "math"):
        yield sdpa(f"{backend}_causal", backend, long, is_causal=True)
        yield sdpa(f"{backend}_train", backend, d64, is_causal=True, train=True)
        yield sdpa(f"{backend}_fp16", backend, d128, dtype="float16")
    yield sdpa("flash_train_128", "flash", d128, train=True)
    yield sdpa("flash_decode", "flash", (2, 16, 1, 128), kv=(2, 16, 4096, 128))
    yield sdpa("flash_dropout", "flash", d64, dropout_p=0.1, train=True)
    yield sdpa("flash_gqa", "flash", d128, kv=(4, 4, 1024, 128), enable_gqa=True, train=True)
    yield sdpa("flash_256", "flash", (2, 8, 1024, 256), is_causal=True)
    yield sdpa("flash_odd_dim", "flash", (2, 8, 1000, 72))
    yield sdpa("cudnn_mask", "cudnn", d128, mask="bool")
    yield sdpa("cudnn_train_128", "cudnn", d128, is_causal=True, train=True)
    yield sdpa("cudnn_decode", "cudnn", (2, 16, 1, 128), kv=(2, 16, 4096, 128))
    yield sdpa("cudnn_256", "cudnn", (2, 8, 1024, 256))
    yield sdpa("efficient_mask_train", "efficient", d64, mask="float", train=True)
    yield sdpa("efficient_fp32_train", "efficient", d64, dtype="float32", train=True)
    yield sdpa("efficient_dropout", "efficient", d64, dropout_p=0.2, train=True)
    yield sdpa("math_mask", "math", d64, mask="bool")
    yield sdpa("math_fp32", "math", d64, dtype="float32")
    yield sdpa("math_dropout_train", "math", d64, dropout_p=0.1, train=True)
    no_shapes = sdpa("flash_no_shapes", "flash", d128, is_causal=True)
    no_shapes.shapes = False
    yield no_shapes
    stack = sdpa("efficient_stack", "efficient", d64)
    stack.stack = True
    yield stack
    yield from ragged_cases()


def ragged_cases():
    import torch
    from torch.nn.attention.varlen import varlen_attn

    def jagged():
        return torch.nested.nested_tensor(
            [torch.randn(n, 16, 64, device="cuda", dtype=torch.bfloat16) for n in (700, 300, 1000)], layout=torch.jagged
        ).transpose(1, 2)

    q, k, v = jagged(), jagged(), jagged()
    yield Case("nested", "?", lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    packed = tensors((2000, 16, 64), (2000, 16, 64), (2000, 16, 64))
    starts = torch.tensor([0, 700, 1000, 2000], device="cuda", dtype=torch.int32)
    yield Case("varlen", "fa2", lambda: varlen_attn(*packed, starts, starts, 1000, 1000))


def by_hand(q, k, v, mask=None, cap=None):
    """As models write it: product, scale, mask, softmax in fp32, product."""
    import torch

    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v)


def eager_cases():
    import torch

    shape = (4, 16, 1024, 64)
    mask = torch.full((1024, 1024), float("-inf"), device="cuda", dtype=torch.bfloat16).triu(1)
    for name, grad, how in (
        ("eager", False, by_hand),
        ("eager_train", True, by_hand),
        ("eager_mask", False, lambda *qkv: by_hand(*qkv, mask=mask)),
        ("eager_mask_train", True, lambda *qkv: by_hand(*qkv, mask=mask)),
        ("eager_softcap", False, lambda *qkv: by_hand(*qkv, cap=50.0)),
        ("eager_einsum", False, einsum),
    ):
        inputs = tensors(shape, shape, shape, grad=grad)
        step = with_backward(how, inputs) if grad else (lambda how=how, inputs=inputs: how(*inputs))
        yield Case(name, "eager", step)
    layer = torch.nn.MultiheadAttention(512, 8, batch_first=True, device="cuda", dtype=torch.bfloat16)
    (x,) = tensors((8, 512, 512))
    yield Case("mha_weights", "eager", lambda: layer(x, x, x))
    yield Case("mha_train", "?", lambda: layer(x, x, x, need_weights=False)[0].sum().backward())
    encoder = torch.nn.TransformerEncoderLayer(512, 8, batch_first=True, device="cuda", dtype=torch.bfloat16).eval()

    def fast_path():
        with torch.no_grad():
            encoder(x)

    yield Case("encoder_fast_path", "?", fast_path)
    yield Case("no_attention", "-", lambda: torch.softmax(x @ x.transpose(1, 2), -1).argmax(-1))
    logits, target = tensors((4096, 8192), grad=True)[0], torch.randint(8192, (4096,), device="cuda")
    yield Case("cross_entropy", "-", lambda: torch.nn.functional.cross_entropy(logits, target).backward())


def einsum(q, k, v):
    import torch

    weights = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5, -1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def captured(step):
    """The step as a CUDA graph: its kernels have no operator on the CPU."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def graph_cases():
    shape = (4, 16, 1024, 64)
    for backend in ("flash", "cudnn", "efficient", "math"):
        case = sdpa(f"graph_{backend}", backend, shape, is_causal=True)
        # Nothing but names is left in a graph, and those of the math path are those of an attention by hand.
        yield Case(case.name, "eager" if backend == "math" else case.families, captured(case.step))
    inputs = tensors(shape, shape, shape)
    yield Case("graph_eager", "eager", captured(lambda: by_hand(*inputs)))


def flex_cases():
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    shape = (2, 16, 1024, 64)
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1024, 1024, device="cuda")
    inputs = tensors(shape, shape, shape)
    yield Case("flex", "flex", lambda: compiled(*inputs))
    trained = tensors(shape, shape, shape, grad=True)
    yield Case("flex_train", "flex", with_backward(lambda *qkv: compiled(*qkv, block_mask=causal), trained))
    one = tensors((2, 16, 1, 64), shape, shape)
    yield Case("flex_decode", "flex", lambda: compiled(*one))
    yield Case("flex_uncompiled", "?", lambda: flex_attention(*inputs, block_mask=causal))


def compiled_cases():
    import torch

    shape = (4, 16, 1024, 64)
    inputs = tensors(shape, shape, shape)
    call = torch.nn.functional.scaled_dot_product_attention
    sdpa_compiled = torch.compile(lambda *qkv: call(*qkv, is_causal=True) * 2)
    yield Case("compiled_sdpa", "?", lambda: sdpa_compiled(*inputs))
    eager_compiled = torch.compile(by_hand)
    yield Case("compiled_eager", "?", lambda: eager_compiled(*inputs))
    capped = torch.compile(lambda *qkv: by_hand(*qkv, cap=50.0))
    yield Case("compiled_softcap", "?", lambda: capped(*inputs))
    trained = tensors(shape, shape, shape, grad=True)
    yield Case("compiled_softcap_train", "?", with_backward(capped, trained))
    graphed = torch.compile(lambda *qkv: call(*qkv, is_causal=True).relu(), mode="reduce-overhead")
    yield Case("compiled_graph", "?", lambda: graphed(*inputs))


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
    """What the reader of traces was not written after."""
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


GROUPS = {"sdpa": sdpa_cases, "eager": eager_cases, "graphs": graph_cases, "flex": flex_cases, "compiled": compiled_cases,
          "models": model_cases, "more": more_cases, "jax": jax_cases, "pallas": pallas_cases}


def profile(case, path):
    import torch
    from torch.profiler import ProfilerActivity

    for _ in range(2):
        case.step()
    torch.cuda.synchronize()
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, record_shapes=case.shapes, with_stack=case.stack) as profiler:
        case.step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(path)


def profile_jax(case, path):
    import jax

    case.step()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            case.step()
        shutil.copy(glob.glob(folder + "/plugins/profile/*/*.trace.json.gz")[0], path)


def without_paths(value):
    """The trace without folders of this machine: of each path its last part is left."""
    if isinstance(value, dict):
        return {key: without_paths(part) for key, part in value.items() if key != "traceName"}
    if isinstance(value, list):
        return [without_paths(part) for part in value]
    return re.sub(r"(?:/[\w.+-]+)+/(?=[\w.+-]+)", "", value) if isinstance(value, str) and "/" in value else value


def tidy(path):
    """Rewrites a trace without paths, and with the same bytes for the same content."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace = without_paths(json.load(file))
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        file.write(json.dumps(trace, separators=(",", ":")).encode())


def run_group(folder, group):
    """Every case that runs; the others leave a line that says why not."""
    cases = GROUPS[group]()
    index = open(os.path.join(folder, group + ".tsv"), "w", encoding="utf-8", buffering=1) if folder else sys.stdout
    while True:
        case = None
        try:
            case = next(cases, None)
            if case is None:
                break
            path = os.path.join(folder or "", case.name + ".json.gz")
            if not folder:
                case.step()
            elif group in ("jax", "pallas"):
                profile_jax(case, path)
            else:
                profile(case, path)
            if folder:
                tidy(path)
            print(case.name, case.families, sep="\t", file=index)
        except Exception as error:  # whatever a release lacks: the other cases matter too
            print(case.name if case else group, f"failed: {type(error).__name__}: {str(error)[:300]!r}", sep="\t", file=index)


def main():
    if len(sys.argv) < 3 or any(group not in GROUPS for group in sys.argv[2:]):
        print(__doc__)
        return 2
    try:
        import torch
    except (ImportError, OSError) as error:
        print(f"which_traces.py: skipped, PyTorch cannot be imported: {error}")
        return 77
    if not torch.cuda.is_available():
        print("which_traces.py: skipped, there is no GPU")
        return 77
    folder = None if sys.argv[1] == "--bare" else sys.argv[1]
    for group in sys.argv[2:]:
        run_group(folder, group)
    return 0


if __name__ == "__main__":
    sys.exit(main())
