# SPDX-License-Identifier: Apache-2.0
"""tessera.jax on eight CPU devices (conftest.py makes them): what is sharded stays sharded, and nothing is gathered."""
import functools

import jax
import jax.numpy as jnp
import numpy
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from tessera.jax import dot_product_attention, export_checks

LEN_Q, LEN_KV, DIM = 6, 10, 8

pytestmark = pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="XLA_FLAGS was set without eight CPU devices")


def mesh_of(explicit=False, **axes):
    devices = numpy.array(jax.devices("cpu")[:8]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Explicit if explicit else AxisType.Auto,) * len(axes))


def inputs(rng, batch=8, heads=8, kv_heads=4, dtype="float32"):
    shapes = ((batch, LEN_Q, heads, DIM), (batch, LEN_KV, kv_heads, DIM), (batch, LEN_KV, kv_heads, DIM))
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def both_passes(q, k, v, bias=None, **keywords):
    """(o, lse, dq, dk, dv[, dbias]), with gradients of O and LSE that differ in each place."""
    def loss(arrays):
        o, lse = dot_product_attention(*arrays, is_causal=True, return_residual=True, **keywords)
        return jnp.sin(3 * o.astype(jnp.float32)).sum() + jnp.sin(lse).sum(), (o, lse)
    (_, results), gradients = jax.value_and_grad(loss, has_aux=True)((q, k, v) if bias is None else (q, k, v, bias))
    return (*results, *gradients)


def expect_close(got, want):
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv", "dbias"), got, want):
        assert numpy.abs(numpy.asarray(a) - numpy.asarray(b)).max() < 2e-6 * (1 + numpy.abs(b).max()), name


def gathers(function, *arrays):
    """The collectives that move shards of arrays, in the program of `function`."""
    text = jax.jit(function).lower(*arrays).compile().as_text()
    return [name for name in ("all-gather", "all-to-all", "collective-permute") if f"{name}(" in text]


def held(array, spec, mesh):
    """Whether `array` is sharded as `spec` says."""
    return array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)


SHARDINGS = {
    "batch": (dict(x=8), P("x"), P("x")),
    "batch over two axes": (dict(x=2, y=4), P(("x", "y")), P(("x", "y"))),
    "heads": (dict(h=4, x=2), P(None, None, "h"), P(None, None, "h")),
    "batch and heads": (dict(x=2, h=4), P("x", None, "h"), P("x", None, "h")),
    "batch and heads over two axes": (dict(x=2, h=2, g=2), P("x", None, ("h", "g")), P("x", None, ("h", "g"))),
    "more devices than heads of k": (dict(h=8), P(None, None, "h"), P()),
    "heads of k over one of two axes": (dict(h=4, g=2), P(None, None, ("h", "g")), P(None, None, "h")),
}


@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_a_sharding_is_kept_and_nothing_is_gathered(rng, name, explicit):
    axes, of_q, of_k = SHARDINGS[name]
    mesh = mesh_of(explicit, **axes)
    q, k, v = inputs(rng)
    want = both_passes(q, k, v)
    arrays = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in ((q, of_q), (k, of_k), (v, of_k))]
    got = jax.jit(both_passes)(*arrays)
    expect_close(got, want)
    of_lse = P(of_q[0] if len(of_q) else None, None, of_q[2] if len(of_q) > 2 else None)
    for result, spec in zip(got, (of_q, P(of_lse[0], None, of_lse[2]), of_q, of_k, of_k)):
        assert held(result, spec, mesh), (result.sharding, spec)
    assert gathers(both_passes, *arrays) == []


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("shape", [(8, 8), (1, 8), (8, 1), (1, 1)], ids=str)
def test_a_bias_of_any_broadcast_gets_its_whole_gradient(rng, shape, explicit):
    mesh = mesh_of(explicit, x=2, h=4)
    q, k, v = inputs(rng)
    bias = jnp.asarray(rng.standard_normal((*shape, LEN_Q, LEN_KV)), jnp.float32)
    want = both_passes(q, k, v, bias)
    sharded = [jax.device_put(a, NamedSharding(mesh, P("x", None, "h"))) for a in (q, k, v)]
    of_bias = P("x" if shape[0] > 1 else None, "h" if shape[1] > 1 else None)
    sharded.append(jax.device_put(bias, NamedSharding(mesh, of_bias)))
    got = jax.jit(both_passes)(*sharded)
    expect_close(got, want)
    assert held(got[-1], of_bias, mesh) and gathers(both_passes, *sharded) == []


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("of_q, of_k", [
    (P(None, "x"), P(None, "h")), (P(None, None, None, "x"), P("x")), (P("x"), P(None, None, "h")), (P(), P("x", "h")),
    (P(None, None, "x"), P("x"))], ids=str)
