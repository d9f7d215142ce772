# SPDX-License-Identifier: Apache-2.0
"""decode_block: the attention block of a decode step against its formulas in NumPy and PyTorch's own operators."""
import math

import numpy
import pytest

import tessera

HIDDEN, HEADS, HEADS_KV, DIM, PAGE = 48, 6, 2, 16, 4
LENGTHS = (0, 9, 5)


def numbers(rng, *shape):
    return rng.standard_normal(shape).astype(numpy.float32)


@pytest.fixture
def call(rng):
    """The arguments of a call on pages, with everything that a block can have. Unused pages are NaN."""
    batch, rows = len(LENGTHS), (HEADS + 2 * HEADS_KV) * DIM
    table = rng.permutation(9).reshape(batch, 3).astype(numpy.int32)
    caches = [numpy.full((11, PAGE, HEADS_KV, DIM), numpy.nan, numpy.float32) for _ in range(2)]
    for cache in caches:
        for b, length in enumerate(LENGTHS):
            for row in range(length):
                cache[table[b, row // PAGE], row % PAGE] = numbers(rng, HEADS_KV, DIM)
    angles = numpy.arange(30)[:, None] * 100.0 ** (-numpy.arange(DIM // 2) / (DIM // 2))
    return dict(x=numbers(rng, batch, HIDDEN), norm=1 + 0.1 * numbers(rng, HIDDEN),
                w_qkv=numbers(rng, rows, HIDDEN) / 7, w_o=numbers(rng, HIDDEN, HEADS * DIM) / 9,
                k_cache=caches[0], v_cache=caches[1], kv_lengths=numpy.array(LENGTHS, numpy.int32), page_table=table,
                b_qkv=numbers(rng, rows), b_o=numbers(rng, HIDDEN), q_norm=numbers(rng, DIM), k_norm=numbers(rng, DIM),
                rotary_cos=numpy.cos(angles).astype(numpy.float32), rotary_sin=numpy.sin(angles).astype(numpy.float32),
                positions=numpy.array([3, 20, 5]), sinks=numbers(rng, HEADS), residual=numbers(rng, batch, HIDDEN),
                window_left=6, softcap=20.0, norm_eps=1e-5)


def normed(x, weights, eps):
    return x / numpy.sqrt((x ** 2).mean(-1, keepdims=True) + eps) * weights


def turned(x, cos, sin):
    a, b = x[..., :DIM // 2], x[..., DIM // 2:]
    return numpy.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


def expected(c):
    """(out, o, lse, new keys, new values) in float64."""
    c = {name: value.astype(float) if getattr(value, "dtype", None) == numpy.float32 else value
         for name, value in c.items()}
    batch = len(c["x"])
    qkv = normed(c["x"], c["norm"], c["norm_eps"]) @ c["w_qkv"].T + c["b_qkv"]
    q, k, v = numpy.split(qkv.reshape(batch, -1, DIM), (HEADS, HEADS + HEADS_KV), 1)
    cos, sin = (c[name][c["positions"]][:, None] for name in ("rotary_cos", "rotary_sin"))
    q, k = turned(normed(q, c["q_norm"], c["norm_eps"]), cos, sin), turned(normed(k, c["k_norm"], c["norm_eps"]), cos, sin)
    o, lse = numpy.empty((batch, HEADS, DIM)), numpy.empty((batch, HEADS))
    for b, length in enumerate(c["kv_lengths"]):
        rows = range(max(0, length - c["window_left"]), length)
        keys, values = (numpy.array([c[name][c["page_table"][b, row // PAGE], row % PAGE] for row in rows] + [new[b]])
                        for name, new in (("k_cache", k), ("v_cache", v)))
        for h in range(HEADS):
            scores = keys[:, h * HEADS_KV // HEADS] @ q[b, h] / math.sqrt(DIM)
            scores = c["softcap"] * numpy.tanh(scores / c["softcap"])
            lse[b, h] = math.log(numpy.exp(scores).sum() + math.exp(c["sinks"][h]))
            o[b, h] = numpy.exp(scores - lse[b, h]) @ values[:, h * HEADS_KV // HEADS]
    return o.reshape(batch, -1) @ c["w_o"].T + c["b_o"] + c["residual"], o, lse, k, v


def test_everything_against_its_formulas(call):
    before = {name: value.copy() for name, value in call.items() if hasattr(value, "copy")}
    want = expected({**call, **before})
    out, o, lse = tessera.decode_block(**call, return_attention=True)
    for got, right in zip((out, o, lse), want):
        numpy.testing.assert_allclose(got, right, rtol=2e-5, atol=2e-5)
    for name, new in (("k_cache", want[3]), ("v_cache", want[4])):
        cache = before[name].copy()
        for b, length in enumerate(LENGTHS):
            place = call["page_table"][b, length // PAGE], length % PAGE
            numpy.testing.assert_allclose(call[name][place], new[b], rtol=2e-5, atol=2e-5)
            cache[place] = call[name][place]
        numpy.testing.assert_array_equal(call[name], cache)


def test_out_may_be_x(call):
    other = {**call, "k_cache": call["k_cache"].copy(), "v_cache": call["v_cache"].copy(), "residual": None}
    want = tessera.decode_block(**other)
    x = call["x"].copy()
    assert tessera.decode_block(**{**call, "x": x, "residual": None}, out=x) is x
    numpy.testing.assert_array_equal(x, want)


def test_errors_name_the_argument(call):
    before = call["k_cache"].copy()
    for change, name in ((dict(x=call["x"][0]), "x"), (dict(w_qkv=call["w_qkv"][:-1]), "w_qkv"),
                         (dict(w_qkv=call["w_qkv"][:64]), "w_qkv"), (dict(w_qkv=call["w_qkv"].astype(int)), "w_qkv"),
                         (dict(w_o=call["w_o"].T), "w_o"), (dict(norm=call["norm"][1:]), "norm"),
                         (dict(k_norm=None), "k_norm"), (dict(rotary_sin=None), "rotary_sin"),
                         (dict(rotary_cos=call["rotary_cos"][0]), "rotary_cos"), (dict(b_o=call["b_o"][1:]), "b_o"),
                         (dict(kv_lengths=call["kv_lengths"].astype(numpy.int64)), "kv_lengths"),
                         (dict(page_table=call["page_table"] - 9), "page_table"), (dict(way="two launches"), "way"),
                         (dict(way="one launch"), "way"), (dict(window_left=-1), "window_left"),
                         (dict(softcap=-1.0), "softcap"), (dict(scale=math.nan), "scale"),
                         (dict(norm_eps="1"), "norm_eps"), (dict(threads=-1), "threads"), (dict(stream=3), "stream"),
                         (dict(out=call["x"][:, ::2]), "out"), (dict(workspace=5), "workspace"),
                         (dict(positions=numpy.array([0, 30, 0])), "positions"),
                         (dict(cache_batch_index=call["kv_lengths"]), "cache_batch_index"),
                         (dict(x=call["x"].astype(numpy.float16)), "x")):
        with pytest.raises(ValueError, match=f"^{name}: "):
            tessera.decode_block(**{**call, **change})
    numpy.testing.assert_array_equal(call["k_cache"], before)


def torch_call(torch):
    """A block in bfloat16 as a decoder of transformers has it, in slots."""
    random = torch.Generator().manual_seed(3)

    def draw(*shape, scale=1.0):
        return (scale * torch.randn(shape, generator=random)).bfloat16()

    batch, hidden, heads, heads_kv, dim, capacity = 3, 256, 8, 2, 64, 40
    angles = torch.arange(capacity)[:, None] * 1e4 ** (-torch.arange(dim // 2) / (dim // 2))
    return dict(x=draw(batch, hidden), norm=1 + draw(hidden, scale=0.1),
                w_qkv=draw((heads + 2 * heads_kv) * dim, hidden, scale=1 / 16),
                w_o=draw(hidden, heads * dim, scale=1 / 22), k_cache=draw(batch, capacity, heads_kv, dim),
                v_cache=draw(batch, capacity, heads_kv, dim), rotary_cos=angles.cos(), rotary_sin=angles.sin(),
                kv_lengths=torch.tensor([39, 0, 17], dtype=torch.int32))


def by_torch(torch, c):
    """The block by PyTorch's operators, each of which rounds to bfloat16."""
    F = torch.nn.functional
    batch, heads, heads_kv, dim = len(c["x"]), 8, 2, 64
    q, k, v = F.linear(F.rms_norm(c["x"], c["norm"].shape, c["norm"], 1e-6), c["w_qkv"]).view(
        batch, -1, dim).split((heads, heads_kv, heads_kv), 1)
    cos, sin = (torch.cat((c[name],) * 2, -1)[c["kv_lengths"].long()][:, None].bfloat16()
                for name in ("rotary_cos", "rotary_sin"))
    q, k = (t * cos + torch.cat((-t[..., dim // 2:], t[..., :dim // 2]), -1) * sin for t in (q, k))
    o = []
    for b, length in enumerate(c["kv_lengths"]):
        keys, values = (torch.cat((c[name][b, :length], new[b:b + 1])).transpose(0, 1)[None]
                        for name, new in (("k_cache", k), ("v_cache", v)))
        o.append(F.scaled_dot_product_attention(q[b][None, :, None], keys, values, enable_gqa=True).flatten())
    return F.linear(torch.stack(o), c["w_o"]) + c["x"]


def test_it_replaces_a_chain_of_torch():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    call = torch_call(torch)
    with torch.no_grad():
        want = by_torch(torch, call)
    got = tessera.decode_block(**call)
    assert got.dtype == torch.bfloat16
    assert (got.double() - want.double()).norm() < 6e-3 * want.double().norm()


def test_torch_compile_has_the_same_bits():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    eager, compiled = torch_call(torch), torch_call(torch)
    want = tessera.decode_block(**eager, return_attention=True)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    function = torch.compile(lambda **c: tessera.decode_block(**c, return_attention=True), backend=backend,
                             fullgraph=True)
    got = function(**compiled)
    assert len(graphs) == 1
    for one, other in zip((*want, eager["k_cache"], eager["v_cache"]), (*got, compiled["k_cache"], compiled["v_cache"])):
        assert torch.equal(one, other)
    out = torch.empty_like(want[0])
    assert torch.equal(torch.compile(lambda **c: tessera.decode_block(**c), backend=backend)(**torch_call(torch), out=out),
                       want[0])
    from tessera.torch import _decode_block_operator
    arguments = torch_call(torch)
    torch.library.opcheck(
        _decode_block_operator.decode_block, tuple(arguments[name] for name in (
            "x", "norm", "w_qkv", "w_o", "k_cache", "v_cache", "kv_lengths")) + (None,) * 4 +
        (arguments["rotary_cos"], arguments["rotary_sin"]) + (None,) * 7 +
        (True, 1e-6, False, None, None, 0.0, None, False, None), test_utils=("test_schema", "test_faketensor"))


def test_parameters_need_no_grad():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    call = torch_call(torch)
    call["w_o"] = torch.nn.Parameter(call["w_o"])
    with pytest.raises(ValueError, match="^w_o: expected a tensor without requires_grad"):
        tessera.decode_block(**call)
    with torch.no_grad():
        tessera.decode_block(**call)
