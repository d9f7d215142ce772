# SPDX-License-Identifier: Apache-2.0
"""Whole models of transformers with random weights: attn_implementation="tessera" beside another in one process.

    python python/bench/models.py [--models llama,bert] [--ways eager,compiled] [--batches plain,padded,packed]
        [--passes forward,train] [--size small|large] [--layers N] [--batch N] [--length N] [--rounds N] [--json]
        [--out rows.jsonl]

The peer is "sdpa", and "eager" for Gemma-2 and gpt-oss, which transformers does not run by "sdpa".
Rows: model, way (compiled: torch.compile(fullgraph=True)) and batch. plain: rows of equal length. padded: lengths
between half and all of a row, on the side where the model's tokenizer pads, with an attention_mask. packed: documents
in one row, by position_ids, exponential lengths with a mean of an eighth of a row; "as rows" is the peer on such
documents as padded rows, and "varlen" is flash-attention's way: PyTorch's own FlashAttention-2 on the documents'
offsets (varlen_attn; Llama and Qwen3, eager, CUDA). Thousands of tokens a second count no padding. Medians of rounds in which the implementations
take turns; memory is the peak of a round in MiB (CUDA only). `form` is what the first attention call of a step (in the
compiled graph, where there is one) was: causal, window, ragged, bias, or full.
"""
import argparse
import inspect
import json
import statistics
import time

import torch
import transformers

import tessera.transformers

CAUSAL = {"llama": "Llama", "gemma2": "Gemma2", "mistral": "Mistral", "qwen3": "Qwen3", "gpt_oss": "GptOss"}
MODELS = (*CAUSAL, "bert", "vit")
WITHOUT_SDPA = ("gemma2", "gpt_oss")
VARLEN = ("llama", "qwen3")  # causal layers without a window or a softcap
COLUMNS = (("model", 8), ("way", 9), ("batch", 7), ("pass", 8), ("form", 20), ("ktok/s", 9), ("peer", 9), ("ratio", 6),
           ("MiB", 8), ("peer", 8), ("as rows", 9), ("varlen", 9))


def sizes(options):
    large = options.size == "large"
    hidden, heads, kv_heads, dim = (2048, 16, 4, 128) if large else (64, 4, 2, 16)
    return dict(hidden_size=hidden, intermediate_size=4 * hidden if large else 128, num_attention_heads=heads,
                num_hidden_layers=options.layers, vocab_size=8192 if large else 128), kv_heads, dim


