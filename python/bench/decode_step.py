# SPDX-License-Identifier: Apache-2.0
"""A whole decode step of a Llama on one GPU: tessera.decode_block() beside PyTorch's compiled step, both as CUDA graphs.

    python python/bench/decode_step.py [--models 1B,8B,small] [--cases 1x1024,1x8192,8x1024] [--steps N] [--json FILE]

A step has one token of each sequence: embedding, layers, norm, logits, greedy choice. All ways use the same random bf16
weights and the same keys, and begin with the same token.

    pytorch      torch.compile() of the whole step, captured in a CUDA graph; keys in static tensors, and
                 scaled_dot_product_attention with a mask on K and V repeated to all heads, as transformers' static cache
                 has it
    enable_gqa   the same without the repetition, by enable_gqa=True
    one launch   the attention block of each layer by decode_block(), the rest compiled as above, in one CUDA graph
    chain        the same with decode_block(way="chain")

Milliseconds of a step, the median of replays between two events. The sequence does not grow from one replay to the next.
`error` is that of the first step's logits beside the same model in fp64, divided by the largest. `same` counts the
tokens until the first that differs from fp64's, over steps in which the sequences grow.
"""
import argparse
import dataclasses
import json
import pathlib
import sys

import torch
import torch.nn.functional as F

import tessera

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench/compare"))
import cuda_graphs  # noqa: E402

PAGE, EPS = 16, 1e-5


@dataclasses.dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    heads_q: int
    heads_kv: int
    head_dim: int
    layers: int
    vocabulary: int


MODELS = {"1B": Shape(2048, 8192, 32, 8, 64, 16, 128256),  # Llama 3.2 1B
          "8B": Shape(4096, 14336, 32, 8, 128, 32, 128256),  # Llama 3.1 8B
          "small": Shape(256, 704, 4, 2, 64, 6, 256)}  # python/tests/data/kjv-llama


