# SPDX-License-Identifier: Apache-2.0
"""Caches of keys on CUDA: right numbers, bits that depend on nothing but the row, appending, graphs and streams."""
import os
import pathlib
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from conftest import NO_CUDA  # noqa: E402

if NO_CUDA:
    pytest.skip(NO_CUDA, allow_module_level=True)
import tessera  # noqa: E402
from tessera import compat, flash_attn, flash_attn_3  # noqa: E402
from cache_support import NAN, Sequence, cached, expected, run  # noqa: E402


@pytest.mark.parametrize("page", [0, 1, 3, 16, 64, 784])
@pytest.mark.parametrize("queries", [1, 5])
def test_numbers_are_right(page, queries):
    sequences = [Sequence(length, queries, seed=length) for length in (queries, 63, 700, 1030, 5000)]
    o, lse = run(sequences, page, 5504)
    for b, m in enumerate(sequences):
        want, want_lse = expected(m.q, m.k, m.v, causal=True)
        torch.testing.assert_close(o[b].double(), want, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse[b].double(), want_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("length,queries,dim", [(40, 1, 64), (1030, 1, 128), (2051, 4, 128), (5000, 1, 256)])
def test_bits_depend_on_the_row_alone(length, queries, dim):
    """Batch, place in it, size of pages, capacity, neighbours."""
    own = Sequence(length, queries, dim=dim)
    o, lse = run([own], 0, length)
    for page in (0, 1, 5, 16, 256, 784):
        for batch, place, capacity in ((1, 0, length + 900), (3, 1, 6000), (9, 8, 20000)):
            lengths = [min(b * 911 % 6000 + 1, capacity) for b in range(batch)]
            others = [Sequence(n, queries, dim=dim, seed=n) for n in lengths]
            others[place] = own
            got, got_lse = run(others, page, capacity)
            assert torch.equal(got[place], o[0]), (page, batch)
            assert torch.equal(got_lse[place], lse[0]), (page, batch)


def test_ragged_queries_have_the_bits_of_dense_ones():
    sequences = [Sequence(length, 3, seed=length) for length in (90, 1500, 3000)]
    k, v, lengths, table = cached(sequences, 16, 4096)
    o, lse = run(sequences, 16, 4096)
    q = torch.cat([m.q for m in sequences] + [sequences[0].q * NAN])  # and three rows of nobody
    offsets = torch.arange(0, 10, 3, dtype=torch.int32, device="cuda")
    got, got_lse = flash_attn_3.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table, causal=True,
                                                        cu_seqlens_q=offsets, max_seqlen_q=3, return_softmax_lse=True)
    assert torch.equal(got[:9].view(3, 3, 8, 128), o) and not got[9:].any()
    assert torch.equal(got_lse[:, :9].reshape(8, 3, 3).transpose(0, 1), lse)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_great_capacity_takes_bounded_memory(ragged):
    """Partial results of 1,200 queries would take 2.6 GB, so several launches have a part of the queries each."""
    sequences = [Sequence(length, 600, heads=32, heads_k=8, seed=length) for length in (2000, 900)]
    o, lse = run(sequences, 16, 2048)
    k, v, lengths, table = cached(sequences, 16, 65536)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    options = dict(cache_seqlens=lengths, causal=True, return_softmax_lse=True)
    if ragged:
        offsets = torch.tensor([0, 600, 1200], dtype=torch.int32, device="cuda")
        got, got_lse = flash_attn_3.flash_attn_with_kvcache(torch.cat([m.q for m in sequences]), k, v, page_table=table,
                                                            cu_seqlens_q=offsets, max_seqlen_q=600, **options)
        got, got_lse = got.view(2, 600, 32, 128), got_lse.view(32, 2, 600).transpose(0, 1)
    else:
        q = torch.stack([m.q for m in sequences])
        got, got_lse = flash_attn.flash_attn_with_kvcache(q, k, v, block_table=table, **options)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 600 << 20
    assert torch.equal(got, o) and torch.equal(got_lse, lse)
    torch.testing.assert_close(got[0].double(), sequences[0].o, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("page", [0, 16])
def test_append_is_that_of_the_cpu(page, interleaved):
    """Rotary embedding, a sequence that ends at 0 keys and whose table is -1, and one whose row is past the capacity."""
    torch.manual_seed(5)
    batch, capacity, heads_k, dim = 4, 64, 2, 64
    lengths = torch.tensor([5, -2, 63, 40], dtype=torch.int32)
    angles = torch.rand(80, 16) * 6
    shape = (batch * capacity // 16, 16, heads_k, dim) if page else (batch, capacity, heads_k, dim)
    k_cache, v_cache = torch.randn(shape).half(), torch.randn(shape).half()
    table = torch.randperm(batch * capacity // 16).int().view(batch, -1) if page else None
    if page:
        table[1] = -1
    new = [torch.randn(batch, 2, heads, dim).half() for heads in (6, heads_k, heads_k)]
    results = []
    for device in ("cpu", "cuda"):
        q, k, v, kc, vc, at, cos, sin = (t.clone().to(device) for t in
                                         (*new, k_cache, v_cache, lengths, angles.cos(), angles.sin()))
        o, lse = flash_attn.flash_attn_with_kvcache(
            q, kc, vc, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=at, causal=True,
            block_table=None if table is None else table.to(device), rotary_interleaved=interleaved,
            return_softmax_lse=True)
        results.append([t.cpu().float() for t in (o, lse, kc, vc)])
    (o, lse, kc, vc), (got, got_lse, got_k, got_v) = results
    assert torch.equal(got_v, vc)
    torch.testing.assert_close(got_k, kc, atol=2e-3, rtol=2e-3)
    rows = [0, 1, 3]  # sequence 2 is past its capacity, and its last row is not there
    torch.testing.assert_close(got[rows], o[rows], atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(got_lse[rows], lse[rows], atol=5e-3, rtol=5e-3)


def test_append_by_slots_and_norm_are_those_of_the_cpu():
    torch.manual_seed(6)
    k, v, q = (torch.randn(7, heads, 96).bfloat16() for heads in (2, 2, 6))
    slots = torch.tensor([0, 5, -1, 33, 10**6, 17, 2])
    weights = torch.rand(96)
    cos, sin, positions = torch.rand(50, 48), torch.rand(50, 48), torch.arange(7)
    results = []
    for device in ("cpu", "cuda"):
        caches = torch.zeros(5, 8, 2, 96, dtype=torch.bfloat16, device=device), torch.zeros(5, 8, 2, 96,
                                                                                            dtype=torch.bfloat16,
                                                                                            device=device)
        on = [t.to(device) for t in (k, v, slots, weights, cos, sin, positions, q)]
        turned = tessera.append_kv(on[0], on[1], *caches, slot_mapping=on[2], k_norm=on[3], q_norm=on[3],
                                   rotary_cos=on[4], rotary_sin=on[5], positions=on[6], q=on[7])
        results.append([t.cpu() for t in (*caches, turned)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=0, rtol=2**-7)  # fp64 sums of another order may round otherwise
    assert results[0][0].count_nonzero() > 0


@pytest.mark.parametrize("heads", [8, 24, 32], ids=lambda heads: f"group{heads // 2}")
def test_a_graph_takes_any_lengths(heads):
    """Captured with all lengths 0: replays have the bits of eager calls, 1,000 times, with other launches and an
    abandoned capture between them."""
    sequence = Sequence(4000, heads=heads, seed=1)
    k, v, lengths, table = cached([sequence] * 3, 16, 4096)
    q = torch.stack([sequence.q] * 3)
    call = lambda: flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table,  # noqa: E731
                                                      causal=True, return_softmax_lse=True)
    want = {}
    for values in ([0, 0, 0], [1, 4000, 77], [4000, 1030, 2], [64, 65, 1024]):
        lengths.copy_(torch.tensor(values))
        want[tuple(values)] = [t.clone() for t in call()]
    lengths.zero_()
    graph, given_up = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        results = call()
    with torch.cuda.graph(given_up, stream=stream):
        call()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for repeat in range(250):
        for values, (o, lse) in want.items():
            lengths.copy_(torch.tensor(values))
            graph.replay()
            different += (results[0] != o).sum() + (results[1] != lse).sum()
            if repeat % 5 == 0:
                call()
        if repeat == 100:
            del given_up
    assert int(different) == 0
    assert not want[(0, 0, 0)][0].any() and torch.isposinf(want[(0, 0, 0)][1]).all()  # as flash-attn has it


def test_rows_of_a_graph_past_the_sequences_bug_s35():
    """A graph of 112 rows with 100 sequences: the lengths of the others are 0, and their tables are of yesterday."""
    members = [Sequence(37 * b % 300 + 1, heads=16, heads_k=1, seed=b) for b in range(112)]
    k, v, lengths, table = cached(members, 16, 304)
    q = torch.stack([m.q for m in members])
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    call = lambda: flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table,  # noqa: E731
                                                      causal=True, return_softmax_lse=True)
    want, want_lse = (t.clone() for t in call())
    with torch.cuda.graph(graph, stream=stream):
        o, lse = call()
    lengths[100:] = 0
    table[100:] = 10**6
    graph.replay()
    assert torch.equal(o[:100], want[:100]) and torch.equal(lse[:100], want_lse[:100])
    assert not o[100:].any() and torch.isposinf(lse[100:]).all()


def test_two_streams_at_once():
    """10,000 calls."""
    sequences = [[Sequence(3000 + i, seed=i)] * 4 for i in range(2)]
    want = [run(m, 16, 4096)[0] for m in sequences]
    caches = [(torch.stack([m.q for m in members]), *cached(members, 16, 4096)) for members in sequences]
    streams = [torch.cuda.Stream() for _ in range(2)]
    different = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    for i in range(10000):
        which = i % 2
        with torch.cuda.stream(streams[which]):
            q, k, v, lengths, table = caches[which]
            o = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, causal=True)
            different[which] += (o != want[which]).sum()
    torch.cuda.synchronize()
    assert [int(count) for count in different] == [0, 0]


@pytest.mark.parametrize("model,way", [("llama", "eager"), ("llama", "graph"), ("qwen3", "graph")])
def test_continuous_batching_of_transformers(model, way):
    """Unchanged. Tokens of fp16 models may differ where two logits are nearly equal."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    program = pathlib.Path(__file__).with_name("continuous_batching.py")
    path = os.pathsep.join([compat.FOLDER, str(pathlib.Path(compat.FOLDER).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, str(program), model, way, "cuda"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": path})
    found = re.search(r"(\d) of 5 equal", done.stdout)
    assert found and int(found[1]) >= 4, done.stdout + done.stderr[-3000:]
