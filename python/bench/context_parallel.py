# SPDX-License-Identifier: Apache-2.0
"""Context parallelism beside one GPU and beside PyTorch's context_parallel, on the GPUs of one host.

    torchrun --nproc-per-node 4 python/bench/context_parallel.py [--rows 2048 8192 32768] [--heads 32/8] [--steps N]

Milliseconds by CUDA events, the median of 5 runs of 4 to 50 calls in a row, of the slowest rank; the runs of one GPU
and of all take turns. `share` is the time of one GPU for the whole sequence, divided by the number of ranks and by the
time here: 1 would be perfect. Rank 0 measures the one GPU. With --graph both are measured as CUDA graphs too, which
leave out what the host takes. The columns of PyTorch are its time, for the same numbers in [batch, heads, rows,
head_dim] with K and V repeated to all heads, and its share of tessera on one GPU. "documents" are packed, with drawn
lengths whose mean is a quarter of a shard. O and LSE are compared with one GPU's bits first.

With --device cpu and gloo it runs anywhere and says nothing about speed.
"""
import argparse
import contextlib
import json
import math
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as functional

import tessera.torch as tt

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench/compare"))
import cuda_graphs  # noqa: E402

RUNS, LEAST_MS, HEAD_DIM = 5, 20, 128


def timed(function, calls, device):
    """Milliseconds of one of so many calls in a row on this rank."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / calls
    start = time.monotonic()
    for _ in range(calls):
        function()
    return (time.monotonic() - start) * 1e3 / calls


def milliseconds(functions, device):
    """The median time of one call of each function, of the slowest rank. The functions take turns, since a GPU that has
    worked for long runs at a lower clock."""
    taken = [[] for _ in functions]
    for run in range(RUNS + 1):  # the first one warms up, and says how many calls last long enough
        for times, function in zip(taken, functions):
            calls = 4 if not run else max(4, min(50, math.ceil(LEAST_MS / times[0])))
            dist.barrier()
            slowest = torch.tensor([timed(function, calls, device)], device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times.append(float(slowest))
    return [statistics.median(times[1:]) for times in taken]


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


@contextlib.contextmanager
def pytorchs(mesh, whole, d_o, backward):
    """A context with a function that runs PyTorch's context_parallel on this rank's rows, which PyTorch chooses. Its ring
    takes as many heads of K and V as of Q."""
    from torch.distributed.tensor.experimental import context_parallel
    heads = whole[0].shape[2]
    turned = [t.detach().repeat_interleave(heads // t.shape[2], 2).transpose(1, 2).contiguous() for t in whole]
    d_o = d_o.transpose(1, 2).contiguous()
    with context_parallel(mesh, buffers=turned, buffer_seq_dims=[2] * 3):
        own = [t.detach().requires_grad_(backward) for t in turned]

        def run():
            for t in own:
                t.grad = None
            o = functional.scaled_dot_product_attention(*own, is_causal=True)
            if backward:
                o.backward(d_o)
        yield run


def measure(rows, heads, documents, options, device, mesh, graph):
    ranks = dist.get_world_size()
    total, dtype = rows * ranks, torch.bfloat16
    generator = torch.Generator(device).manual_seed(1)
    whole = [torch.randn(1, total, h, HEAD_DIM, device=device, dtype=dtype, generator=generator)
             for h in (heads[0], heads[1], heads[1], heads[0])]
    offsets = lengths_of(total, rows / 4) if documents else None
    order = tt.balance_documents(offsets, ranks, total=total) if documents else "zigzag"
    cu = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    on_device, longest = (None, 0) if cu is None else (cu.to(device), int(cu.diff().max()))

    def one(q, k, v):
        if cu is None:
            return tt.attention(q, k, v, causal="bottom-right", return_lse=True)
        o, lse = tt.varlen_attention(q[0], k[0], v[0], on_device, on_device, max_len_q=longest, max_len_kv=longest,
                                     causal="bottom-right", return_lse=True)
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
            alone = of_one if dist.get_rank() == 0 else lambda: None
            time_one, time_all = milliseconds([alone, of_all], device)
            found[name] = {"one": round(time_one, 3), "here": round(time_all, 3),
                           "share": round(time_one / ranks / time_all, 3)}
            if graph and device.type == "cuda":
                replays = [cuda_graphs.captured(of_one)[0].replay if dist.get_rank() == 0 else alone,
                           cuda_graphs.captured(of_all)[0].replay]
                time_one, time_all = milliseconds(replays, device)
                found[name].update(graph_one=round(time_one, 3), graph=round(time_all, 3),
                                   graph_share=round(time_one / ranks / time_all, 3))
        if not documents and mesh is not None:
            with pytorchs(mesh, whole[:3], own[3], backward) as theirs:
                other, = milliseconds([theirs], device)
            found[name].update(pytorch=round(other, 3), pytorch_share=round(time_one / ranks / other, 3))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 8192, 32768], help="rows of each rank")
    parser.add_argument("--heads", nargs="+", default=["32/8", "64/8", "16/16"], help="query heads/key heads")
    parser.add_argument("--steps", type=int, help="groups of key heads; default: the library's choice")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--without-pytorch", action="store_true", help="leave PyTorch's context_parallel out")
    parser.add_argument("--graph", action="store_true", help="measure the calls in a CUDA graph too")
    parser.add_argument("--without-documents", action="store_true", help="measure the dense sequence alone")
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
            for documents in ((False,) if options.without_documents else (False, True)):
                found = measure(rows, [int(n) for n in heads.split("/")], documents,
                                {"steps": options.steps} if options.steps else {}, device, mesh, options.graph)
                if dist.get_rank() == 0:
                    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
