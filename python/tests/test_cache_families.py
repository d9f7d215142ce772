# SPDX-License-Identifier: Apache-2.0
"""Bugs of other libraries with caches (tests/kernels/BUGS.md), on every device."""
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from cache_support import NAN, Sequence, expected, run  # noqa: E402
from tessera import flash_attn  # noqa: E402


def test_bits_in_any_batch_at_any_place_bug_s20(device):
    """A row's bits in batches of 1, 7, 64 and 300, at each place, between rows of other lengths."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    make = lambda length, seed: Sequence(length, 1, 6, 2, 64, seed, device, dtype)  # noqa: E731
    own = make(1030 if device == "cuda" else 130, 0)
    others = [make(7 * seed % 97 + 1, seed) for seed in range(1, 300)]
    o, lse = run([own], 16, len(own.k))
    for batch in (7, 64, 300):
        for first in (0, 1):
            members = [own if b % 2 == first else others[b - 1] for b in range(batch)]
            got, got_lse = run(members, 16, len(own.k))
            for b in range(first, batch, 2):
                assert torch.equal(got[b], o[0]) and torch.equal(got_lse[b], lse[0]), (batch, b)


@pytest.mark.parametrize("large,small", [(16, 4), (784, 16)])
def test_two_page_sizes_of_one_pool_bug_s24(large, small, device):
    """Two groups of layers see one pool as pages of their own sizes, and append and decode in turns."""
    dtype, heads_k, dim = torch.bfloat16 if device == "cuda" else torch.float32, 2, 64
    pool = torch.full((6 * large, heads_k, 2 * dim), NAN, device=device, dtype=dtype)
    ratio, groups = large // small, []
    for page, table, length in ((large, [4, 1], large + 5),
                                (small, [5 * ratio, 1, 5 * ratio + 2, 0, 3 * ratio], 3 * small + 1)):
        pages = pool.view(-1, page, heads_k, 2 * dim)
        rows = [torch.randn(length + 3, heads, dim, device=device).to(dtype) for heads in (6, heads_k, heads_k)]
        table = torch.tensor([table], dtype=torch.int32, device=device)
        groups.append((pages[..., :dim], pages[..., dim:], table, length, rows))
    for step in range(2):  # the prompt, and three tokens
        for k_cache, v_cache, table, length, rows in groups:
            begin, end = (0, length) if step == 0 else (length, length + 3)
            lengths = torch.tensor([begin], dtype=torch.int32, device=device)
            q, k, v = (t[begin:end] for t in rows)
            out = flash_attn.flash_attn_with_kvcache(q[None], k_cache, v_cache, k[None], v[None], causal=True,
                                                     cache_seqlens=lengths, block_table=table)
            want, _ = expected(q, rows[1][:end], rows[2][:end], causal=True)
            error = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(out[0].double(), want, rtol=error, atol=error)
    written = sum(length + 3 for _, _, _, length, _ in groups)
    assert int(pool.isfinite().flatten(1).all(1).sum()) == written
