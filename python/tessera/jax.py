# SPDX-License-Identifier: Apache-2.0
"""Attention for JAX on CPUs: jax.nn.dot_product_attention's signature over XLA FFI; jit, grad and vmap.

    import tessera.jax
    out = tessera.jax.dot_product_attention(query, key, value, is_causal=True)
"""
import ctypes
import functools
import operator
import typing

import jax
import jax.numpy as jnp
import numpy

from . import _native
from ._arrays import DTYPES, expect


class _Scores(typing.NamedTuple):
    """The handlers' attributes: the settings of a call that are no arrays."""
    causal: int
    window_left: int
    window_right: int
    scale: float
    softcap: float

    def attributes(self):
        return dict(causal=numpy.int32(self.causal), window_left=numpy.int64(self.window_left),
                    window_right=numpy.int64(self.window_right), scale=numpy.float64(self.scale),
                    softcap=numpy.float64(self.softcap))


@functools.lru_cache(maxsize=None)
def _register():
    """Registers the handlers, once."""
    _native.library()  # libtessera_jax links against it, and this error is clearer
    path = _native.library_dir() / "libtessera_jax.so"
    try:
        handlers = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"the handlers for JAX can't be loaded from {path}: {error}") from error
    for name in ("tessera_jax_forward", "tessera_jax_backward"):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(handlers, name)), platform="cpu")


def _workspace(scores, q, k, v, bias, backward):
    """The shape and dtype of the workspace, which depend on static shapes alone."""
    problem = _native.new_problem()
    problem.dtype = DTYPES[q.dtype.name]
    problem.batch, problem.len_q, problem.heads_q, problem.head_dim = q.shape
    problem.len_kv, problem.heads_kv, problem.head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    problem.bias, problem.bias_gradient = int(bias is not None), int(backward and bias is not None)
    for name, value in scores._asdict().items():
        setattr(problem, name, value)
    size = ctypes.c_size_t()
    _native.check(_native.library().tessera_workspace_bytes(ctypes.byref(problem), None, int(backward),
                                                            ctypes.byref(size)))
    return jax.ShapeDtypeStruct((size.value,), jnp.uint8)