def test_any_other_sharding_gives_the_right_numbers(rng, of_q, of_k, explicit):
    mesh = mesh_of(explicit, x=2, h=2, rest=2)
    arrays = inputs(rng)
    sharded = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, (of_q, of_k, of_k))]
    expect_close(jax.jit(both_passes)(*sharded), both_passes(*arrays))


@pytest.mark.parametrize("heads, kv_heads, devices", [(8, 1, 8), (8, 2, 8), (8, 8, 8), (6, 3, 2), (12, 3, 4),
                                                      (6, 2, 3)])
def test_heads_of_any_ratio(rng, heads, kv_heads, devices):
    mesh = Mesh(numpy.array(jax.devices("cpu")[:devices]), ("h",))
    arrays = inputs(rng, 2, heads, kv_heads)
    specs = (P(None, None, "h"), *[P(None, None, "h" if kv_heads % devices == 0 else None)] * 2)
    if heads % devices:
        specs = (P(),) * 3
    sharded = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs)]
    got = jax.jit(both_passes)(*sharded)
    expect_close(got, both_passes(*arrays))
    assert held(got[0], specs[0], mesh)


BANDS = {
    "full": {}, "causal": dict(is_causal=True), "window": dict(local_window_size=(2, 1)),
    "narrow": dict(local_window_size=0), "left": dict(local_window_size=(1, 20)),
    "causal window": dict(is_causal=True, local_window_size=(3, 5)),
    "lengths": dict(is_causal=True, key_value_seq_lengths=jnp.array([3, 8], jnp.int32)),
}


@pytest.mark.parametrize("len_q, len_kv, explicit", [(8, 8, True), (8, 13, False), (16, 5, False)])
@pytest.mark.parametrize("band", BANDS)
def test_queries_that_are_sharded_stay_so(rng, band, len_q, len_kv, explicit):
    mesh = mesh_of(explicit, t=4, h=2)
    shapes = (2, len_q, 4, DIM), (2, len_kv, 2, DIM), (2, len_kv, 2, DIM), (1, 4, 1, len_kv), (1, 1, len_q, 1)
    *arrays, bias, other = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    specs = P(None, "t", "h"), P(None, None, "h"), P(None, None, "h"), P(None, "h"), P(None, None, "t")
    for b, spec in ((bias, specs[3]), (other, specs[4])):
        def loss(q, k, v, bias):
            o, lse = dot_product_attention(q, k, v, bias, return_residual=True, **BANDS[band])
            return jnp.sin(3 * o).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum(), o
        gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))
        sharded = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((*arrays, b), (*specs[:3], spec))]
        (_, o), got = gradients(*sharded)
        (_, want_o), want = gradients(*arrays, b)
        expect_close((o, 0, *got), (want_o, 0, *want))
        assert held(o, specs[0], mesh) and held(got[0], specs[0], mesh)
        if not explicit:  # a mask of the call has a type of its own there, whose gradient is gathered
            assert gathers(gradients, *sharded) == []


def test_bits_are_those_of_one_device(rng):
    arrays = inputs(rng, dtype="bfloat16")
    mesh = mesh_of(x=2, h=4)
    sharded = [jax.device_put(a, NamedSharding(mesh, P("x", None, "h"))) for a in arrays]
    for a, b in zip(jax.jit(both_passes)(*sharded), jax.jit(both_passes)(*arrays)):
        assert (numpy.asarray(a) == numpy.asarray(b)).all()


@pytest.mark.parametrize("heads, kv_heads", [(8, 2), (24, 3)])
def test_sums_over_devices_in_bf16_are_rounded_once(rng, heads, kv_heads):
    mesh = mesh_of(h=8)
    arrays = inputs(rng, 2, heads, kv_heads, "bfloat16")
    sharded = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, (P(None, None, "h"), P(), P()))]
    got = jax.jit(both_passes)(*sharded)
    exact = both_passes(*(a.astype(jnp.float32) for a in arrays))
    for a, b in zip(got[2:], exact[2:]):
        error = numpy.sqrt(numpy.mean((numpy.asarray(a, numpy.float32) - b) ** 2) / numpy.mean(b**2))
        assert a.dtype == jnp.bfloat16 and error < 4 * 2**-8


def test_an_eager_call_keeps_the_sharding(rng):
    mesh = mesh_of(x=8)
    arrays = inputs(rng)
    o = dot_product_attention(*[jax.device_put(a, NamedSharding(mesh, P("x"))) for a in arrays])
    assert held(o, P("x"), mesh)
    assert jnp.allclose(numpy.asarray(o), dot_product_attention(*arrays), atol=1e-6)


