# SPDX-License-Identifier: Apache-2.0
"""Context parallelism beside one GPU and beside PyTorch's context_parallel, on the GPUs of one host.

    torchrun --nproc-per-node 4 python/bench/context_parallel.py [--rows 2048 8192 32768] [--heads 32/8] [--steps N]

Milliseconds by CUDA events, the least of 5 runs of 4 calls, of the slowest rank. `share` is the time of one GPU for the
whole sequence, divided by the number of ranks and by the time here: 1 would be perfect. Rank 0 measures the one GPU. The
columns of PyTorch are its time, for the same tensors in [batch, heads, rows, head_dim] and zig-zag, and its share of
tessera on one GPU. "documents" are packed, with drawn lengths whose mean is a quarter of a shard. O and LSE are compared
with one GPU's bits first.

With --device cpu and gloo it runs anywhere and says nothing about speed.
"""
import argparse
import contextlib
import json
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as functional

import tessera.torch as tt

RUNS, CALLS, HEAD_DIM = 5, 4, 128


def milliseconds(function, device):
    """The time of one call: the least of RUNS, and of the slowest rank."""
    least = float("inf")
    for run in range(RUNS + 1):  # the first one warms up
        dist.barrier()
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(CALLS):
                function()
            end.record()
            end.synchronize()
            taken = begin.elapsed_time(end) / CALLS
        else:
            start = time.monotonic()
            for _ in range(CALLS):
                function()
            taken = (time.monotonic() - start) * 1e3 / CALLS
        slowest = torch.tensor([taken], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if run:
            least = min(least, float(slowest))
    return least


def alone(function, device):
    """milliseconds() of rank 0; the other ranks wait."""
    return milliseconds(function if dist.get_rank() == 0 else lambda: None, device)


def lengths_of(total, mean, seed=0):
    """Offsets of drawn documents, [documents + 1]."""
    generator = torch.Generator().manual_seed(seed)
    offsets = [0]
    while offsets[-1] < total:
        length = int(torch.empty(1).exponential_(1 / mean, generator=generator)) + 1
        offsets.append(min(total, offsets[-1] + length))
    return offsets


def with_gradients(call, tensors, d_o):
    def both():
        for t in tensors:
            t.grad = None
        call(*tensors)[0].backward(d_o)
    return both


def without_gradients(call, tensors, d_o):
    return lambda: call(*tensors)


def pytorchs(mesh, tensors, d_o, backward):
    """A function that runs PyTorch's context_parallel on this rank's rows."""
    from torch.distributed.tensor.experimental import context_parallel
    turned = [t.detach().transpose(1, 2).contiguous().requires_grad_(backward) for t in tensors]
    d_o = d_o.transpose(1, 2).contiguous()

    def run():
        with context_parallel(mesh):
            o = functional.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)
            if backward:
                o.backward(d_o)
    return run


def measure(rows, heads, documents, options, device, mesh):
    ranks = dist.get_world_size()
    total, dtype = rows * ranks, torch.bfloat16
    generator = torch.Generator(device).manual_seed(1)
    whole = [torch.randn(1, total, h, HEAD_DIM, device=device, dtype=dtype, generator=generator)
             for h in (heads[0], heads[1], heads[1], heads[0])]
    offsets = lengths_of(total, rows / 4) if documents else None
    order = tt.balance_documents(offsets, ranks, total=total) if documents else "zigzag"
    cu = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)

    def one(q, k, v):
        if cu is None:
            return tt.attention(q, k, v, causal="bottom-right", return_lse=True)
        on_device = cu.to(device)
        o, lse = tt.varlen_attention(q[0], k[0], v[0], on_device, on_device, causal="bottom-right", return_lse=True)
        return o[None], lse[None]

    def spread(q, k, v):
        return tt.context_parallel_attention(q, k, v, order=order, causal=True, cu_seqlens=cu, return_lse=True, **options)
    own = [tt.shard_sequence(t, order=order) for t in whole]
    found = {"rows": rows, "ranks": ranks, "heads": "/".join(map(str, heads)), "documents": documents}
    with torch.no_grad():
        want = one(*whole[:3])
        got = spread(*own[:3])
        found["same bits"] = all(torch.equal(g, tt.shard_sequence(w, dim=dim, order=order))
                                 for g, w, dim in zip(got, want, (1, 2)))
        del want, got
    for name in ("forward", "both"):
        backward = name == "both"
        tensors = [t.clone().requires_grad_(backward) for t in whole[:3]]
        parts = [t.clone().requires_grad_(backward) for t in own[:3]]
        with contextlib.nullcontext() if backward else torch.no_grad():
            make = with_gradients if backward else without_gradients
            of_one, of_all = make(one, tensors, whole[3]), make(spread, parts, own[3])
            time_one, time_all = alone(of_one, device), milliseconds(of_all, device)
            found[name] = {"one": round(time_one, 3), "here": round(time_all, 3),
                           "share": round(time_one / ranks / time_all, 3)}
            if not documents and mesh is not None:
                other = milliseconds(pytorchs(mesh, own[:3], own[3], backward), device)
                found[name].update(pytorch=round(other, 3), pytorch_share=round(time_one / ranks / other, 3))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 8192, 32768], help="rows of each rank")
    parser.add_argument("--heads", nargs="+", default=["32/8", "64/8", "16/16"], help="query heads/key heads")
    parser.add_argument("--steps", type=int, help="groups of key heads; default: the library's choice")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--without-pytorch", action="store_true", help="leave PyTorch's context_parallel out")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = None
    if not options.without_pytorch:
        mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for heads in options.heads:
        for rows in options.rows:
            for documents in (False, True):
                found = measure(rows, [int(n) for n in heads.split("/")], documents,
                                {"steps": options.steps} if options.steps else {}, device, mesh)
                if dist.get_rank() == 0:
                    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
