# SPDX-License-Identifier: Apache-2.0
"""Sequences in a cache of slots or pages whose other rows are NaN, and what attention gives them in fp64."""
import torch

from tessera import flash_attn

NAN = float("nan")


def expected(q, k, v, causal=False, window=(-1, -1), softcap=0.0):
    """(out, lse) in fp64 of one sequence: q (rows, heads, dim), k, v (keys, heads_k, dim)."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    last = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
    keys = torch.arange(len(k), device=q.device)[None]
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
    if causal:
        seen &= keys <= last
    if window[0] >= 0:
        seen &= keys >= last - window[0]
    if window[1] >= 0:
        seen &= keys <= last + window[1]
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(scores, -1) if len(k) else scores.new_full(scores.shape[:2], float("-inf"))
    weights = torch.nan_to_num(torch.exp(scores - lse[..., None]), nan=0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), lse


class Sequence:
    """The keys of one sequence and its queries."""

    def __init__(self, length, queries=1, heads=8, heads_k=2, dim=128, seed=0, device="cuda", dtype=torch.bfloat16):
        draw = torch.Generator(device).manual_seed(seed)
        self.length = length
        self.q, self.k, self.v = (torch.randn(rows, count, dim, generator=draw, device=device, dtype=dtype)
                                  for rows, count in ((queries, heads), (length, heads_k), (length, heads_k)))


def cached(sequences, page, capacity):
    """(k_cache, v_cache, lengths, table or None) of these sequences, with NaN in all else and junk after the table."""
    batch, (_, heads, dim) = len(sequences), sequences[0].k.shape
    device, dtype = sequences[0].k.device, sequences[0].k.dtype
    lengths = torch.tensor([m.length for m in sequences], dtype=torch.int32, device=device)
    if page == 0:
        caches = torch.full((2, batch, capacity, heads, dim), NAN, device=device, dtype=dtype)
        for b, m in enumerate(sequences):
            caches[0, b, :m.length], caches[1, b, :m.length] = m.k, m.v
        return caches[0], caches[1], lengths, None
    width = (capacity + page - 1) // page
    order = torch.randperm(batch * width).view(batch, width)
    caches = torch.full((batch * width, page, heads, 2 * dim), NAN, device=device, dtype=dtype)
    table = torch.randint(-9, 10**9, (batch, width), dtype=torch.int32)  # junk
    for b, m in enumerate(sequences):
        used = (m.length + page - 1) // page
        table[b, :used] = order[b, :used]
        row = torch.arange(m.length, device=device)
        caches[table[b].to(device).long()[row // page], row % page] = torch.cat((m.k, m.v), -1)
    return caches[..., :dim], caches[..., dim:], lengths, table.to(device)


def run(sequences, page, capacity):
    """(out, lse) of all of them in one call."""
    k, v, lengths, table = cached(sequences, page, capacity)
    q = torch.stack([m.q for m in sequences])
    return flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, causal=True,
                                              return_softmax_lse=True)
