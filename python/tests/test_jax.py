# SPDX-License-Identifier: Apache-2.0
"""tessera.jax beside fp64, and beside jax.nn's own function for what is JAX's: jit, grad, vmap, masks, lengths."""
import importlib.util

import jax
import jax.numpy as jnp
import numpy
import pytest
from jax.test_util import check_grads
from reference import Reference, check_gradient, check_lse, check_o

from tessera import _jax_calls
from tessera.jax import dot_product_attention, export_checks


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Arrays are made on the CPU, also where JAX has a GPU; test_jax_cuda.py is for that."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


KEYS = numpy.array([13, 29], numpy.int32)


def inputs(rng, dtype="float32", batch=2, t=29, s=29, heads=4, kv_heads=2, dim=16):
    shapes = ((batch, t, heads, dim), (batch, s, kv_heads, dim), (batch, s, kv_heads, dim))
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def heads_before_len(lse):
    return numpy.asarray(lse).transpose(0, 2, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s", [29, 41])
def test_against_fp64(rng, dtype, causal, s):
    q, k, v = inputs(rng, dtype, s=s)

    def loss(q, k, v):
        o, lse = dot_product_attention(q, k, v, is_causal=causal, return_residual=True)
        return (o.astype(jnp.float32) * weights).sum() + (lse * lse_weights).sum(), (o, lse)
    weights = jnp.asarray(rng.standard_normal(q.shape), dtype).astype(jnp.float32)
    lse_weights = jnp.asarray(rng.standard_normal(q.shape[:3]), jnp.float32)
    gradients, (o, lse) = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    ref = Reference(*map(numpy.asarray, (q, k, v)), causal="top-left" if causal else None)
    check_o(numpy.asarray(o), ref, dtype)
    check_lse(heads_before_len(lse), ref)
    expected = ref.backward(numpy.asarray(weights), heads_before_len(lse_weights))
    for name, got, right in zip(("dq", "dk", "dv"), gradients, expected):
        check_gradient(name, numpy.asarray(got), right, dtype)


@pytest.mark.parametrize("s, keywords", [
    (29, {}), (33, dict(is_causal=True, scale=0.1)), (33, dict(local_window_size=4)),
    (29, dict(local_window_size=(2, 1))), (29, dict(is_causal=True, local_window_size=(3, 9))),
    (33, dict(local_window_size=(7, 2))), (33, dict(query_seq_lengths=KEYS, key_value_seq_lengths=KEYS,
                                                    is_causal=True)),
], ids=lambda value: ",".join(value) if isinstance(value, dict) else str(value))
def test_means_what_jax_nn_means(rng, s, keywords):
    q, k, v = inputs(rng, s=s)
    bias = jnp.asarray(rng.standard_normal((1, 4, 29, s)), jnp.float32)
    mask = jnp.asarray(rng.random((2, 1, 29, s)) < 0.8).at[..., 0].set(True)

    def gradients(function):
        def loss(q, k, v, bias):
            return jnp.sin(function(q, k, v, bias, mask if not keywords else None, **keywords)).sum()
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(q, k, v, bias)
    (ours, got), (theirs, expected) = gradients(dot_product_attention), gradients(jax.nn.dot_product_attention)
    assert abs(ours - theirs) < 1e-3
    for name, a, b in zip(("dq", "dk", "dv", "dbias"), got, expected):
        assert jnp.abs(a - b).max() < 1e-5, name


def test_vmap_folds_the_batch(rng):
    q, k, v = inputs(rng)
    bias = jnp.asarray(rng.standard_normal((1, 4, 29, 29)), jnp.float32)
    many = jnp.stack([q, 2 * q, 3 * q])

    def one(q, bias):
        return dot_product_attention(q, k, v, bias, is_causal=True)
    assert (jax.vmap(one, (0, None))(many, bias) == jnp.stack([one(x, bias) for x in many])).all()
    deep = jax.vmap(jax.vmap(one, (0, None)), (None, 0))(many, jnp.stack([bias, -bias]))
    assert deep.shape == (2, 3, *q.shape) and (deep[1, 2] == one(3 * q, -bias)).all()

    def slope(q, bias):
        return jax.grad(lambda b: jnp.sin(one(q, b)).sum())(bias)
    expected = jnp.stack([slope(x, bias) for x in many])
    assert jnp.allclose(jax.vmap(slope, (0, None))(many, bias), expected, atol=1e-6)
    total = jax.grad(lambda b: jax.vmap(lambda q: jnp.sin(one(q, b)).sum())(many).sum())(bias)
    assert jnp.allclose(total, expected.sum(0), atol=1e-5)


def test_without_a_batch(rng):
    q, k, v = inputs(rng)
    o, lse = dot_product_attention(q[1], k[1], v[1], return_residual=True)
    whole, whole_lse = dot_product_attention(q, k, v, return_residual=True)
    assert o.shape == q.shape[1:] and lse.shape == q.shape[1:3]
    assert (o == whole[1]).all() and (lse == whole_lse[1]).all()


def test_gradient_in_fp64_by_differences(rng):
    with jax.enable_x64(True):
        q, k, v = (a[:, :5] for a in inputs(rng, jnp.float64, dim=8))
        bias = jnp.asarray(rng.standard_normal((2, 1, 5, 5)), jnp.float64)

        def function(q, k, v, bias):
            return dot_product_attention(q, k, v, bias, is_causal=True, softcap=2.0, return_residual=True)
        check_grads(function, (q, k, v, bias), order=1, modes=["rev"])


def test_a_row_without_a_key_gives_nothing(rng):
    q, k, v = inputs(rng)
    o, lse = dot_product_attention(q, k, v, key_value_seq_lengths=jnp.array([0, 29], jnp.int32), return_residual=True)
    assert (o[0] == 0).all() and (lse[0] == -jnp.inf).all() and jnp.isfinite(o[1]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("s", [29, 41, 11], ids=["square", "more keys", "fewer keys"])
@pytest.mark.parametrize("implementation", ["tessera", "xla"])
def test_sinks(rng, dtype, s, implementation):
    """O, LSE and all gradients against fp64."""
    q, k, v = inputs(rng, dtype, s=s)
    sinks = jnp.asarray([0.5, -1.0, 6.0, -jnp.inf], jnp.float32)
    weights = jnp.asarray(rng.standard_normal(q.shape), dtype).astype(jnp.float32)
    lse_weights = jnp.asarray(rng.standard_normal(q.shape[:3]), jnp.float32).at[..., 3].set(0)

    def loss(q, k, v, sinks):
        o, lse = dot_product_attention(q, k, v, sinks=sinks, is_causal=True, implementation=implementation,
                                       return_residual=True)
        return (o.astype(jnp.float32) * weights).sum() + jnp.where(lse_weights == 0, 0, lse * lse_weights).sum(), (o, lse)
    gradients, (o, lse) = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(q, k, v, sinks)
    ref = Reference(*map(numpy.asarray, (q, k, v)), causal="top-left", sinks=numpy.asarray(sinks))
    if dtype == "float32":
        check_o(numpy.asarray(o), ref, dtype)
    else:  # rounded twice
        assert numpy.abs(numpy.asarray(o, numpy.float64) - ref.o).max() < 0.02
    check_lse(heads_before_len(lse), ref)
    expected = [*ref.backward(numpy.asarray(weights), heads_before_len(lse_weights))[:3], ref.dsinks]
    for name, got, right in zip(("dq", "dk", "dv"), gradients, expected):
        check_gradient(name, numpy.asarray(got), right, dtype)
    numpy.testing.assert_allclose(gradients[3], expected[3], rtol=1e-4 if dtype == "float32" else 0.1, atol=1e-4)


def test_a_sink_of_a_row_without_a_key(rng):
    q, k, v = inputs(rng)
    sinks = jnp.asarray([0.5, -1.0, 6.0, 0.1], jnp.float32)
    o, lse = dot_product_attention(q, k, v, key_value_seq_lengths=jnp.array([0, 29], jnp.int32), sinks=sinks,
                                   return_residual=True)
    assert (o[0] == 0).all() and (lse[0] == sinks).all() and jnp.isfinite(o[1]).all()


def test_wrong_arguments_are_named(rng):
    q, k, v = inputs(rng)
    for pattern, call in (
            ("^query: expected dtype float32", lambda: dot_product_attention(q.astype(int), k, v)),
            ("^value: expected dtype float32, as query has", lambda: dot_product_attention(q, k, v.astype("float16"))),
            ("^key: expected shape", lambda: dot_product_attention(q, k[:1], v)),
            ("^key: expected 3 dimensions in all", lambda: dot_product_attention(q[0], k, v)),
            ("^query: expected a multiple of key's 2 heads", lambda: dot_product_attention(q[:, :, :3], k, v)),
            ("^bias: expected a shape that broadcasts", lambda: dot_product_attention(q, k, v, jnp.zeros((3, 29)))),
            ("^mask: expected dtype bool", lambda: dot_product_attention(q, k, v, mask=jnp.zeros((29, 29)))),
            ("^local_window_size: ", lambda: dot_product_attention(q, k, v, local_window_size=-1)),
            ("^key_value_seq_lengths: ", lambda: dot_product_attention(q, k, v, key_value_seq_lengths=jnp.ones(3)))):
        with pytest.raises(ValueError, match=pattern):
            call()


@pytest.mark.parametrize("implementation", ["tessera", "xla"])
def test_every_implementation_has_one_meaning(rng, implementation):
    q, k, v = inputs(rng, s=33)
    bias = jnp.asarray(rng.standard_normal((1, 4, 29, 33)), jnp.float32)
    options = dict(is_causal=True, local_window_size=(9, 1), softcap=2.0, key_value_seq_lengths=jnp.array([0, 30]),
                   query_seq_lengths=KEYS, return_residual=True)

    def run(implementation):
        def loss(*arrays):
            o, lse = dot_product_attention(*arrays, implementation=implementation, **options)
            return jnp.sin(3 * o).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum(), (o, lse)
        gradients, results = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(q, k, v, bias)
        return *results, *gradients
    for name, got, want in zip("o lse dq dk dv dbias".split(), run(implementation), run(None)):
        finite = jnp.isfinite(want)
        assert (jnp.isfinite(got) == finite).all() and jnp.abs(jnp.where(finite, got - want, 0)).max() < 1e-5, name


def test_numbers_of_numpy_are_numbers(rng):
    q, k, v = inputs(rng)
    got = dot_product_attention(q, k, v, scale=numpy.float32(0.5), is_causal=numpy.True_, softcap=numpy.float64(2),
                                local_window_size=numpy.int64(3), key_value_seq_lengths=numpy.array([13, 29]))
    pair = dot_product_attention(q, k, v, scale=0.5, is_causal=True, softcap=2.0, key_value_seq_lengths=KEYS,
                                 local_window_size=(numpy.int32(3), numpy.uint8(3)))
    want = dot_product_attention(q, k, v, scale=0.5, is_causal=True, softcap=2.0, local_window_size=3,
                                 key_value_seq_lengths=KEYS)
    assert (got == want).all() and (pair == want).all()


def test_what_is_no_bias_and_what_is_not_static(rng):
    q, k, v = inputs(rng)
    with pytest.raises(ValueError, match="^bias: expected numbers .* got bool; mask= takes one"):
        dot_product_attention(q, k, v, bias=jnp.ones((q.shape[1], k.shape[1]), bool))
    for name, value in (("scale", 0.5), ("softcap", 2.0), ("is_causal", True)):
        with pytest.raises(ValueError, match=f"^{name}: expected a .* known when the call is traced, got a traced array"):
            jax.jit(lambda value: dot_product_attention(q, k, v, **{name: value}))(value)


def small(implementation=None):
    def function(q, k, v):
        return dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    return function


def test_other_derivatives_name_the_call_and_the_way_out(rng):
    q, k, v = (a[:1, :4, :, :4] for a in inputs(rng, heads=2))

    def loss(q):
        return jnp.sin(small()(q, k, v)).sum()
    under_jit, one = jax.jit(loss), q[None]

    def loop(q):
        return jax.lax.scan(lambda carry, _: (small()(carry, k, v), None), q, None, length=2)[0].sum()
    for derivative in (lambda: jax.jvp(loss, (q,), (q,)), lambda: jax.jvp(under_jit, (q,), (q,)),
                       lambda: jax.jit(lambda q: jax.jvp(loss, (q,), (q,)))(q),
                       lambda: jax.jit(lambda q: jax.jvp(under_jit, (q,), (q,))).lower(q),
                       lambda: jax.linearize(loss, q)[1](q), lambda: jax.linearize(under_jit, q)[1](q),
                       lambda: jax.jacfwd(loss)(q), lambda: jax.jacfwd(under_jit)(q),
                       lambda: jax.jit(jax.jacfwd(loss))(q), lambda: jax.hessian(loss)(q),
                       lambda: jax.hessian(under_jit)(q), lambda: jax.jit(jax.hessian(loss))(q),
                       lambda: jax.vmap(lambda q: jax.jvp(loss, (q,), (q,)))(one),
                       lambda: jax.vmap(lambda q: jax.jvp(under_jit, (q,), (q,)))(one),
                       lambda: jax.jvp(jax.jit(jax.vmap(loss)), (one,), (one,)),
                       lambda: jax.jvp(jax.jit(loop), (q,), (q,)),
                       lambda: jax.jvp(jax.jit(jax.checkpoint(loss)), (q,), (q,)),
                       lambda: jax.jvp(jax.grad(under_jit), (q,), (q,)),
                       lambda: jax.grad(lambda q: jax.grad(loss)(q).sum())(q)):
        with pytest.raises(NotImplementedError, match='tessera.jax.dot_product_attention: .* implementation="xla"'):
            derivative()
    with jax.enable_x64(True):
        arrays = [a.astype(jnp.float64) for a in (q, k, v)]
        check_grads(small("xla"), arrays, order=2, modes=["fwd", "rev"])


def test_reverse_mode_within_other_transforms(rng):
    q, k, v = (a[:1, :4, :, :4] for a in inputs(rng, heads=2))

    def loss(q, implementation=None):
        return jnp.sin(small(implementation)(q, k, v)).sum()

    def loop(q, implementation=None):
        return jax.lax.scan(lambda carry, _: (small(implementation)(carry, k, v), None), q, None, length=2)[0].sum()
    want = jax.grad(loss)(q, "xla")
    for derivative in (jax.grad(jax.jit(loss)), jax.jit(jax.grad(loss)), jax.jit(jax.grad(jax.checkpoint(loss))),
                       jax.jacrev(loss), lambda q: jax.vjp(loss, q)[1](1.0)[0],
                       lambda q: jax.linear_transpose(jax.linearize(loss, q)[1], q)(1.0)[0],
                       lambda q: jax.vmap(jax.grad(loss))(q[None])[0],
                       lambda q: jax.grad(lambda x: jax.vmap(loss)(x).sum())(q[None])[0]):
        assert jnp.allclose(derivative(q), want, atol=1e-5)
    assert jnp.allclose(jax.jit(jax.grad(jax.checkpoint(loop)))(q), jax.grad(loop)(q, "xla"), atol=1e-5)


def test_export(rng):
    q, k, v = inputs(rng)
    exported = jax.export.export(jax.jit(small()), disabled_checks=export_checks())(q, k, v)
    if importlib.util.find_spec("flatbuffers"):
        exported = jax.export.deserialize(exported.serialize(vjp_order=0))
    assert (exported.call(q, k, v) == small()(q, k, v)).all()
    gradient = jax.jit(jax.grad(lambda *a: small()(*a).sum(), (0, 1, 2)))
    exported = jax.export.export(gradient, disabled_checks=export_checks())(q, k, v)
    assert all((a == b).all() for a, b in zip(exported.call(q, k, v), gradient(q, k, v)))
    with pytest.raises(ValueError, match="no compatibility guarantees"):
        jax.export.export(jax.jit(small()))(q, k, v)


def test_symbolic_shapes(rng):
    arrays = inputs(rng)
    batch, length = jax.export.symbolic_shape("batch, length")
    symbolic = [jax.ShapeDtypeStruct((batch, length, *a.shape[2:]), a.dtype) for a in arrays]
    with pytest.raises(ValueError, match=r'^query: expected a shape of numbers.*"xla".*\(batch, length, 4, 16\)'):
        jax.export.export(jax.jit(small()), disabled_checks=export_checks())(*symbolic)
    exported = jax.export.export(jax.jit(small("xla")))(*symbolic)
    assert jnp.abs(exported.call(*arrays) - small()(*arrays)).max() < 1e-5


def test_implementations_are_those_of_jax_nn(rng):
    q, k, v = inputs(rng)
    with pytest.raises(ValueError, match="^implementation: expected one of None, 'tessera', 'xla', 'cudnn', got 'x'"):
        dot_product_attention(q, k, v, implementation="x")
    with pytest.raises(ValueError, match="^softcap: expected 0 with implementation='cudnn'"):
        dot_product_attention(q, k, v, softcap=1.0, implementation="cudnn")
    if jax.default_backend() == "cpu":
        with pytest.raises(Exception, match="(?i)cudnn"):
            dot_product_attention(q, k, v, implementation="cudnn")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_traced_call_serves_the_cpu_and_cuda(rng, monkeypatch, dtype):
    """A process with a GPU traces a call for both platforms: its workspace is that of the larger kernel, and the
    forward of a training step in 16 bits keeps the residual of O, which kernels of the CPU don't have."""
    q, k, v = jax.device_put(inputs(rng, dtype), jax.devices("cpu")[0])

    def loss(q, k, v):
        return (dot_product_attention(q, k, v, is_causal=True).astype(jnp.float32) ** 2).sum()

    def step(q, k, v):  # one jit for each call: what was traced before is not used again
        return jax.grad(loss, (0, 1, 2))(q, k, v)
    alone = jax.jit(lambda *arrays: step(*arrays))(q, k, v)
    monkeypatch.setattr(_jax_calls, "on_cuda", lambda: True)
    monkeypatch.setattr(_jax_calls, "_cuda_bytes", lambda problem, backward: 2**26 + 2**20 * backward)
    jax.clear_caches()  # of what a process with a GPU has traced
    for a, b in zip(alone, jax.jit(lambda *arrays: step(*arrays))(q, k, v)):
        assert (a == b).all()
    traced = jax.jit(lambda *arrays: step(*arrays)).trace(q, k, v)
    for platform in ("cpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        calls = [line for line in text.splitlines() if "@tessera_jax_" in line]
        assert ["@tessera_jax_forward" in line for line in calls] == [True, False], calls
        assert all("o_residual = 1 : i32" in line and "xi8>" in line for line in calls), calls
        assert [f"tensor<{size}xui8>" in line for size, line in zip((2**26, 2**26 + 2**20), calls)] == [True] * 2, calls
