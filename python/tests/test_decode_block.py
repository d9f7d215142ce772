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


def everything(rng):
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


@pytest.fixture
def call(rng):
    return everything(rng)


def normed(x, weights, eps):
    return x / numpy.sqrt((x ** 2).mean(-1, keepdims=True) + eps) * weights


def turned(x, cos, sin, interleaved):
    rotary_dim = 2 * cos.shape[-1]
    first, second = (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)) if interleaved else (
        slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim))
    y = x.copy()
    y[..., first], y[..., second] = (x[..., first] * cos - x[..., second] * sin,
                                     x[..., second] * cos + x[..., first] * sin)
    return y


def place(c, b, row):
    """The indices of a row of sequence b in a cache."""
    slot = c["cache_batch_index"][b] if "cache_batch_index" in c else b
    return (c["page_table"][slot, row // PAGE], row % PAGE) if "page_table" in c else (slot, row)


def expected(c):
    """(out, o, lse, new keys, new values) in float64."""
    c = {name: value.astype(float) if getattr(value, "dtype", None) == numpy.float32 else value
         for name, value in c.items()}
    batch, eps, softcap = len(c["x"]), c.get("norm_eps", 1e-6), c.get("softcap", 0.0)
    scale = c.get("scale", 1 / math.sqrt(DIM))
    qkv = normed(c["x"], c["norm"], eps) @ c["w_qkv"].T + c.get("b_qkv", 0)
    q, k, v = numpy.split(qkv.reshape(batch, -1, DIM), (HEADS, HEADS + HEADS_KV), 1)
    if "q_norm" in c:
        q, k = normed(q, c["q_norm"], eps), normed(k, c["k_norm"], eps)
    if "rotary_cos" in c:
        cos, sin = (c[name][c.get("positions", c["kv_lengths"])][:, None] for name in ("rotary_cos", "rotary_sin"))
        q, k = (turned(t, cos, sin, c.get("rotary_interleaved", False)) for t in (q, k))
    o, lse = numpy.empty((batch, HEADS, DIM)), numpy.empty((batch, HEADS))
    for b, length in enumerate(c["kv_lengths"]):
        first = max(0, length - c.get("window_left", length), c["left_padding"][b] if "left_padding" in c else 0)
        keys, values = (numpy.array([c[name][place(c, b, row)] for row in range(first, length)] + [new[b]])
                        for name, new in (("k_cache", k), ("v_cache", v)))
        for h in range(HEADS):
            scores = scale * (keys[:, h * HEADS_KV // HEADS] @ q[b, h])
            scores = softcap * numpy.tanh(scores / softcap) if softcap else scores
            lse[b, h] = math.log(numpy.exp(scores).sum() + (math.exp(c["sinks"][h]) if "sinks" in c else 0))
            o[b, h] = numpy.exp(scores - lse[b, h]) @ values[:, h * HEADS_KV // HEADS]
    return o.reshape(batch, -1) @ c["w_o"].T + c.get("b_o", 0) + c.get("residual", c["x"]), o, lse, k, v


def expect_formulas(call):
    """The results and the new rows of the caches, beside which nothing changes."""
    before = {name: value.copy() for name, value in call.items() if hasattr(value, "copy")}
    want = expected({**call, **before})
    for got, right in zip(tessera.decode_block(**call, return_attention=True), want):
        numpy.testing.assert_allclose(got, right, rtol=2e-5, atol=2e-5)
    for name, new in (("k_cache", want[3]), ("v_cache", want[4])):
        cache = before[name].copy()
        for b, length in enumerate(call["kv_lengths"]):
            at = place(call, b, length)
            numpy.testing.assert_allclose(call[name][at], new[b], rtol=2e-5, atol=2e-5)
            cache[at] = call[name][at]
        numpy.testing.assert_array_equal(call[name], cache)


def test_everything_against_its_formulas(call):
    expect_formulas(call)


OTHER = {"a scale": dict(scale=0.4), "a large epsilon": dict(norm_eps=0.3),
         "neighbours are turned": dict(rotary_interleaved=True),
         "padding on the left": dict(left_padding=numpy.array([0, 5, 3], numpy.int32)),
         "some dimensions are turned": "rotary", "slots": "slots",
         "nothing optional": ("b_qkv", "b_o", "q_norm", "k_norm", "rotary_cos", "rotary_sin", "positions", "sinks",
                              "residual", "window_left", "softcap", "norm_eps")}


def changed(call, rng, name):
    """The arguments of a call that differ from `call` as OTHER says."""
    change = OTHER.get(name, {})
    if isinstance(change, tuple):
        return {n: value for n, value in call.items() if n not in change}
    if change == "rotary":
        change = {n: call[n][:, :DIM // 4].copy() for n in ("rotary_cos", "rotary_sin")}
    if change == "slots":
        call = {n: value for n, value in call.items() if n != "page_table"}
        change = dict(k_cache=numbers(rng, 5, 12, HEADS_KV, DIM), v_cache=numbers(rng, 5, 12, HEADS_KV, DIM),
                      cache_batch_index=numpy.array([4, 0, 2], numpy.int32))
    return {**call, **change}


@pytest.mark.parametrize("name", OTHER)
def test_other_arguments_against_their_formulas(call, rng, name):
    expect_formulas(changed(call, rng, name))


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


@pytest.mark.parametrize("name", ["everything", *OTHER])
def test_torch_compile_passes_every_argument_on(call, rng, name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    call = changed(call, rng, name)

    def tensors():
        return {n: torch.tensor(v) if isinstance(v, numpy.ndarray) else v for n, v in call.items()}

    def function(**c):
        return tessera.decode_block(**c, return_attention=True)
    eager, compiled = tensors(), tensors()
    want = function(**eager)
    torch._dynamo.reset()
    got = torch.compile(function, backend="eager", fullgraph=True)(**compiled)
    for one, other in zip((*got, *compiled.values()), (*want, *eager.values())):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_parameters_need_no_grad():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    call = torch_call(torch)
    call["w_o"] = torch.nn.Parameter(call["w_o"])
    with pytest.raises(ValueError, match="^w_o: expected a tensor without requires_grad"):
        tessera.decode_block(**call)
    with torch.no_grad():
        tessera.decode_block(**call)
