# SPDX-License-Identifier: Apache-2.0
"""Context parallelism over NCCL, one process for each GPU of a host:

    torchrun --nproc-per-node 2 python/tests/context_parallel_on_gpus.py [CASE...]

Prints a line for each case, from rank 0, and exits with 1 if one failed on any rank. The last cases wait for a rank
that does not come and end a process. pytest does not collect this file, since it needs several GPUs."""
import datetime
import os
import pathlib
import sys
import time
import traceback
import warnings

import torch
import torch.distributed as dist

import tessera.torch as tt
import torch_reference as reference

sys.argv, NAMED = sys.argv[:1], sys.argv[1:]  # context_parallel_support reads a folder from the arguments
from context_parallel_support import NAMES, both_passes, raises, reversed_chunks  # noqa: E402

CASES = {}
OPTIONS = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": (200, 0)},
    "two-sided window": {"window": (200, 90)},
    "softcap": {"causal": True, "softcap": 5.0, "scale": 0.3},
    "documents": {"causal": True, "cu_seqlens": [0, 130, 500, 500, 1610, 1960, 3071, 3072]},
    "documents without a mask": {"cu_seqlens": [0, 130, 501, 1610, 2901]},
    "documents with a window": {"window": (110, 60), "cu_seqlens": [0, 1377, 3072]},
}
TOTAL = 3072


def case(function):
    CASES[function.__name__] = function
    return function


def device():
    return torch.device("cuda", torch.cuda.current_device())


def inputs(total=TOTAL, batch=1, heads_q=4, heads_kv=2, head_dim=128, dtype=torch.bfloat16):
    """q, k, v and a gradient of O of the whole sequence, the same on every rank."""
    shapes = [(batch, total, heads, head_dim) for heads in (heads_q, heads_kv, heads_kv, heads_q)]
    return [reference.random(shape, seed, device(), dtype) for seed, shape in enumerate(shapes)]


def one_gpu(q, k, v, d_o, options):
    """(o, lse, dq, dk, dv) of the whole sequence on this rank's GPU."""
    options = dict(options)
    cu_seqlens = options.pop("cu_seqlens", None)
    options["causal"] = "bottom-right" if options.get("causal") else None
    if cu_seqlens is None:
        return both_passes(lambda *t: tt.attention(*t, **options, return_lse=True), q, k, v, d_o)
    offsets = torch.tensor(cu_seqlens, dtype=torch.int32, device=q.device)

    def call(*tensors):
        o, lse = tt.varlen_attention(*(t[0] for t in tensors), offsets, offsets, **options, return_lse=True)
        last = cu_seqlens[-1]  # rows past the documents: no kernel writes them on CUDA
        o = torch.cat((o[:last], torch.zeros_like(o[last:])))
        lse = torch.cat((lse[:, :last], torch.full_like(lse[:, last:], float("-inf"))), 1)
        return o[None], lse[None]
    o, lse, *gradients = both_passes(call, q, k, v, d_o)
    last = cu_seqlens[-1]
    return o, lse, *(torch.cat((g[:, :last], torch.zeros_like(g[:, last:])), 1) for g in gradients)


def of_ranks(whole, group, order, options, **more):
    """both_passes() of this rank's rows of `whole`."""
    own = [tt.shard_sequence(t, group, order=order) for t in whole]
    return both_passes(lambda *t: tt.context_parallel_attention(*t, group, order=order, return_lse=True, **options,
                                                                **more), *own)


def rows_of(results, group, order):
    return [tt.shard_sequence(t, group, dim=2 if i == 1 else 1, order=order) for i, t in enumerate(results)]


def expect(got, want, equal, limit, what):
    """The tensors named in `equal` have the same bits, the others are within `limit`. Returns which have the same."""
    same = []
    for name, g, w in zip(NAMES, got, want):
        assert g.dtype == w.dtype and g.shape == w.shape, f"{what}: {name} is {g.dtype} {list(g.shape)}"
        if torch.equal(g, w):
            same.append(name)
        elif name in equal:
            raise AssertionError(f"{what}: {name} has other bits, {int((g != w).sum())} of {g.numel()} elements, off by "
                                 f"{(g - w).abs().max()}")
        else:
            reference.expect_close(g, w, limit, f"{what}: {name}")
    return same


def orders():
    ranks = dist.get_world_size()
    return "zigzag", "contiguous", reversed_chunks(ranks, TOTAL)


@case
def bits_of_one_gpu(alone):
    """O and LSE have the bits of one GPU; the gradients are equal to rounding."""
    for dtype, limit in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3)):
        for name, options in OPTIONS.items():
            for sizes in (dict(), dict(head_dim=64, heads_q=8, heads_kv=1)):
                whole = inputs(dtype=dtype, **sizes)
                want = one_gpu(*whole, options)
                for order in orders():
                    what = f"{dtype}, {name}, {sizes}, {order if isinstance(order, str) else 'permutation'}"
                    expect(of_ranks(whole, None, order, options), rows_of(want, None, order), ("o", "lse"), limit, what)