@pytest.mark.parametrize("mapped, of_q", [(0, P("x")), (0, P(None, "x")), (1, P("x", None, None, "h"))], ids=str)
def test_vmap_keeps_the_sharding_of_each_part_of_the_batch(rng, mapped, of_q):
    mesh = mesh_of(x=2, h=4)
    q, k, v = (jnp.stack([a] * 4, 0) * jnp.arange(1, 5).reshape(4, 1, 1, 1, 1) for a in inputs(rng, 4))
    function = jax.vmap(lambda q, k, v: dot_product_attention(q, k, v, is_causal=True), mapped, mapped)
    sharded = [jax.device_put(a, NamedSharding(mesh, of_q)) for a in (q, k, v)]
    o = jax.jit(function)(*sharded)
    assert jnp.allclose(numpy.asarray(o), function(q, k, v), atol=1e-6)
    assert held(o, of_q, mesh) and gathers(function, *sharded) == []


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_masks_and_lengths_of_a_sharded_batch(rng, explicit):
    mesh = mesh_of(explicit, x=8)
    arrays = inputs(rng)
    lengths = jnp.arange(1, 9, dtype=jnp.int32)

    def function(q, k, v, lengths):
        return both_passes(q, k, v, key_value_seq_lengths=lengths, query_seq_lengths=jnp.minimum(lengths, LEN_Q))
    sharded = [jax.device_put(a, NamedSharding(mesh, P("x"))) for a in (*arrays, lengths)]
    got = jax.jit(function)(*sharded)
    expect_close(got, function(*arrays, lengths))
    assert all(held(r, P("x"), mesh) for r in got) and gathers(function, *sharded) == []


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("of_q, of_k, some", [
    (P("x"), P("x"), None), (P("x", None, "h"), P("x", None, "h"), None), (P(None, "x"), P(), None),
    (P(None, "x"), P("h"), {"x"}), (P("x"), P("x"), {"x"}), (P(None, None, "h"), P(None, None, "h"), {"h"})], ids=str)
def test_shard_map_with_its_default_checks_has_gradients(rng, of_q, of_k, some, explicit):
    """A part of k that is on every device gets the sum of their gradients."""
    mesh = mesh_of(explicit, x=2, h=4)
    arrays = inputs(rng)

    def loss(q, k, v):
        o, lse = dot_product_attention(q, k, v, return_residual=True)
        return jnp.sin(3 * o).sum() + jnp.sin(lse).sum()

    def part(q, k, v):
        axes = tuple(a for a in of_q if a is not None)
        return jax.lax.psum(loss(q, k, v), axes)
    manual = tuple(P(*(a if some is None or a in some else None for a in spec)) for spec in (of_q, of_k, of_k))
    mapped = jax.shard_map(part, mesh=mesh, in_specs=manual, out_specs=P(), axis_names=some or {"x", "h"})
    sharded = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, (of_q, of_k, of_k))]
    got = jax.jit(jax.grad(mapped, (0, 1, 2)))(*sharded)
    for name, a, b in zip(("dq", "dk", "dv"), got, jax.grad(loss, (0, 1, 2))(*arrays)):
        assert numpy.abs(numpy.asarray(a) - b).max() < 1e-5, name


def test_export_for_several_devices_by_shard_map(rng):
    mesh = mesh_of(x=8)
    arrays = inputs(rng)
    spec = NamedSharding(mesh, P("x"))
    mapped = jax.shard_map(functools.partial(dot_product_attention, is_causal=True), mesh=mesh, in_specs=P("x"),
                           out_specs=P("x"))
    exported = jax.export.export(jax.jit(mapped, in_shardings=spec), disabled_checks=export_checks())(*arrays)
    o = jax.jit(exported.call)(*[jax.device_put(a, spec) for a in arrays])
    assert exported.nr_devices == 8 and held(o, P("x"), mesh)
    assert jnp.allclose(numpy.asarray(o), dot_product_attention(*arrays, is_causal=True), atol=1e-6)


def test_an_axis_of_vmap_over_devices(rng):
    mesh = mesh_of(x=8)
    q, k, v = inputs(rng)
    function = jax.vmap(functools.partial(dot_product_attention, is_causal=True), spmd_axis_name="x")
    sharded = [jax.device_put(a, NamedSharding(mesh, P("x"))) for a in (q, k, v)]
    o = jax.jit(function)(*sharded)
    assert held(o, P("x"), mesh) and jnp.allclose(numpy.asarray(o), dot_product_attention(q, k, v, is_causal=True))
