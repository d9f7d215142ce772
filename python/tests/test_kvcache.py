# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache of both versions and flash_attn_varlen_func(block_table=), beside plain PyTorch in fp64."""
import inspect
import random

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import torch_reference as reference  # noqa: E402
from cache_support import NAN, expected  # noqa: E402
from seeds import random_seed  # noqa: E402
from tessera import _kvcache, _native, flash_attn, flash_attn_3, rotary  # noqa: E402

class Drawn:
    """A cache with the rows of each sequence, drawn by a seed. Unused rows are NaN, and unused entries junk."""

    def __init__(self, seed, pages):
        draw = random.Random(random_seed(seed))
        torch.manual_seed(random_seed(seed))
        self.batch, self.new = draw.randint(1, 4), draw.choice([1, 1, 3])
        self.heads_k = draw.choice([1, 2])
        self.heads, self.dim = self.heads_k * draw.choice([1, 3]), 32
        self.page = draw.choice([1, 3, 16, 784]) if pages else 0
        width = draw.randint(1, 3) if self.page > 99 else draw.randint(1, 20)
        self.capacity = self.page * width if pages else draw.randint(1, 90)
        count = self.batch * width + 2 if pages else self.batch + 2
        rows = self.page if pages else self.capacity
        both = torch.full((count, rows, self.heads_k, 2 * self.dim), NAN)  # K and V side by side
        self.k_cache, self.v_cache = both[..., :self.dim], both[..., self.dim:]
        order = torch.randperm(count, dtype=torch.int32)
        self.slots = None if pages else order[:self.batch].clone()
        self.table = order[:self.batch * width].view(self.batch, width).clone() if pages else None
        self.lengths = torch.tensor([draw.randint(0, self.capacity) for _ in range(self.batch)], dtype=torch.int32)
        self.left = torch.tensor([draw.randint(0, int(n)) for n in self.lengths], dtype=torch.int32)
        self.left = self.left if draw.random() < 0.3 else None
        self.q = torch.randn(self.batch, self.new, self.heads, self.dim)
        self.k, self.v = (torch.randn(self.batch, self.new, self.heads_k, self.dim) for _ in range(2))
        self.rows = []  # keys and values of each sequence
        for b, length in enumerate(self.lengths.tolist()):
            k, v = (torch.randn(length, self.heads_k, self.dim) for _ in range(2))
            for i in range(length):
                place, row = self.place(b, i)
                self.k_cache[place, row], self.v_cache[place, row] = k[i], v[i]
            self.rows.append((k, v))
            if pages:
                self.table[b, -(-min(length + self.new, self.capacity) // self.page):] = draw.choice([-1, 10**6])

    def place(self, b, row):
        return (self.table[b, row // self.page], row % self.page) if self.page else (self.slots[b], row)

    def keywords(self, module):
        table = "block_table" if module is flash_attn else "page_table"
        return dict(cache_seqlens=self.lengths, cache_batch_idx=self.slots, cache_leftpad=self.left,
                    **({table: self.table} if self.page else {}))

    def expected(self, b, k, v, q, **scores):
        first = 0 if self.left is None else int(self.left[b])
        room = self.capacity - int(self.lengths[b])
        k, v = (torch.cat((old, new[:room]))[first:] for old, new in zip(self.rows[b], (k, v)))
        return expected(q, k, v, **scores)


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3], ids=["2.8", "3"])
@pytest.mark.parametrize("pages", [False, True], ids=["slots", "pages"])
@pytest.mark.parametrize("append", [False, True], ids=["read", "append"])
def test_values(module, pages, append):
    for seed in range(25):
        case = Drawn(seed, pages)
        scores = dict(causal=seed % 2 == 0, softcap=5.0 if seed % 5 == 0 else 0.0)
        window = (7, -1) if seed % 3 == 0 else (-1, -1)
        new = dict(k=case.k, v=case.v) if append else {}
        out, lse = module.flash_attn_with_kvcache(case.q, case.k_cache, case.v_cache, **new, **case.keywords(module),
                                                  **scores, window_size=window, return_softmax_lse=True)
        for b in range(case.batch):
            none = case.k[b, :0]
            k, v = (case.k[b], case.v[b]) if append else (none, none)
            want, want_lse = case.expected(b, k, v, case.q[b], **scores, window=window)
            torch.testing.assert_close(out[b].double(), want, rtol=1e-5, atol=1e-5)
            empty = want_lse == float("-inf")
            assert (lse[b][empty] == float("inf" if module is flash_attn else "-inf")).all()
            torch.testing.assert_close(lse[b][~empty].double(), want_lse[~empty], rtol=1e-5, atol=1e-5)
            for i in range(min(len(k), case.capacity - int(case.lengths[b]))):
                place, row = case.place(b, int(case.lengths[b]) + i)
                assert torch.equal(case.k_cache[place, row], k[i]) and torch.equal(case.v_cache[place, row], v[i])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fraction", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary(interleaved, fraction, causal):
    """New keys are turned by their positions; queries by theirs if causal, else all by the first position."""
    case = Drawn(3, True)
    case.lengths = torch.tensor([5] * case.batch, dtype=torch.int32).clamp(max=case.capacity - case.new)
    case = Drawn(8, False)
    angles = torch.rand(case.capacity + 8, case.dim // 2 // fraction)
    cos, sin = angles.cos(), angles.sin()
    out = flash_attn.flash_attn_with_kvcache(case.q, case.k_cache, case.v_cache, case.k, case.v, cos, sin,
                                             causal=causal, rotary_interleaved=interleaved, **case.keywords(flash_attn))
    for b in range(case.batch):
        length = int(case.lengths[b])
        turn = lambda x, at: rotary.apply_rotary_emb(x[None], cos[at], sin[at], interleaved)[0]  # noqa: E731
        positions = torch.arange(length, length + case.new)
        q = turn(case.q[b], positions if causal else positions[:1].expand(case.new))
        want, _ = case.expected(b, turn(case.k[b], positions), case.v[b], q, causal=causal)
        torch.testing.assert_close(out[b].double(), want, rtol=1e-5, atol=1e-5)


def test_rows_of_nobody_are_not_written():
    """Sequences of padding have length -1 and no page; a row past the table is dropped."""
    cache = torch.zeros(2, 4, 1, 32)
    lengths = torch.tensor([3, -1, 4], dtype=torch.int32)
    table = torch.tensor([[1], [-1], [0]], dtype=torch.int32)
    q, k, v = (torch.randn(3, 1, 1, 32) for _ in range(3))
    k_cache, v_cache = cache.clone(), cache.clone()
    out, lse = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table,
                                                  causal=True, return_softmax_lse=True)
    assert torch.equal(k_cache[1, 3], k[0, 0]) and k_cache[1, :3].eq(0).all() and k_cache[0].eq(0).all()
    assert out[1].eq(0).all() and lse[1].eq(float("inf")).all() and out.isfinite().all()


def test_ragged_queries_and_new_rows():
    """Version 3: rows past the last offset belong to nobody."""
    case = Drawn(12, True)
    counts = [b % 2 * 2 for b in range(case.batch)]
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    total = int(offsets[-1])
    q = torch.randn(total + 3, case.heads, case.dim)
    q[total:] = NAN
    k, v = (torch.randn(total + 1, case.heads_k, case.dim) for _ in range(2))
    case.lengths = case.lengths.clamp(max=case.capacity - 2)
    case.rows = [(k[:n], v[:n]) for (k, v), n in zip(case.rows, case.lengths.tolist())]
    if case.left is not None:
        case.left = torch.minimum(case.left, case.lengths)
    for b, n in enumerate(case.lengths.tolist()):  # pages of the new rows
        for number in range(n // case.page, -(-(n + 2) // case.page)):
            if not 0 <= case.table[b, number] < len(case.k_cache):
                free = set(range(len(case.k_cache))) - set(case.table.flatten().tolist())
                case.table[b, number] = free.pop()
    out, lse = flash_attn_3.flash_attn_with_kvcache(q, case.k_cache, case.v_cache, k, v, cu_seqlens_q=offsets,
                                                    cu_seqlens_k_new=offsets, max_seqlen_q=2, causal=True,
                                                    return_softmax_lse=True, **case.keywords(flash_attn_3))
    for b in range(case.batch):
        rows = slice(offsets[b], offsets[b + 1])
        want, want_lse = case.expected(b, k[rows], v[rows], q[rows], causal=True)
        torch.testing.assert_close(out[rows].double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[:, rows].double(), want_lse, rtol=1e-5, atol=1e-5)
    assert out[total:].eq(0).all() and lse[:, total:].eq(float("-inf")).all()


@pytest.mark.parametrize("used", [False, True])
def test_varlen_on_pages(used):
    """The bits of a call on the same keys without pages."""
    case = Drawn(5, True)
    case.left = None
    offsets = torch.arange(case.batch + 1, dtype=torch.int32) * case.new
    offsets_k = torch.cat((torch.zeros(1, dtype=torch.int32), case.lengths.cumsum(0, dtype=torch.int32)))
    longest = max(int(case.lengths.max()), 1)
    pages = flash_attn.flash_attn_varlen_func(case.q.flatten(0, 1), case.k_cache, case.v_cache, offsets,
                                              None if used else offsets_k, case.new, longest, causal=True,
                                              block_table=case.table, seqused_k=case.lengths if used else None)
    k, v = (torch.cat([rows[i] for rows in case.rows]) for i in range(2))
    plain = flash_attn.flash_attn_varlen_func(case.q.flatten(0, 1), k, v, offsets, offsets_k, case.new, longest,
                                              causal=True)
    assert torch.equal(pages, plain)


@pytest.mark.parametrize("pages", [False, True], ids=["slots", "pages"])
def test_sinks(pages):
    """Sinks (s_aux) in the dtype of the model, in calls on a cache, in varlen calls on pages and without pages."""
    for seed in range(8):
        case = Drawn(seed, pages)
        sinks = torch.randn(case.heads)
        out, lse = flash_attn.flash_attn_with_kvcache(case.q, case.k_cache, case.v_cache, s_aux=sinks, causal=True,
                                                      return_softmax_lse=True, **case.keywords(flash_attn))
        of_3, lse_3 = flash_attn_3.flash_attn_with_kvcache(case.q, case.k_cache, case.v_cache, s_aux=sinks, causal=True,
                                                           return_softmax_lse=True, **case.keywords(flash_attn_3))
        assert torch.equal(out, of_3) and torch.equal(lse, lse_3)
        for b in range(case.batch):
            none = case.k[b, :0]
            want, want_lse = case.expected(b, none, none, case.q[b], causal=True)
            share = torch.sigmoid(want_lse - sinks.double()[:, None])
            torch.testing.assert_close(out[b].double(), want * share.T[..., None], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse[b].double(), torch.logaddexp(want_lse, sinks.double()[:, None]), rtol=1e-5,
                                       atol=1e-5)


def test_varlen_as_vllm_calls_it():
    """Pages with lengths in seqused_k, sinks in bf16, a view as `out`, and a query of padding without a length."""
    case = Drawn(5, True)
    case.left, lengths = None, torch.cat((case.lengths, torch.zeros(1, dtype=torch.int32)))
    table = torch.cat((case.table, torch.full((1, case.table.shape[1]), 10**6, dtype=torch.int32)))
    offsets = torch.tensor([case.new * b for b in range(case.batch + 1)] + [case.new * case.batch], dtype=torch.int32)
    q, sinks = case.q.flatten(0, 1), torch.randn(case.heads).to(torch.bfloat16)
    wide = torch.full((len(q) + 2, case.heads, case.dim), NAN)
    arguments = dict(q=q, k=case.k_cache, v=case.v_cache, cu_seqlens_q=offsets, cu_seqlens_k=None,
                     max_seqlen_q=case.new, max_seqlen_k=case.capacity, seqused_k=lengths, block_table=table,
                     causal=True, s_aux=sinks, num_splits=4)
    out = flash_attn.flash_attn_varlen_func(**arguments, out=wide[1:-1])
    assert out.data_ptr() == wide[1:-1].data_ptr() and wide[0].isnan().all() and wide[-1].isnan().all()
    assert torch.equal(out, flash_attn.flash_attn_varlen_func(**arguments))
    for b in range(case.batch):
        want, lse = expected(case.q[b], *case.rows[b], causal=True)
        share = torch.sigmoid(lse - sinks.double()[:, None]).T[..., None]
        torch.testing.assert_close(out[offsets[b]:offsets[b + 1]].double(), want * share, rtol=1e-5, atol=1e-5)


def test_rows_behind_the_last_offset_of_a_ragged_batch_are_nobodys():
    """Rows past the last offset may hold NaN, which changes nothing. Their output and gradients are 0."""
    q, k, v = (torch.randn(30, 2, 16) for _ in range(3))
    cu_q, cu_k = (torch.tensor(n, dtype=torch.int32) for n in ([0, 7, 7, 20], [0, 9, 12, 26]))
    want, want_lse, _ = flash_attn.flash_attn_varlen_func(q[:20], k[:26], v[:26], cu_q, cu_k, 13, 14, causal=True,
                                                          return_attn_probs=True)
    q[20:], k[26:], v[26:] = NAN, NAN, NAN
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse, _ = flash_attn.flash_attn_varlen_func(*leaves, cu_q, cu_k, 30, 30, causal=True, return_attn_probs=True)
    assert torch.equal(out[:20], want) and torch.equal(lse[:, :20], want_lse)
    assert out[20:].eq(0).all() and lse[:, 20:].eq(float("inf")).all()
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    assert dq[20:].eq(0).all() and dk[26:].eq(0).all() and dv[26:].eq(0).all() and dq.isfinite().all()
    with pytest.raises(RuntimeError, match="^out: expected a call without gradients"):
        flash_attn.flash_attn_varlen_func(*leaves, cu_q, cu_k, 30, 30, out=torch.empty_like(out))


def test_a_table_with_more_rows_than_sequences():
    """Version 3: cache_batch_idx names the row of the table of each sequence."""
    case = Drawn(9, True)
    order = torch.randperm(case.batch + 2)[:case.batch].to(torch.int32)
    wide = torch.full((case.batch + 2, case.table.shape[1]), -7, dtype=torch.int32)
    wide[order.long()] = case.table
    keywords = case.keywords(flash_attn_3)
    want = flash_attn_3.flash_attn_with_kvcache(case.q, case.k_cache, case.v_cache, **keywords)
    keywords.update(page_table=wide, cache_batch_idx=order)
    assert torch.equal(flash_attn_3.flash_attn_with_kvcache(case.q, case.k_cache, case.v_cache, **keywords), want)


def test_metadata_is_empty_and_changes_nothing():
    """A window that the metadata was not told is honoured."""
    case = Drawn(2, True)
    metadata = flash_attn_3.get_scheduler_metadata(case.batch, case.new, case.capacity, case.heads, case.heads_k,
                                                   case.dim, case.lengths, page_size=case.page, num_splits=3)
    assert metadata.shape == (0,) and metadata.dtype == torch.int32
    call = lambda **more: flash_attn_3.flash_attn_with_kvcache(  # noqa: E731
        case.q, case.k_cache, case.v_cache, **case.keywords(flash_attn_3), **more)
    assert torch.equal(call(scheduler_metadata=metadata, num_splits=3), call())
    window = dict(causal=True, window_size=(2, 0))
    assert torch.equal(call(scheduler_metadata=metadata, **window), call(**window))
    assert not torch.equal(call(**window), call(causal=True))


@pytest.mark.parametrize("function,names", [
    (flash_attn.flash_attn_with_kvcache,
     "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table "
     "softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse s_aux"),
    (flash_attn_3.flash_attn_with_kvcache,
     "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table "
     "cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale causal "
     "window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
     "return_softmax_lse s_aux")], ids=["2.8", "3"])
def test_signatures(function, names):
    assert list(inspect.signature(function).parameters) == names.split()


@pytest.mark.parametrize("keywords,error,words", [
    (dict(qv=torch.zeros(1)), NotImplementedError, "^qv: "),
    (dict(attention_chunk=8), NotImplementedError, "^attention_chunk: "),
    (dict(k_descale=torch.ones(1)), NotImplementedError, "^k_descale: "),
    (dict(k=torch.zeros(2, 1, 4, 32)), RuntimeError, "^v: expected a tensor"),
    (dict(rotary_cos=torch.zeros(9, 16), rotary_sin=torch.zeros(9, 16)), RuntimeError, "^rotary_cos: .* without new"),
    (dict(cache_seqlens=True), RuntimeError, "^cache_seqlens: expected an integer, got True"),
    (dict(cache_seqlens=torch.zeros(3, dtype=torch.int32)), RuntimeError, r"^cache_seqlens: expected shape \(2,\)"),
    (dict(cache_batch_idx=torch.tensor([0, 7])), RuntimeError, "^cache_batch_idx: expected slots from 0 to 1, got 7"),
    (dict(cache_batch_idx=torch.tensor([0, 7]), page_table=torch.tensor([[0], [1]])), RuntimeError,
     "^cache_batch_idx: expected rows of page_table from 0 to 1, got 7"),
    (dict(s_aux=torch.zeros(3)), RuntimeError, "^s_aux: expected"),
    (dict(page_table=torch.tensor([[0], [9]])), RuntimeError, "^page_table: expected pages from 0 to 1"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_refusals_name_the_argument(keywords, error, words):
    q, k, v = (t.detach() for t in reference.inputs(batch=2, len_q=1, len_kv=8, heads_q=4, heads_kv=4, head_dim=32))
    with pytest.raises(error, match=words):
        flash_attn_3.flash_attn_with_kvcache(q, k, v, **keywords)


def call_of_2(**change):
    """flash_attn_with_kvcache of two sequences with new rows and rotary, in new caches; `change`: other arguments."""
    q, k_cache, v_cache = reference.inputs(batch=2, len_q=1, len_kv=8, heads_q=2, heads_kv=2, head_dim=16)
    k, v = (torch.randn(2, 1, 2, 16) for _ in range(2))
    good = dict(q=q.detach(), k_cache=k_cache.detach().clone(), v_cache=v_cache.detach().clone(), k=k, v=v,
                cache_seqlens=torch.tensor([3, 5], dtype=torch.int32), rotary_cos=torch.rand(9, 8),
                rotary_sin=torch.rand(9, 8))
    return {**good, **change}


@pytest.mark.parametrize("change,words", [
    (dict(k=torch.zeros(2, 3, 2, 16)), "^v: expected"), (dict(v=torch.zeros(2, 3, 2, 16)), "^v: expected"),
    (dict(v_cache=torch.zeros(1, 8, 2, 16)), "^v_cache: expected"),
    (dict(v_cache=torch.zeros(2, 4, 2, 16)), "^v_cache: expected"),
    (dict(k_cache=torch.zeros(1, 8, 2, 16).expand(2, 8, 2, 16)), "^k_cache: expected .* distinct"),
    (dict(rotary_cos=torch.rand(5, 8), rotary_sin=torch.rand(5, 8)), "^rotary_cos: expected positions from 0 to 4"),
    (dict(rotary_cos=torch.rand(0, 8), rotary_sin=torch.rand(0, 8)), "^rotary_cos: expected"),
    (dict(rotary_cos=torch.rand(9), rotary_sin=torch.rand(9)), "^rotary_cos: expected"),
    (dict(rotary_sin=torch.rand(9, 4)), "^rotary_sin: expected"), (dict(rotary_sin=None), "^rotary_sin: expected"),
    (dict(rotary_cos=[1.0]), "^rotary_cos: expected a torch.Tensor"),
    (dict(cache_seqlens=3.5), "^cache_seqlens: expected an integer"),
    (dict(cache_seqlens=[3, 5]), "^cache_seqlens: expected an integer"),
    (dict(cache_seqlens=torch.zeros(2, dtype=torch.int32, device="meta")), "^cache_seqlens: expected"),
    (dict(k_cache=torch.zeros(2, 0, 2, 16), v_cache=torch.zeros(2, 0, 2, 16), block_table=torch.tensor([[0], [1]])),
     "^k_cache: expected pages of at least one row"),
    (dict(k=torch.zeros(2, 1, 2, 16, device="meta")), "^k: expected"),
    (dict(s_aux=torch.zeros(2, dtype=torch.int32)), "^s_aux: expected a floating dtype"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")
def test_refusals_of_new_rows_name_the_argument_and_write_nothing(change, words):
    arguments = call_of_2(**change)
    caches = [arguments[name] for name in ("k_cache", "v_cache")]
    before = [cache.clone() for cache in caches]
    with pytest.raises(RuntimeError, match=words):
        flash_attn.flash_attn_with_kvcache(**arguments)
    assert all(torch.equal(cache, old) for cache, old in zip(caches, before))


@pytest.mark.parametrize("change,words", [
    (dict(rotary_seqlens=torch.tensor([3])), r"^rotary_seqlens: expected shape \(2,\)"),
    (dict(cu_seqlens_k_new=torch.tensor([1, 1, 2])), "^cu_seqlens_k_new: expected values that rise from 0"),
    (dict(cu_seqlens_k_new=torch.zeros(3, 3, dtype=torch.int32)), r"^cu_seqlens_k_new: expected shape \(2 \+ 1,\)"),
    (dict(cu_seqlens_q=torch.tensor([], dtype=torch.int32)), r"^cu_seqlens_q: expected shape \(batch \+ 1,\)"),
    (dict(cu_seqlens_q=torch.tensor(2)), r"^cu_seqlens_q: expected shape \(batch \+ 1,\)")])
def test_refusals_of_version_3_name_the_argument(change, words):
    arguments = call_of_2(**change)
    for name, offsets in (("q", "cu_seqlens_q"), ("k", "cu_seqlens_k_new"), ("v", "cu_seqlens_k_new")):
        arguments[name] = arguments[name][:, 0] if offsets in change else arguments[name]
    with pytest.raises(RuntimeError, match=words):
        flash_attn_3.flash_attn_with_kvcache(**arguments)


def test_integers_of_64_bits_do_not_wrap():
    """A page or a slot of 2^32 is not page 0, and a length of 2^32 + 3 is not 3."""
    call = call_of_2(k=None, v=None, rotary_cos=None, rotary_sin=None)
    with pytest.raises(RuntimeError, match="^block_table: expected pages from 0 to 1"):
        flash_attn.flash_attn_with_kvcache(**{**call, "block_table": torch.tensor([[2**32], [1]])})
    with pytest.raises(RuntimeError, match="^cache_batch_idx: expected slots from 0 to 1"):
        flash_attn.flash_attn_with_kvcache(**{**call, "cache_batch_idx": torch.tensor([2**32, 1])})
    all_keys = flash_attn.flash_attn_with_kvcache(**{**call, "cache_seqlens": None})
    for lengths in (torch.tensor([2**32 + 3] * 2), 2**40):
        assert torch.equal(flash_attn.flash_attn_with_kvcache(**{**call, "cache_seqlens": lengths}), all_keys)


@pytest.mark.parametrize("used", [[5, 3], [4, 7], [-1, 3], [4], [1, 2, 3], [2.0, 3.0]], ids=str)
def test_rows_in_use_fit_their_sequences(used):
    """A length past its sequence, and one length for all, are refused by the name of the argument."""
    rows = torch.randn(10, 2, 16)
    offsets, used = torch.tensor([0, 4, 10], dtype=torch.int32), torch.tensor(used)
    used = used if used.is_floating_point() else used.to(torch.int32)
    with pytest.raises(RuntimeError, match="^seqused_k: expected"):
        flash_attn.flash_attn_varlen_func(rows, rows, rows, offsets, offsets, 6, 6, seqused_k=used)
    for name in ("seqused_q", "seqused_k"):
        with pytest.raises(RuntimeError, match=f"^{name}: expected"):
            flash_attn_3.flash_attn_varlen_func(rows, rows, rows, offsets, offsets, 6, 6, **{name: used})


def test_arguments_of_varlen_that_are_not_honoured_are_refused():
    rows, cache = torch.randn(10, 2, 16), torch.randn(2, 8, 2, 16)
    offsets, table = torch.tensor([0, 4, 10], dtype=torch.int32), torch.tensor([[0], [1]], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="^out: expected elements that are all distinct"):
        flash_attn.flash_attn_varlen_func(rows, rows, rows, offsets, offsets, 6, 6,
                                          out=torch.empty(1, 2, 16).expand(10, 2, 16))
    for dropout in (NAN, -0.5, 0.5):
        with pytest.raises(NotImplementedError, match="^dropout_p: expected 0"):
            flash_attn.flash_attn_varlen_func(rows, cache, cache, offsets, offsets, 6, 6, dropout, block_table=table)


def test_compiled():
    """torch.compile breaks its graph around the call, which writes into the caches that it was given."""
    arguments, other = call_of_2(), call_of_2()
    other.update({name: value.clone() for name, value in arguments.items()})
    call = lambda q, **rest: flash_attn.flash_attn_with_kvcache(q * 2, **rest) + 1  # noqa: E731
    assert torch.equal(torch.compile(call, backend="eager")(**arguments), call(**other))
    assert torch.equal(arguments["k_cache"], other["k_cache"]) and torch.equal(arguments["v_cache"], other["v_cache"])


@pytest.fixture
def asked(monkeypatch):
    """The kernels that calls on a cache ask for, None for plan()'s choice; without TESSERA_PROMPT_KERNEL at first."""
    kernels, run = [], _kvcache._Call.run

    def recorded(call, **changed):
        kernels.append(call._options.kernel)
        return run(call, **changed)
    monkeypatch.setattr(_kvcache._Call, "run", recorded)
    monkeypatch.delenv("TESSERA_PROMPT_KERNEL", raising=False)
    return kernels


def _prompt(rows):
    """(flash_attn_with_kvcache of both versions, flash_attn_varlen_func on pages) of a prompt of so many rows in pages,
    and what fp64 gives."""
    torch.manual_seed(3)
    pages, table = torch.randn(9, 16, 2, 2 * 32), torch.tensor([[4, 7, 2, 0, 8, 3]], dtype=torch.int32)
    k, v = pages.split(32, -1)
    q, keys = torch.randn(1, rows, 4, 32), torch.tensor([rows + 7], dtype=torch.int32)
    offsets = torch.tensor([0, rows], dtype=torch.int32)
    results = [flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=keys, block_table=table, causal=True),
               flash_attn_3.flash_attn_with_kvcache(q, k, v, cache_seqlens=keys, page_table=table, causal=True),
               flash_attn.flash_attn_varlen_func(q[0], k, v, offsets, None, rows, rows + 7, causal=True, block_table=table,
                                                 seqused_k=keys)[None]]
    rows_k, rows_v = (x[table[0].long()].flatten(0, 1)[:rows + 7] for x in (k, v))
    return results, expected(q[0], rows_k, rows_v, causal=True)[0]


@pytest.mark.parametrize("name", ["cpu.fa1", "cpu.standard.forward", "reference"])
def test_the_environment_names_the_kernel_of_prompts(asked, monkeypatch, name):
    """From 64 queries a sequence on; decoding and shorter chunks stay with plan()'s choice."""
    _prompt(64)
    assert asked == [None] * 3
    monkeypatch.setenv("TESSERA_PROMPT_KERNEL", name)
    _prompt(63)
    assert asked[3:] == [None] * 3
    results, want = _prompt(64)
    assert asked[6:] == [name.removesuffix(".forward").encode() + b".forward"] * 3
    for result in results:
        torch.testing.assert_close(result[0].double(), want, rtol=1e-5, atol=1e-5)
    monkeypatch.setenv("TESSERA_PROMPT_KERNEL", "")
    _prompt(64)
    assert asked[9:] == [None] * 3


def test_a_prompt_that_its_kernel_refuses_is_an_error_that_names_the_variable(asked, monkeypatch):
    known = _native.kernel_names()
    for name in ("cuda.fa9", "cpu.fa2.backward"):
        monkeypatch.setenv("TESSERA_PROMPT_KERNEL", name)
        with pytest.raises(RuntimeError, match="^TESSERA_PROMPT_KERNEL: expected one of .*cpu.fa2.forward.*, or one without "
                                               f"its pass, got '{name}'"):
            _prompt(64)
        assert len(_prompt(63)[0]) == 3, "it is not read for fewer queries"
    monkeypatch.setenv("TESSERA_PROMPT_KERNEL", "cuda.fa3.forward")
    with pytest.raises(RuntimeError, match="^TESSERA_PROMPT_KERNEL: expected a kernel that takes the call, got cuda.fa3"
                       if "cuda.fa3.forward" in known else "^TESSERA_PROMPT_KERNEL: expected one of "):
        _prompt(64)
    # An fp64 call, which cpu.fa1 does not take, with new rows: they are not written.
    monkeypatch.setenv("TESSERA_PROMPT_KERNEL", "cpu.fa1")
    q, new, cache = (torch.randn(1, rows, 2, 8, dtype=torch.float64) for rows in (64, 64, 128))
    before = cache.clone()
    with pytest.raises(RuntimeError, match="^TESSERA_PROMPT_KERNEL: expected a kernel that takes the call, got "
                                           "cpu.fa1.forward; no kernel takes this forward") as error:
        flash_attn.flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=0)
    assert "cpu.fa1.forward: does not take fp64" in str(error.value)
    assert torch.equal(cache, before)