@case
def steps_change_no_bit(alone):
    whole = inputs(heads_q=16, heads_kv=8)
    want = of_ranks(whole, None, "zigzag", {"causal": True}, steps=1)
    for steps in (2, 3, 8):
        expect(of_ranks(whole, None, "zigzag", {"causal": True}, steps=steps), want, NAMES, 0, f"{steps} steps")


@case
def repeated_calls_have_the_same_bits(alone):
    """Twenty calls in a row, of which none waits for the one before."""
    whole = inputs(total=TOTAL * 4, heads_q=16, heads_kv=8)
    first = of_ranks(whole, None, "zigzag", {"causal": True})
    for call, got in enumerate([of_ranks(whole, None, "zigzag", {"causal": True}) for _ in range(20)]):
        expect(got, first, NAMES, 0, f"call {call}")


@case
def gradients_on_any_number_of_gpus(alone):
    """With gradient_blocks the gradients have the bits of a group of one GPU."""
    for name in ("causal", "full", "documents", "two-sided window"):
        for dtype in (torch.bfloat16, torch.float16):
            whole = inputs(dtype=dtype)
            want = of_ranks(whole, alone, "zigzag", OPTIONS[name], gradient_blocks=24)
            for order in ("zigzag", "contiguous"):
                got = of_ranks(whole, None, order, OPTIONS[name], gradient_blocks=24)
                expect(got, rows_of(want, None, order), NAMES, 0, f"{name}, {dtype}, {order}")


@case
def nccl_has_the_bits_of_copies(alone):
    """Without symmetric memory NCCL exchanges the rows, with equal bits."""
    from tessera.torch._context_parallel import _peers, _setup
    for name in ("causal", "documents", "two-sided window"):
        for total, order in ((TOTAL, "contiguous"), (4 * TOTAL, "zigzag")):
            if total != TOTAL and name == "documents":
                continue
            whole = inputs(total=total, heads_q=16, heads_kv=8)
            want = of_ranks(whole, None, order, OPTIONS[name])
            before, _peers.of_group = _peers.of_group, lambda *_: None
            _setup.setups.clear()
            try:
                expect(of_ranks(whole, None, order, OPTIONS[name]), want, NAMES, 0, f"{name}, {order}, default steps")
                expect(of_ranks(whole, None, order, OPTIONS[name], steps=3), want, NAMES, 0, f"{name}, {order}, 3 steps")
            finally:
                _peers.of_group = before
                _setup.setups.clear()


@case
def captured_in_a_graph(alone):
    """Replays of a CUDA graph have the bits of a plain call, also after the inputs have changed."""
    q, k, v, _ = (tt.shard_sequence(t) for t in inputs(heads_q=16, heads_kv=8))
    given = [torch.empty_like(t) for t in (q, k, v)]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        tt.context_parallel_attention(*given, causal=True, return_lse=True)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            got = tt.context_parallel_attention(*given, causal=True, return_lse=True)
        for factor in (1.0, 0.5, 2.0, 3.0, 0.25):
            for into, t in zip(given, (q, k, v)):
                into.copy_(t * factor)
            want = tt.context_parallel_attention(*given, causal=True, return_lse=True)
            for _ in range(3):
                graph.replay()
            again = tt.context_parallel_attention(*given, causal=True, return_lse=True)
            graph.replay()
            for some in (got, again):
                assert all(torch.equal(g, w) for g, w in zip(some, want)), factor


@case
def calls_on_several_streams(alone):
    """Calls on two streams of the caller, of which none waits for the other."""
    q, k, v, _ = (tt.shard_sequence(t) for t in inputs(total=TOTAL * 4, heads_q=16, heads_kv=8))
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.no_grad():
        want = tt.context_parallel_attention(q, k, v, causal=True, return_lse=True)
        torch.cuda.synchronize()
        found = []
        for call in range(20):
            with torch.cuda.stream(streams[call % 2]):
                found.append(tt.context_parallel_attention(q, k, v, causal=True, return_lse=True))
        torch.cuda.synchronize()
    for got in found:
        assert all(torch.equal(g, w) for g, w in zip(got, want))


@case
def beside_fp64(alone):
    """All results beside the definition, which PyTorch computes in fp64."""
    for name in ("causal", "full", "window", "softcap"):
        q, k, v, d_o = whole = inputs(total=768)
        q64, k64, v64 = (t.double().requires_grad_() for t in (q, k, v))
        plain = dict(OPTIONS[name], causal="bottom-right" if OPTIONS[name].get("causal") else None)
        o, lse = reference.attention(q64, k64, v64, **plain)
        want = (o.detach(), lse.detach(), *torch.autograd.grad(o, (q64, k64, v64), d_o.double()))
        got = of_ranks(whole, None, "zigzag", OPTIONS[name])
        for part, g, w in zip(NAMES, got, rows_of(want, None, "zigzag")):
            reference.expect_close(g, w, 8e-3, f"{name}: {part}")