class State:
    """Weights, cache and the step's inputs: token int64 [batch] and kv_lengths int32 [batch], keys before the step."""

    def __init__(self, shape, batch, keys, room):
        self.shape, self.batch = shape, batch
        torch.manual_seed(0)
        s, width = shape, shape.heads_q * shape.head_dim

        def weights(*sizes):
            return (torch.randn(sizes, device="cuda", dtype=torch.bfloat16) * sizes[-1] ** -0.5)
        self.embedding, self.head = weights(s.vocabulary, s.hidden) * 8, weights(s.vocabulary, s.hidden)
        self.layers = [dict(norm=1 + weights(s.hidden), w_qkv=weights(width + 2 * s.heads_kv * s.head_dim, s.hidden),
                            w_o=weights(s.hidden, width), norm_2=1 + weights(s.hidden),
                            w_up=weights(2 * s.inner, s.hidden), w_down=weights(s.hidden, s.inner))
                       for _ in range(s.layers)]
        self.norm = 1 + weights(s.hidden)
        self.keys, self.capacity = keys, -(-(keys + room) // 128) * 128
        pages = batch * self.capacity // PAGE
        self.page_table = torch.arange(pages, dtype=torch.int32, device="cuda").view(batch, -1)
        self.cache = torch.randn((s.layers, 2, pages, PAGE, s.heads_kv, s.head_dim), device="cuda", dtype=torch.bfloat16)
        angles = torch.outer(torch.arange(self.capacity, device="cuda").double(),
                             1e4 ** -(torch.arange(s.head_dim // 2, device="cuda").double() / (s.head_dim // 2)))
        self.cos, self.sin = angles.cos().float(), angles.sin().float()
        self.token = torch.zeros(batch, dtype=torch.int64, device="cuda")
        self.kv_lengths = torch.full((batch,), keys - 1, dtype=torch.int32, device="cuda")

    def rewind(self):
        self.token.fill_(1)
        self.kv_lengths.fill_(self.keys - 1)

    def dense(self):
        """K and V of each layer in tensors of their own, [batch, capacity, heads_kv, head_dim]; pages are in order. A
        compiled step that writes to views of one tensor would copy all of it in each layer."""
        layers = self.cache.view(-1, 2, self.batch, self.capacity, self.shape.heads_kv, self.shape.head_dim)
        return [(k.clone(), v.clone()) for k, v in layers]


def rms(x, weights):
    return F.rms_norm(x, (x.shape[-1],), weights, EPS)


def feed_forward(x, t):
    gate, up = F.linear(rms(x, t["norm_2"]), t["w_up"]).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, t["w_down"])


def choose(state, x):
    """(logits, tokens)"""
    logits = F.linear(rms(x, state.norm), state.head)
    return logits, logits.argmax(-1)


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half].to(cos.dtype), x[..., half:].to(cos.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def attention_block(state, layer, x, cached, attend):
    """PyTorch's: x [batch, hidden] -> [batch, hidden]. cached: K and V of the layer, of State.dense(). attend(q, k, v):
    [batch, heads, rows, head_dim]."""
    s, t = state.shape, state.layers[layer]
    qkv = F.linear(rms(x, t["norm"]), t["w_qkv"]).view(state.batch, -1, s.head_dim)
    q, k, v = qkv.split((s.heads_q, s.heads_kv, s.heads_kv), 1)
    cos, sin = state.cos[state.kv_lengths][:, None], state.sin[state.kv_lengths][:, None]
    keys, values = cached
    rows = torch.arange(state.batch, device=x.device)
    keys[rows, state.kv_lengths] = rotated(k, cos, sin)
    values[rows, state.kv_lengths] = v
    o = attend(rotated(q, cos, sin)[:, :, None], keys.transpose(1, 2), values.transpose(1, 2))
    return x + F.linear(o.reshape(state.batch, -1), t["w_o"])


def pytorch_step(state, cached, attend):
    x = state.embedding[state.token]
    for layer, t in enumerate(state.layers):
        x = feed_forward(attention_block(state, layer, x, cached[layer], attend), t)
    return choose(state, x)


def sdpa(state, repeats):
    columns = torch.arange(state.capacity, device="cuda")
    group = state.shape.heads_q // state.shape.heads_kv

    def attend(q, k, v):
        mask = (columns[None] <= state.kv_lengths[:, None])[:, None, None]
        if repeats:
            k, v = (t[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=not repeats)
    return attend


def tessera_step(state, way, mode):
    """decode_block() and the compiled rest."""
    compiled = torch.compile(feed_forward, mode=mode, dynamic=False)
    last = torch.compile(lambda x: choose(state, x), mode=mode, dynamic=False)
    workspace = tessera.DecodeBlockWorkspace()

    def step():
        x = state.embedding[state.token]
        for layer, t in enumerate(state.layers):
            keys, values = state.cache[layer]
            x = tessera.decode_block(x, t["norm"], t["w_qkv"], t["w_o"], keys, values, state.kv_lengths, norm_eps=EPS,
                                     rotary_cos=state.cos, rotary_sin=state.sin, page_table=state.page_table, way=way,
                                     workspace=workspace if way == "one launch" else None)
            x = compiled(x, t)
        return last(x)
    return step


def exact_step(state, keys):
    """The step in fp64. keys: [layers, 2, batch, capacity, heads_kv, head_dim] in fp64, which it appends to."""
    s = state.shape
    x = state.embedding[state.token].double()
    rows = torch.arange(state.batch, device="cuda")
    for layer, t in enumerate(state.layers):
        w = {name: tensor.double() for name, tensor in t.items()}
        q, k, v = F.linear(rms(x, w["norm"]), w["w_qkv"]).view(state.batch, -1, s.head_dim).split(
            (s.heads_q, s.heads_kv, s.heads_kv), 1)
        cos, sin = (c.double()[state.kv_lengths][:, None] for c in (state.cos, state.sin))
        keys[layer, 0][rows, state.kv_lengths], keys[layer, 1][rows, state.kv_lengths] = rotated(k, cos, sin), v
        end = int(state.kv_lengths[0]) + 1
        k, v = (t[:, :end].repeat_interleave(s.heads_q // s.heads_kv, 2) for t in keys[layer])
        weights = torch.einsum("bhd,bkhd->bhk", rotated(q, cos, sin), k) * s.head_dim ** -0.5
        o = torch.einsum("bhk,bkhd->bhd", weights.softmax(-1), v)
        x = feed_forward(x + F.linear(o.reshape(state.batch, -1), w["w_o"]), w)
    logits = F.linear(rms(x, state.norm.double()), state.head.double())
    return logits, logits.argmax(-1)


def texts_of(step, state, count):
    """(logits of the first step, tokens of so many [count, batch]): each token is the next step's input."""
    state.rewind()
    first, found = None, []
    for _ in range(count):
        logits, tokens = step()
        first = logits.double() if first is None else first
        found.append(tokens.clone())
        state.token.copy_(tokens)
        state.kv_lengths += 1
    state.rewind()
    return first, torch.stack(found)


def measure(name, batch, keys, options):
    state = State(MODELS[name], batch, keys, options.steps)
    state.rewind()
    whole = dict(mode=options.mode, dynamic=False, fullgraph=True)
    cached = state.dense()
    steps = {"pytorch": torch.compile(lambda attend=sdpa(state, True): pytorch_step(state, cached, attend), **whole),
             "enable_gqa": torch.compile(lambda attend=sdpa(state, False): pytorch_step(state, cached, attend), **whole),
             "one launch": tessera_step(state, "one launch", options.mode), "chain": tessera_step(state, "chain", options.mode)}
    prefix = state.cache.clone()
    graphs, texts = {}, {}
    for way, step in steps.items():
        if way not in options.ways.split(","):
            continue
        try:
            with torch.no_grad():
                graph, results = cuda_graphs.captured(step)
        except Exception as error:  # a way that cannot run here is named, and the others are measured
            print(f"{name} {batch}x{keys} {way}: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
            continue

        def replayed(graph=graph, results=results):
            graph.replay()
            return results
        graphs[way] = graph
        state.cache.copy_(prefix)
        texts[way] = texts_of(replayed, state, options.steps)
    with torch.no_grad():
        exact = prefix.double().view(len(state.layers), 2, batch, state.capacity, -1, state.shape.head_dim)
        logits, tokens = texts_of(lambda: exact_step(state, exact), state, options.steps)
        del exact
    times = cuda_graphs.times_of(graphs, options.repeat)
    for way, ms in times.items():
        same = int((texts[way][1] == tokens).cumprod(0).sum())
        error = ((texts[way][0] - logits).abs().max() / logits.abs().max()).item()
        row = dict(model=name, batch=batch, keys=keys, way=way, ms=ms, tokens_per_s=batch / ms * 1e3, error=error, same=same,
                   of=batch * options.steps, of_pytorch=times.get("pytorch", float("nan")) / ms,
                   device=torch.cuda.get_device_name(), torch=torch.__version__,
                   commit=options.commit)
        print(f"{name:>6} {batch:>3} x {keys:<6} {way:<11} {ms:8.3f} ms  {row['tokens_per_s']:9.0f} tokens/s  "
              f"x PyTorch {row['of_pytorch']:5.2f}  error {error:.1e}  same {same} of {row['of']}", flush=True)
        if options.json:
            with open(options.json, "a") as out:
                out.write(json.dumps(row) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="1B,small")
    parser.add_argument("--cases", default="1x1024,1x8192,8x1024")
    parser.add_argument("--ways", default="pytorch,enable_gqa,one launch,chain")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=31)
    parser.add_argument("--mode", help="of torch.compile; max-autotune-no-cudagraphs takes minutes")
    parser.add_argument("--json")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    for name in options.models.split(","):
        for case in options.cases.split(","):
            measure(name, *(int(n) for n in case.split("x")), options)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
