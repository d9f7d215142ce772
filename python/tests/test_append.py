# SPDX-License-Identifier: Apache-2.0
"""append_kv: where new rows go, rotary and norm against their formulas, and what attention then reads."""
import numpy
import pytest

import tessera


def rows_and_cache(rng, rows, places, dtype=numpy.float32, heads=2, dim=8):
    k, v = (rng.standard_normal((rows, heads, dim)).astype(dtype) for _ in range(2))
    k_cache, v_cache = (numpy.full((*places, heads, dim), -1, dtype) for _ in range(2))
    return k, v, k_cache, v_cache


@pytest.mark.parametrize("page", [1, 3, 4])
def test_by_slots(rng, page):
    k, v, k_cache, v_cache = rows_and_cache(rng, 5, (12 // page, page))
    slots = numpy.array([7, -1, 0, 12, 11])
    assert tessera.append_kv(k, v, k_cache, v_cache, slot_mapping=slots) is None
    want = numpy.full((12, 2, 8), -1, numpy.float32)
    for row, slot in enumerate(slots):
        if 0 <= slot < 12:
            want[slot] = k[row]
    assert (k_cache.reshape(12, 2, 8) == want).all()
    assert (v_cache.reshape(12, 2, 8)[7] == v[0]).all()


def test_at_lengths_is_by_slots(rng):
    k, v, k_cache, v_cache = rows_and_cache(rng, 6, (5, 2))
    other = k_cache.copy(), v_cache.copy()
    table = numpy.array([[4, 1], [-1, 0], [2, 99]], numpy.int32)
    lengths = numpy.array([1, -1, 1], numpy.int32)
    tessera.append_kv(k.reshape(3, 2, 2, 8), v.reshape(3, 2, 2, 8), k_cache, v_cache, kv_lengths=lengths,
                      page_table=table)
    tessera.append_kv(k, v, *other, slot_mapping=numpy.array([9, 2, -1, -1, 5, -1], numpy.int32))
    assert (k_cache == other[0]).all() and (v_cache == other[1]).all()
    assert (k_cache != -1).any()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [4, 2])
def test_rotary_and_norm(rng, interleaved, pairs):
    k, v, k_cache, v_cache = rows_and_cache(rng, 3, (1, 8))
    q = rng.standard_normal((3, 4, 8), dtype=numpy.float32)
    angles = numpy.arange(9)[:, None] * 50.0 ** (-numpy.arange(pairs) / pairs)
    positions = numpy.array([8, 0, 3])
    weights = rng.standard_normal(8, dtype=numpy.float32)
    turned = tessera.append_kv(k, v, k_cache, v_cache, slot_mapping=numpy.arange(3), positions=positions, q=q,
                               rotary_cos=numpy.cos(angles).astype(numpy.float32),
                               rotary_sin=numpy.sin(angles).astype(numpy.float32), rotary_interleaved=interleaved,
                               q_norm=weights, k_norm=weights, norm_eps=0.01)

    def expected(x):
        y = x / numpy.sqrt((x.astype(float) ** 2).mean(-1, keepdims=True) + 0.01) * weights
        z = y.copy()
        for n in range(pairs):
            a, b = (2 * n, 2 * n + 1) if interleaved else (n, n + pairs)
            cos, sin = (f(angles[positions, n])[:, None] for f in (numpy.cos, numpy.sin))
            z[..., a], z[..., b] = y[..., a] * cos - y[..., b] * sin, y[..., a] * sin + y[..., b] * cos
        return z

    numpy.testing.assert_allclose(k_cache[0, :3], expected(k), rtol=2e-6, atol=2e-6)
    numpy.testing.assert_allclose(turned, expected(q), rtol=2e-6, atol=2e-6)
    assert (v_cache[0, :3] == v).all() and (k_cache[0, 3:] == -1).all()


def test_errors_name_the_argument(rng):
    k, v, k_cache, v_cache = rows_and_cache(rng, 3, (2, 4))
    slots, before = numpy.arange(3), k_cache.copy()
    for change, name in ((dict(slot_mapping=None), "kv_lengths"), (dict(slot_mapping=slots[:2]), "slot_mapping"),
                         (dict(slot_mapping=slots.astype(numpy.float32)), "slot_mapping"),
                         (dict(page_table=numpy.zeros((1, 1), numpy.int32)), "page_table"),
                         (dict(norm_eps=0), "norm_eps"), (dict(threads=-1), "threads"),
                         (dict(norm_eps=None), "norm_eps"), (dict(norm_eps="1"), "norm_eps"),
                         (dict(threads=2**40), "threads"), (dict(stream=5), "stream"),
                         (dict(slot_mapping=slots.astype(numpy.uint8)), "slot_mapping"),
                         (dict(out_q=k.copy()), "out_q"), (dict(k=k[:, :1]), "v"), (dict(k=k[..., :4]), "k_cache")):
        with pytest.raises(ValueError, match=f"^({name}): "):
            tessera.append_kv(**{**dict(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slots), **change})
    k_cache.setflags(write=False)
    with pytest.raises(ValueError, match="k_cache: "):
        tessera.append_kv(k, v, k_cache, v_cache, slot_mapping=slots)
    assert (k_cache == before).all()


def test_torch_views_of_one_storage(rng):
    """K and V side by side in the last dimension, as vLLM has them, in bfloat16."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    cache = torch.zeros(3, 4, 2, 16, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 8, dtype=torch.bfloat16) for _ in range(2))
    tessera.append_kv(k, v, cache[..., :8], cache[..., 8:], slot_mapping=torch.tensor([9, -1]))
    assert torch.equal(cache[2, 1], torch.cat((k[0], v[0]), -1)) and cache.count_nonzero() <= 32


def test_parameters_as_weights(rng):
    """Weights of a norm are parameters of a model: taken where no gradient is recorded, and refused where one would be
    lost."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    k, v, k_cache, v_cache = map(torch.from_numpy, rows_and_cache(rng, 3, (1, 4)))
    weights, slots, other = torch.rand(8), torch.arange(3), k_cache.clone()
    tessera.append_kv(k, v, other, v_cache.clone(), slot_mapping=slots, k_norm=weights)
    call = dict(slot_mapping=slots, k_norm=torch.nn.Parameter(weights))
    with pytest.raises(ValueError, match="^k_norm: expected a tensor without requires_grad"):
        tessera.append_kv(k, v, k_cache, v_cache, **call)
    assert (k_cache == -1).all()
    with torch.no_grad():
        tessera.append_kv(k, v, k_cache, v_cache, **call)
    assert torch.equal(k_cache, other) and not torch.equal(k_cache[0, :3], k)


def test_overlapping_caches(rng):
    """Pages of one storage of which V's are K's of the next number: right where rows have places of their own."""
    k, v, storage, _ = rows_and_cache(rng, 2, (6, 4))
    k_cache, v_cache = storage[:-1], storage[1:]
    tessera.append_kv(k, v, k_cache, v_cache, slot_mapping=numpy.array([1, 11]))  # pages 0 and 2 of K, 1 and 3 of V
    assert (storage[[0, 2], [1, 3]] == k).all() and (storage[[1, 3], [1, 3]] == v).all()
    before = storage.copy()
    with pytest.raises(ValueError, match="^v_cache: expected memory of its own for each new row, got row 0 of v in the "
                                         "memory of row 1 of k"):
        tessera.append_kv(k, v, k_cache, v_cache, slot_mapping=numpy.array([1, 5]))
    with pytest.raises(ValueError, match="^v_cache: expected rows that share no memory with those of k_cache"):
        tessera.append_kv(k, v, storage, storage, slot_mapping=numpy.array([1, 11]))
    assert (storage == before).all()


@pytest.mark.parametrize("in_place", [False, True])
def test_under_torch_compile(rng, in_place):
    """One graph: the operator says what it writes, and K and V may be views of one storage."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    k, v, q = (torch.from_numpy(rng.standard_normal((3, heads, 8), dtype=numpy.float32)) for heads in (2, 2, 4))
    angles = torch.arange(9)[:, None] * torch.rand(4)
    call = dict(slot_mapping=torch.tensor([5, -1, 2]), rotary_cos=angles.cos(), rotary_sin=angles.sin(),
                positions=torch.tensor([8, 0, 3]), k_norm=torch.rand(8))

    def run(cache, q):
        turned = tessera.append_kv(k * 2, v, cache[..., :8], cache[..., 8:], q=q, out_q=q if in_place else None, **call)
        return turned + cache.sum()

    caches, queries = [torch.zeros(2, 4, 2, 16) for _ in range(2)], [q.clone() for _ in range(2)]
    want = run(caches[0], queries[0])
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(caches[1], queries[1])
    assert torch.equal(*caches) and torch.equal(*queries) and torch.equal(got, want)
    assert caches[0].any() and torch.equal(queries[0], q) != in_place