@case
def compiled_and_checkpointed(alone):
    from torch.utils.checkpoint import checkpoint
    q, k, v, d_o = (tt.shard_sequence(t) for t in inputs())

    def call(q, k, v):
        return tt.context_parallel_attention(q * 1.0, k, v, causal=True, return_lse=True)
    want = both_passes(call, q, k, v, d_o)
    expect(both_passes(torch.compile(call, fullgraph=True, backend="aot_eager"), q, k, v, d_o), want, NAMES, 0, "graph")
    expect(both_passes(lambda *t: checkpoint(call, *t, use_reentrant=False), q, k, v, d_o), want, NAMES, 0, "checkpoint")


@case
def losses_of_one_gpu(alone):
    """A small Llama-like model (examples/context_parallel.py) in training has the losses of one GPU."""
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
    import context_parallel as example
    with torch.autocast("cuda", torch.bfloat16):
        want = example.train(alone, steps=10, rows=3072, device=device())
        got = example.train(None, steps=10, rows=3072, device=device())
    if dist.get_rank() == 0:
        print("losses of one GPU", " ".join(f"{x:.5f}" for x in want))
        print(f"of {dist.get_world_size()} GPUs ", " ".join(f"{x:.5f}" for x in got))
    assert all(abs(g - w) < 2e-3 * w for g, w in zip(got, want)), (got, want)


@case
def ranks_that_differ(alone):
    """Each rank raises the error that names the argument and the ranks, and the group remains usable."""
    q, k, v, _ = (t[:, :64] for t in inputs())
    odd = dist.get_rank() == 1

    def call(**options):
        return lambda: tt.context_parallel_attention(options.pop("q", q), k, v, timeout=60, **options)
    raises(ValueError, ("scale:", "0.5 on rank 1"), call(scale=0.5 if odd else None, check=True))
    raises(ValueError, ("causal:", "True on rank 1"), call(causal=odd, check=True))
    raises(ValueError, ("gradient_blocks:", "4 on rank 1"), call(gradient_blocks=4 if odd else None, check=True))
    raises(ValueError, ("k: expected",) if odd else ("rank 1 refused the call", "k: expected"),
           lambda: tt.context_parallel_attention(q, k[:, :9] if odd else k, v, timeout=60, check=True))
    call(causal=True, check=True)()


@case
def a_rank_that_is_late(alone):
    """The other ranks name it when the timeout has passed."""
    group = dist.new_group(list(range(dist.get_world_size())))
    q, k, v, _ = (t[:, :96] for t in inputs())
    tt.context_parallel_attention(q, k, v, group, timeout=60)
    dist.barrier()
    if dist.get_rank() == 0:
        begin = time.monotonic()
        raises(RuntimeError, ("rank 1 did not come to this call within 3 s",),
               lambda: tt.context_parallel_attention(q, k, v, group, scale=0.5, timeout=3))
        assert time.monotonic() - begin < 20
    else:
        time.sleep(5)


@case
def a_rank_that_dies(alone):
    """The last rank ends after its forward, and the others raise in a call whose arguments are compared."""
    group = dist.new_group(list(range(dist.get_world_size())))
    q, k, v, _ = (t[:, :96] for t in inputs())
    tt.context_parallel_attention(q, k, v, group, timeout=60)
    torch.cuda.synchronize()
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(0)
    begin = time.monotonic()
    raises(RuntimeError, ("rank ",), lambda: tt.context_parallel_attention(q, k, v, group, timeout=5, check=True))
    assert time.monotonic() - begin < 30


def main():
    warnings.simplefilter("ignore")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=device(), timeout=datetime.timedelta(seconds=60))
    rank, failed = dist.get_rank(), False
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    for name in NAMED or CASES:
        begin, text = time.monotonic(), None
        try:
            CASES[name](alone)
            torch.cuda.synchronize()
        except Exception:
            text = traceback.format_exc()
            print(f"{name}: rank {rank}: {text}", flush=True)
        if name == "a_rank_that_dies":  # nobody is left to ask
            failed |= text is not None
            print(f"{name}: rank {rank}: {text or 'passed'}", flush=True)
            break
        texts = [None] * dist.get_world_size()
        dist.all_gather_object(texts, text)
        failed |= any(texts)
        if rank == 0:
            said = [f"rank {r}: {found}" for r, found in enumerate(texts) if found]
            print(f"{name}: {'passed' if not said else said[0]} ({time.monotonic() - begin:.1f} s)", flush=True)
    sys.stdout.flush()
    os._exit(failed)  # destroy_process_group() would wait for a rank that has ended


if __name__ == "__main__":
    main()