def _like(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _call_forward(scores, q, k, v, bias):
    batch, len_q, heads, _ = q.shape
    o = jax.ShapeDtypeStruct((batch, len_q, heads, v.shape[3]), q.dtype)
    lse = jax.ShapeDtypeStruct((batch, heads, len_q), jnp.promote_types(q.dtype, jnp.float32))
    call = jax.ffi.ffi_call("tessera_jax_forward", (o, lse, _workspace(scores, q, k, v, bias, False)))
    return call(q, k, v, *(() if bias is None else (bias,)), **scores.attributes())[:2]


def _call_backward(scores, q, k, v, bias, *rest):
    """(dq, dk, dv), and dbias if there is a bias. rest: o, lse, do, dlse."""
    results = (_like(q), _like(k), _like(v), _workspace(scores, q, k, v, bias, True))
    optional = () if bias is None else (bias,)
    call = jax.ffi.ffi_call("tessera_jax_backward", results + tuple(_like(b) for b in optional))
    dq, dk, dv, _, *dbias = call(q, k, v, *rest, *optional, **scores.attributes())
    return dq, dk, dv, *dbias


def _foldable(call, with_bias):
    """`call` with a rule for vmap that folds the mapped axis into the batch.

    The handlers take four dimensions, and one call for the whole batch keeps all threads busy.
    """
    @jax.custom_batching.custom_vmap
    def function(q, k, v, *rest):
        bias, rest = (rest[0], rest[1:]) if with_bias else (None, rest)
        return call(q, k, v, bias, *rest)

    @function.def_vmap
    def rule(size, batched, *arrays):
        batch = arrays[0].shape[1 if batched[0] else 0]

        def fold(place, array, is_batched):
            array = array if is_batched else jnp.broadcast_to(array, (size, *array.shape))
            if with_bias and place == 3:  # a bias may have a batch of 1
                array = jnp.broadcast_to(array, (size, batch, *array.shape[2:]))
            return array.reshape(size * batch, *array.shape[2:])

        bias_batch = arrays[3].shape[1 if batched[3] else 0] if with_bias else batch
        results = function(*(fold(i, a, b) for i, (a, b) in enumerate(zip(arrays, batched))))
        results = [r.reshape(size, batch, *r.shape[1:]) for r in results]
        if len(results) == 4 and bias_batch != batch:
            results[3] = results[3].sum(axis=1, keepdims=True)
        return tuple(results), (True,) * len(results)

    return function


@functools.lru_cache(maxsize=1024)
def _differentiable(scores, with_bias):
    """(q, k, v[, bias]) -> (o, lse), with gradients of both results for every argument."""
    forward = _foldable(functools.partial(_call_forward, scores), with_bias)
    backward = _foldable(functools.partial(_call_backward, scores), with_bias)

    @jax.custom_vjp
    def function(*arrays):
        return tuple(forward(*arrays))

    def forward_rule(*arrays):
        o, lse = forward(*arrays)
        return (o, lse), (arrays, o, lse)

    def backward_rule(saved, gradients):
        arrays, o, lse = saved
        return tuple(backward(*arrays, o, lse, *gradients))

    function.defvjp(forward_rule, backward_rule)
    return function


def dot_product_attention(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False,
                          query_seq_lengths=None, key_value_seq_lengths=None, local_window_size=None, softcap=0.0,
                          return_residual=False):
    """jax.nn.dot_product_attention by tessera's kernels, on the CPU.

    query: [B, T, N, H] or [T, N, H]; key, value: [B, S, K, H] or [S, K, H], N a multiple of K; float32, bfloat16,
    float16, or float64 (the reference). bias: broadcasts to [B, N, T, S], differentiable. mask: bool, broadcasts
    likewise, True where the key is seen. is_causal: top-left, as in JAX. query_seq_lengths,
    key_value_seq_lengths: integers [B]. local_window_size: an int or (left, right), both inclusive. scale, is_causal,
    local_window_size and softcap are static.

    Differences from jax.nn: a query that sees no key gives 0 and LSE -inf, not the mean of V. LSE (return_residual, [B,
    T, N]) is float32 and has a gradient. softcap is tessera's. mask and key_value_seq_lengths become a bias.

    Returns [B, T, N, H], or (that, LSE) with return_residual. Raises ValueError naming the argument.
    """
    query, key, value = (jnp.asarray(a) for a in (query, key, value))
    unbatched = query.ndim == 3
    q, k, v = (_four("query key value".split()[i], a, unbatched) for i, a in enumerate((query, key, value)))
    _check(q, k, v)
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    left, right, seen = _window(local_window_size, shape)
    scores = _Scores(2 if is_causal else 0, left, right,
                     q.shape[3] ** -0.5 if scale is None else float(scale), float(softcap))
    bias = _bias(bias, _masks(mask, key_value_seq_lengths, seen, shape), shape, q.dtype)
    _register()
    o, lse = _differentiable(scores, bias is not None)(q, k, v, *(() if bias is None else (bias,)))
    if query_seq_lengths is not None:
        lengths = _lengths("query_seq_lengths", query_seq_lengths, shape[0])
        rows = jnp.arange(shape[2])[None, :, None, None] < lengths[:, None, None, None]
        o = jnp.where(rows, o, 0)
    lse = lse.transpose(0, 2, 1)
    if unbatched:
        o, lse = o[0], lse[0]
    return (o, lse) if return_residual else o


def _four(name, array, unbatched):
    if array.ndim != (3 if unbatched else 4):
        expect(name, "3 dimensions in all of query, key and value, or 4", f"shape {list(array.shape)}")
    return array[None] if unbatched else array


def _check(q, k, v):
    floats = ("float32", "bfloat16", "float16", "float64")
    if q.dtype.name not in floats:
        expect("query", f"dtype {' or '.join(floats)}", q.dtype)
    for name, array, expected in (("key", k, (q.shape[0], None, None, q.shape[3])),
                                  ("value", v, (q.shape[0], k.shape[1], k.shape[2], None))):
        if array.dtype != q.dtype:
            expect(name, f"dtype {q.dtype}, as query has", array.dtype)
        if any(e is not None and e != got for e, got in zip(expected, array.shape)):
            expect(name, f"shape {['any' if e is None else e for e in expected]}", list(array.shape))
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        expect("query", f"a multiple of key's {k.shape[2]} heads", q.shape[2])


def _window(size, shape):
    """(left, right, mask): a window relative to the bottom-right diagonal, as tessera counts, or a mask in its
    place."""
    if size is None:
        return _native.UNBOUNDED, _native.UNBOUNDED, None
    try:
        left, right = map(operator.index, size if isinstance(size, (tuple, list)) else (size, size))
    except (TypeError, ValueError):
        expect("local_window_size", "an integer or (left, right)", repr(size))
    if min(left, right) < 0:
        expect("local_window_size", "0 or more on both sides", (left, right))
    diagonal = shape[3] - shape[2]  # JAX counts from the index of the query
    if left + diagonal >= 0 and right - diagonal >= 0:
        return left + diagonal, right - diagonal, None
    distance = jnp.arange(shape[3])[None, :] - jnp.arange(shape[2])[:, None]
    return _native.UNBOUNDED, _native.UNBOUNDED, ((distance >= -left) & (distance <= right))[None, None]


def _lengths(name, lengths, batch):
    lengths = jnp.asarray(lengths)
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        expect(name, f"integers of shape [{batch}]", f"{lengths.dtype} {list(lengths.shape)}")
    return lengths


def _broadcastable(name, array, shape):
    array = jnp.asarray(array)
    array = array.reshape((1,) * (4 - array.ndim) + array.shape) if array.ndim < 4 else array
    if array.ndim != 4 or any(size not in (1, full) for size, full in zip(array.shape, shape)):
        expect(name, f"a shape that broadcasts to {list(shape)}", list(array.shape))
    return array


def _masks(mask, lengths, seen, shape):
    """The conjunction of all masks, or None without any."""
    masks = [] if seen is None else [seen]
    if mask is not None:
        mask = _broadcastable("mask", mask, shape)
        if mask.dtype != jnp.bool_:
            expect("mask", "dtype bool", mask.dtype)
        masks.append(mask)
    if lengths is not None:
        masks.append(jnp.arange(shape[3]) < _lengths("key_value_seq_lengths", lengths, shape[0])[:, None, None, None])
    return functools.reduce(jnp.logical_and, masks) if masks else None


def _bias(bias, mask, shape, dtype):
    """The bias with -inf where the mask hides a key; float32 unless it has the dtype of the query."""
    if bias is not None:
        bias = _broadcastable("bias", bias, shape)
        if bias.dtype != dtype:
            bias = bias.astype(jnp.float32)
    if mask is None:
        return bias
    hidden = jnp.where(mask, 0, -jnp.inf).astype(jnp.float32)
    return hidden if bias is None else jnp.where(mask, bias.astype(jnp.float32), -jnp.inf)