def model_of(name, attention, options, device, dtype):
    common, kv_heads, dim = sizes(options)
    window = options.length // 4
    torch.manual_seed(0)
    if name == "vit":
        side = max(int(options.length ** 0.5), 2)
        config = transformers.ViTConfig(**{k: v for k, v in common.items() if k != "vocab_size"}, image_size=16 * side,
                                        patch_size=16, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
        kind = transformers.ViTForImageClassification
    elif name == "bert":
        config = transformers.BertConfig(**common, max_position_embeddings=options.length,
                                         attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
        kind = transformers.BertForMaskedLM
    else:
        family = CAUSAL[name]
        own = {"mistral": dict(sliding_window=window),
               "gemma2": dict(sliding_window=window, attn_logit_softcapping=50.0),
               "gpt_oss": dict(sliding_window=window, num_local_experts=2, num_experts_per_tok=1)}.get(name, {})
        config = getattr(transformers, f"{family}Config")(
            **common, num_key_value_heads=kv_heads, head_dim=dim, max_position_embeddings=16 * options.length,
            pad_token_id=0, **own)
        kind = getattr(transformers, f"{family}ForCausalLM")
    config._attn_implementation = attention
    return kind(config).to(device=device, dtype=dtype).train()


def document_lengths(total, mean):
    generator, lengths = torch.Generator().manual_seed(1), []
    while sum(lengths) < total:
        drawn = int(torch.empty(()).exponential_(1 / mean, generator=generator)) + 2
        lengths.append(min(drawn, total - sum(lengths)))
    return [length for length in lengths if length > 0]


def padded_rows(ids, lengths, left):
    """The model's arguments for rows of ids [batch, len] of which so many tokens count."""
    index, lengths = torch.arange(ids.shape[1]), torch.tensor(lengths)[:, None]
    mask = (index >= ids.shape[1] - lengths) if left else (index < lengths)
    mask = mask.to(ids.device)
    return dict(input_ids=ids * mask, attention_mask=mask.long(), labels=torch.where(mask, ids, -100))


def batch_of(kind, name, options, device, dtype):
    """(arguments of the model, tokens that count), and for packed documents the same as padded rows."""
    rows, length = options.batch, options.length
    generator = torch.Generator().manual_seed(2)
    if name == "vit":
        side = 16 * max(int(length ** 0.5), 2)
        pixels = torch.randn(rows, 3, side, side, generator=generator).to(device, dtype)
        return dict(pixel_values=pixels, labels=torch.zeros(rows, dtype=torch.long, device=device)), rows * length, None
    ids = torch.randint(1, 100, (rows, length), generator=generator).to(device)
    cache = dict(use_cache=False) if name in CAUSAL else {}
    if kind == "plain":
        return dict(input_ids=ids, labels=ids, **cache), ids.numel(), None
    if kind == "padded":
        lengths = [length - (i * length // 2) // max(rows - 1, 1) for i in range(rows)]
        return dict(padded_rows(ids, lengths, name in CAUSAL), **cache), sum(lengths), None
    lengths = document_lengths(ids.numel(), max(length // 8, 4))
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    packed = dict(input_ids=ids.reshape(1, -1), labels=ids.reshape(1, -1), position_ids=positions, **cache)
    longest = max(lengths)
    alone = torch.randint(1, 100, (len(lengths), longest), generator=generator).to(device)
    return packed, ids.numel(), dict(padded_rows(alone, lengths, True), **cache)


def register_varlen():
    """Registers attn_implementation="varlen": PyTorch's varlen_attn on offsets of documents. False where it has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    takes = inspect.signature(varlen_attn).parameters
    options = dict(window_size=(-1, 0)) if "window_size" in takes else dict(is_causal=True)
    if "enable_gqa" in takes:
        options["enable_gqa"] = True

    def layer(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, cu_seq_lens_k=None,
              max_length_q=None, max_length_k=None, **_):
        if scaling is not None and abs(scaling * query.shape[-1] ** 0.5 - 1) > 1e-6:
            raise ValueError(f"scaling: expected 1 / sqrt(head_dim), got {scaling}")
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [tokens, heads, head_dim]
        if "enable_gqa" not in takes:
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        return varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, **options)[None], None

    transformers.AttentionInterface.register("varlen", layer)
    transformers.AttentionMaskInterface.register("varlen", lambda *args, **keywords: None)
    return True


def offsets_of(positions):
    """The keywords by which transformers calls flash-attention on packed documents, from position_ids [1, tokens]."""
    starts = (positions[0] == 0).nonzero().flatten().to(torch.int32)
    offsets = torch.cat((starts, starts.new_tensor([positions.shape[1]])))
    longest = int(offsets.diff().max())
    return dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=longest, max_length_k=longest)


def form_of(schema, args, kwargs):
    """The form of attention that a call of a tessera operator computes; "" for other operators and backward passes."""
    if not schema.name.startswith("tessera::") or "backward" in schema.name:
        return ""
    given = {a.name: a.default_value for a in schema.arguments}
    given.update(zip(given, args), **kwargs)
    words = [word for word, there in (("causal", given["causal"]), ("window", given["window_left"] >= 0),
                                      ("ragged", given.get("cu_seqlens_q") is not None),
                                      ("bias", given.get("bias") is not None)) if there]
    return "+".join(words) or "full"


class EagerForm(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the form of the first attention call of tessera."""
    found = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found = self.found or form_of(func._schema, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class CompiledForm:
    """torch.compile's own backend; it also records the form of the first attention call in the graph compiled last."""
    found = ""

    def __call__(self, graph, inputs):
        calls = ((node.target._schema, node.args, node.kwargs) for node in graph.graph.nodes
                 if hasattr(node.target, "_schema"))
        self.found = next(filter(None, (form_of(*call) for call in calls)), "")
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)


def step(model, arguments, kind):
    if kind == "forward":
        with torch.no_grad():
            model(**arguments)
        return
    model(**arguments).loss.backward()
    model.zero_grad(set_to_none=True)


def measured(steps, device, rounds):
    """Name -> (median seconds, peak bytes): the steps take turns. One of other batches or functions is left out if the
    GPU has too little memory for it."""
    cuda = device == "cuda"
    seconds, peaks = {name: [] for name in steps}, {}
    for turn in range(rounds + 2):  # the first two compile and warm up
        for name, run in list(steps.items()):
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            try:
                run()
            except torch.OutOfMemoryError:
                if name in ("tessera", "peer"):
                    raise
                del steps[name], seconds[name]
                continue
            if cuda:
                torch.cuda.synchronize()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - begin)
                peaks[name] = torch.cuda.max_memory_allocated() if cuda else 0
    return {name: (statistics.median(times), peaks[name]) for name, times in seconds.items()}


def rows_of(name, way, options, device, dtype):
    peer = "eager" if name in WITHOUT_SDPA else "sdpa"
    models = {who: model_of(name, attention, options, device, dtype)
              for who, attention in (("tessera", "tessera"), ("peer", peer))}
    for kind in options.batches:
        if name == "vit" and kind != "plain" or name in ("bert", "gpt_oss") and kind == "packed":
            continue  # transformers infers documents for neither
        arguments, tokens, alone = batch_of(kind, name, options, device, dtype)
        torch._dynamo.reset()
        form = CompiledForm() if way == "compiled" else EagerForm()
        runs = models
        if way == "compiled":
            backends = dict(tessera=form, peer="inductor")
            runs = {a: torch.compile(m, fullgraph=True, dynamic=False, backend=backends[a]) for a, m in models.items()}
        else:
            with torch.no_grad(), form:
                models["tessera"](**arguments)
        for passes in options.passes:
            steps = {a: lambda m=m: step(m, arguments, passes) for a, m in runs.items()}
            if alone is not None and way == "eager":
                steps["as rows"] = lambda: step(runs["peer"], alone, passes)
                if name in VARLEN and device == "cuda" and register_varlen():
                    varlen = model_of(name, "varlen", options, device, dtype)
                    offsets = offsets_of(arguments["position_ids"])
                    steps["varlen"] = lambda: step(varlen, {**arguments, **offsets}, passes)
            found = measured(steps, device, options.rounds)
            rate = {a: tokens / 1e3 / seconds for a, (seconds, _) in found.items()}
            yield dict(model=name, way=way, batch=kind, passes=passes, form=form.found, tokens=tokens,
                       rate=rate, ratio=rate["tessera"] / rate["peer"],
                       mib={a: round(peak / 2**20) for a, (_, peak) in found.items()})


def shown(row):
    others = (row["rate"].get(who) for who in ("as rows", "varlen"))
    return (row["model"], row["way"], row["batch"], row["passes"], row["form"], f"{row['rate']['tessera']:.1f}",
            f"{row['rate']['peer']:.1f}", f"{row['ratio']:.2f}", row["mib"]["tessera"] or "-",
            row["mib"]["peer"] or "-", *("-" if rate is None else f"{rate:.1f}" for rate in others))


def line(cells):
    return " ".join(f"{cell:<{width}}" if i < 5 else f"{cell:>{width}}"
                    for i, (cell, (_, width)) in enumerate(zip(cells, COLUMNS)))


def options_of(arguments=None):
    def names(allowed):
        def parse(text):
            given = text.split(",")
            for name in given:
                if name not in allowed:
                    raise argparse.ArgumentTypeError(f"expected some of {','.join(allowed)}, got {name!r}")
            return given
        return parse
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names(MODELS), default=list(MODELS))
    parser.add_argument("--ways", type=names(("eager", "compiled")), default=["eager", "compiled"])
    parser.add_argument("--batches", type=names(("plain", "padded", "packed")), default=["plain", "padded", "packed"])
    parser.add_argument("--passes", type=names(("forward", "train")), default=["forward", "train"])
    parser.add_argument("--size", choices=("small", "large"), help="default: large on CUDA, small on the CPU")
    for name, meaning in (("layers", "default: 6, small 2"), ("batch", "rows; default: 8, small 3"),
                          ("length", "tokens of a row; default: 2048, small 64"), ("rounds", "default: 10, small 2")):
        parser.add_argument(f"--{name}", type=int, help=meaning)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--out", help="append the rows (JSON lines) to this file")
    options = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    options.size = options.size or ("large" if cuda else "small")
    defaults = (6, 8, 2048, 10) if options.size == "large" else (2, 3, 64, 2)
    for name, default in zip(("layers", "batch", "length", "rounds"), defaults):
        given = getattr(options, name)
        if given is not None and given < 1:
            parser.error(f"--{name}: expected an integer from 1 on, got {given}")
        setattr(options, name, default if given is None else given)
    return options


def main():
    options = options_of()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tessera.transformers.register()
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    found = []
    common = dict(torch=torch.__version__, transformers=transformers.__version__, device=where, layers=options.layers,
                  rows=options.batch, length=options.length)
    if not options.json:
        print(f"PyTorch {torch.__version__}, transformers {transformers.__version__}, {where}, {dtype}",
              f"{options.layers} layers, {options.batch} x {options.length} tokens", line([name for name, _ in COLUMNS]), sep="\n")
    for name in options.models:
        for way in options.ways:
            for row in rows_of(name, way, options, device, dtype):
                found.append(row)
                if not options.json:
                    print(line(shown(row)), flush=True)
                if options.out:
                    with open(options.out, "a") as out:
                        out.write(json.dumps({**row, **common}) + "\n")
    if options.json:
        print(json.dumps({**common, "batch": options.batch, "rows": found}))


if __name__ == "__main__":
    main()
