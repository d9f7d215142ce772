#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the attention block of a decode step on a GPU: decode_block() as one launch, its chain of kernels, and PyTorch's.

    python3 bench/compare/cuda_decode_block.py build/src/libtessera.so [--fa3] [--models 1B,8B] [--out records.jsonl]
        [--commit HASH]

A figure is the median time of a CUDA graph of all layers, divided by their number, in microseconds. Each layer has weights
and a cache of its own, the output of one is the input of the next, and together they are larger than the L2. The share
in brackets is that of the floor: the bytes of weights, K and V at the speed of the read probe of the same run (the sum of
4 GiB of floats). `early` is the one launch with early_weights. PyTorch's chain is F.rms_norm, F.linear, FlashAttention-3's
one call that applies the rotary embedding, appends and attends (--fa3: the package `fa3-fwd`), and addmm for the output
and the residual. The results of the one launch are compared with the chain's bit by bit before timing, and PyTorch's to
2 % of the largest.
"""
import argparse
import ctypes
import datetime
import json
import pathlib

import torch
import torch.nn.functional as F

import abi
import cuda_decode
import cuda_graphs
import torch_cuda

HEADER = pathlib.Path(__file__).parents[2] / "include/tessera/decode_block.h"
Problem = abi.struct_of("tessera_decode_block_problem", HEADER)
Args = abi.struct_of("tessera_decode_block_args", HEADER)
PAGE = 16
MODELS = {  # hidden, heads_q, heads_kv, head_dim, layers, QK norm
    "1B": (2048, 32, 8, 64, 16, False), "8B": (4096, 32, 8, 128, 8, False), "Qwen3-0.6B": (1024, 16, 8, 128, 28, True)}
CASES = [("1B", 1, 1024), ("1B", 1, 8192), ("1B", 8, 1024), ("8B", 1, 1024), ("8B", 1, 8192), ("8B", 8, 1024),
         ("Qwen3-0.6B", 1, 1024)]
WAYS = {"one launch": (1, 0), "early": (1, 1), "chain": (2, 0)}  # TESSERA_ONE_LAUNCH, TESSERA_CHAIN; early_weights


class Info(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("workspace_bytes", ctypes.c_size_t), ("counter_bytes", ctypes.c_size_t),
                ("attention", ctypes.c_char_p), ("way", ctypes.c_int32), ("threads", ctypes.c_int32),
                ("refused", ctypes.c_char * 500)]


def view(t):
    pad = [0] * (4 - t.dim())
    dtype = abi.DTYPES[t.dtype]
    return abi.Tensor(t.data_ptr(), dtype, t.dim(), (ctypes.c_int64 * 4)(*t.shape, *pad),
                      (ctypes.c_int64 * 4)(*t.stride(), *pad), 1, t.device.index)


class Blocks:
    """decode_block() for the layers of a model by the C ABI."""

    def __init__(self, lib, fields, way, layers):
        self.lib, (self.way, early) = lib, WAYS[way]
        self.problem = Problem()
        lib.check(lib.lib.tessera_decode_block_problem_init(ctypes.byref(self.problem), ctypes.sizeof(self.problem)))
        for name, value in {**fields, "way": self.way, "early_weights": early}.items():
            setattr(self.problem, name, value)
        self.options = abi.Options(struct_size=ctypes.sizeof(abi.Options))
        info = Info(struct_size=ctypes.sizeof(Info))
        lib.check(lib.lib.tessera_decode_block_query(ctypes.byref(self.problem), ctypes.byref(self.options), 1, 0,
                                                     ctypes.byref(info)))
        self.bytes = info.workspace_bytes
        self.workspace = torch.zeros(self.bytes, dtype=torch.uint8, device="cuda")
        self.args = [Args(struct_size=ctypes.sizeof(Args), **{n: view(t) for n, t in layer.items()}) for layer in layers]

    def __call__(self):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        for args in self.args:
            self.lib.check(self.lib.lib.tessera_decode_block(
                ctypes.byref(self.problem), ctypes.byref(self.options), ctypes.byref(args),
                ctypes.c_void_p(self.workspace.data_ptr()), ctypes.c_size_t(self.bytes), stream))


def layers_of(model, batch, keys):
    """The fields of the Problem, and the tensors of each layer: `keys` with the new one."""
    hidden, heads_q, heads_kv, dim, layers, norm = MODELS[model]
    fields = {"batch": batch, "hidden": hidden, "heads_q": heads_q, "heads_kv": heads_kv, "head_dim": dim, "capacity": keys,
              "page_size": PAGE, "rotary_dim": dim, "qk_norm": int(norm), "norm_eps": 1e-5}
    new = lambda *shape, by=1.0: (torch.randn(*shape, device="cuda") * by).bfloat16()
    angles = torch.outer(torch.arange(keys, device="cuda").float(),
                         10000.0 ** -(torch.arange(dim // 2, device="cuda") / (dim // 2)))
    rotary = {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}
    pages, made, x = batch * keys // PAGE, [], new(batch, hidden)
    for _ in range(layers):
        layer = {"x": x, "norm": 1 + new(hidden, by=0.1), **rotary,
                 "w_qkv": new((heads_q + 2 * heads_kv) * dim, hidden, by=hidden ** -0.5),
                 "w_o": new(hidden, heads_q * dim, by=(heads_q * dim) ** -0.5),
                 "k_cache": new(pages, PAGE, heads_kv, dim), "v_cache": new(pages, PAGE, heads_kv, dim),
                 "kv_lengths": torch.full((batch,), keys - 1, dtype=torch.int32, device="cuda"),
                 "page_table": torch.randperm(pages, device="cuda").int().view(batch, -1),
                 "out": torch.empty(batch, hidden, device="cuda", dtype=torch.bfloat16)}
        if norm: layer |= {"q_norm": 1 + new(dim, by=0.1), "k_norm": 1 + new(dim, by=0.1)}
        made.append(layer)
        x = layer["out"]
    return fields, made


def torch_chain(fields, layers):
    """PyTorch's chain. `fa3-fwd` was built without pages, so each sequence has a contiguous cache with the same keys."""
    import fa3_fwd._C  # noqa: F401  (registers torch.ops.fa3_fwd)
    hidden, heads_q, heads_kv, dim = (fields[n] for n in ("hidden", "heads_q", "heads_kv", "head_dim"))
    caches = [[t[name][t["page_table"].long()].flatten(1, 2) for name in ("k_cache", "v_cache")] for t in layers]

    def call():
        x = layers[0]["x"]
        for t, (k_cache, v_cache) in zip(layers, caches):
            qkv = F.linear(F.rms_norm(x, (hidden,), t["norm"], 1e-5), t["w_qkv"]).view(-1, 1, heads_q + 2 * heads_kv, dim)
            q, k, v = qkv.split((heads_q, heads_kv, heads_kv), 2)
            if fields["qk_norm"]: q, k = F.rms_norm(q, (dim,), t["q_norm"], 1e-5), F.rms_norm(k, (dim,), t["k_norm"], 1e-5)
            o = torch.ops.fa3_fwd.fwd(q, k_cache, v_cache, k_new=k, v_new=v, seqused_k=t["kv_lengths"],
                                      rotary_cos=t["rotary_cos"], rotary_sin=t["rotary_sin"], is_rotary_interleaved=False,
                                      is_causal=True)
            o = o[0] if isinstance(o, (tuple, list)) else o
            x = torch.addmm(x, o.reshape(x.shape[0], heads_q * dim), t["w_o"].T)
        return x
    return call


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--fa3", action="store_true", help="PyTorch's chain with FlashAttention-3 by the package fa3-fwd")
    parser.add_argument("--repeat", type=int, default=31)
    parser.add_argument("--out")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    lib = abi.Library(options.library)
    speed = cuda_decode.probe()
    columns = [*WAYS, "torch + fa3"] if options.fa3 else [*WAYS]
    print(f"{torch.cuda.get_device_name()}, read probe {speed:.0f} GB/s; us a block (share of the floor)")
    print(f"{'model':>11} {'batch x keys':>13} {'floor':>7}" + "".join(f"{name:>16}" for name in columns))
    for model, batch, keys in CASES:
        if model not in options.models.split(","): continue
        torch.cuda.empty_cache()
        fields, layers = layers_of(model, batch, keys)
        results, graphs, keep = {}, {}, []
        for way in WAYS:
            try:
                call = Blocks(lib, fields, way, layers)
                graphs[way], _ = cuda_graphs.captured(call)
            except RuntimeError as error:
                print(f"{way}: {str(error).splitlines()[0]}")
                continue
            keep.append(call)
            graphs[way].replay()
            results[way] = layers[-1]["out"].clone()
        if options.fa3:
            graphs["torch + fa3"], results["torch + fa3"] = cuda_graphs.captured(torch_chain(fields, layers))
            graphs["torch + fa3"].replay()
        right = results["chain"]
        for name, result in results.items():
            error = ((result.float() - right.float()).abs().max() / right.float().abs().max()).item()
            if not error <= (0.02 if name.startswith("torch") else 0): print(f"WRONG {name}: {error}")
        size = 2 * (layers[0]["w_qkv"].numel() + layers[0]["w_o"].numel())
        size += batch * keys * fields["heads_kv"] * fields["head_dim"] * 4
        floor = size / speed * 1e-3
        line = f"{model:>11} {batch:>4} x {keys:<6} {floor:7.2f}"
        for name in columns:
            if name not in graphs:
                line += " " * 15 + "-"
                continue
            us = cuda_graphs.times_of({name: graphs[name]}, options.repeat)[name] * 1e3 / len(layers)
            line += f"{us:9.2f} ({floor / us:4.2f})"
            if options.out:
                record = {"what": "measured", "pass": "decode block", "by": "torch" if name.startswith("torch") else "tessera",
                          "way": name, "dtype": "bf16", "model": model, "keys": keys, "page_size": PAGE, "layers": len(layers),
                          **{n: fields[n] for n in ("batch", "hidden", "heads_q", "heads_kv", "head_dim", "qk_norm")},
                          "us": us, "floor_us": floor, "bytes": size, "probe_gb_per_s": speed,
                          "device": torch.cuda.get_device_name(), "clock_mhz": int(torch_cuda.query("clocks.sm") or 0),
                          "versions": {"tessera": lib.version(), "torch": torch.__version__,
                                       "driver": torch_cuda.query("driver_version")},
                          "date": datetime.date.today().isoformat(), "commit": options.commit}
                with open(options.out, "a") as out:
                    out.write(json.dumps(record) + "\n")
        print(line, flush=True)


if __name__ == "__main__":
    main()
