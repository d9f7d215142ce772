# SPDX-License-Identifier: Apache-2.0
"""Attention for JAX on CPUs and CUDA: jax.nn.dot_product_attention's signature over XLA FFI.

    import tessera.jax
    out = tessera.jax.dot_product_attention(query, key, value, is_causal=True)

It works under jit, grad and vmap, and on arrays that are sharded: an array sharded on the batch, on heads or on the
queries stays so, forward and backward, under jit, with explicit axes, and inside of jax.shard_map.
"""
from __future__ import annotations

import functools
import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from . import _jax_calls, _jax_derivatives, _native
from ._arrays import expect
from ._jax_sharding import explicit_axes

__all__ = ["dot_product_attention", "export_checks"]

_IMPLEMENTATIONS = (None, "tessera", "xla", "cudnn")

_jax_calls.register()  # here, so that a program that only loads an exported call has the handlers


def dot_product_attention(query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
                          mask: ArrayLike | None = None, *, scale: float | None = None, is_causal: bool = False,
                          query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
                          local_window_size: int | tuple[int, int] | None = None,
                          implementation: Literal["tessera", "xla", "cudnn"] | None = None, softcap: float = 0.0,
                          return_residual: bool = False, sinks: ArrayLike | None = None) -> Any:
    """jax.nn.dot_product_attention by tessera's kernels, on the CPU or on CUDA.

    query: [B, T, N, H] or [T, N, H]; key, value: [B, S, K, H] or [S, K, H], N a multiple of K; float32, bfloat16,
    float16, or float64 (the reference). bias: broadcasts to [B, N, T, S], differentiable. mask: bool, broadcasts
    likewise, True where the key is seen. is_causal: top-left, as in JAX. query_seq_lengths,
    key_value_seq_lengths: integers [B]. local_window_size: an int or (left, right), both inclusive. scale, is_causal,
    local_window_size, implementation and softcap are static.

    implementation: None or "tessera" runs tessera's kernels, which have reverse mode, once. "xla" is a composition of
    JAX's operations with the same meaning: any derivative and symbolic shapes, but slow, and it takes the memory of all
    weights. "cudnn" is jax.nn's own, with its meaning.

    Differences from jax.nn: a query that sees no key gives 0 and LSE -inf, not the mean of V. LSE (return_residual, [B,
    T, N]) is float32 and has a gradient. mask and key_value_seq_lengths become a bias. softcap and sinks are tessera's:
    sinks [N], logits that take part in the softmax as keys without a value, differentiable; they come in from O and LSE
    of a call without them, so that in 16 bits O is rounded twice.

    Returns [B, T, N, H], or (that, LSE) with return_residual. Raises ValueError naming the argument, and
    NotImplementedError for forward mode and second derivatives; under jit it comes when the graph is traced or lowered.
    """
    if implementation not in _IMPLEMENTATIONS:
        expect("implementation", f"one of {', '.join(map(repr, _IMPLEMENTATIONS))}", repr(implementation))
    if implementation == "cudnn":
        if softcap != 0:
            expect("softcap", "0 with implementation='cudnn'", softcap)
        if sinks is not None:
            expect("sinks", "None with implementation='cudnn'", "an array")
        return jax.nn.dot_product_attention(
            query, key, value, bias, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths, local_window_size=_window(local_window_size),
            implementation="cudnn", return_residual=return_residual)
    query, key, value = (jnp.asarray(a) for a in (query, key, value))
    unbatched = query.ndim == 3
    q, k, v = (_four("query key value".split()[i], a, unbatched) for i, a in enumerate((query, key, value)))
    _check(q, k, v)
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    arrays = dict(q=q, k=k, v=v)
    if bias is not None:
        arrays["bias"] = _broadcastable("bias", bias, shape)
        if arrays["bias"].dtype == jnp.bool_:
            expect("bias", "numbers that are added to the scores", "bool; mask= takes one, True where the key is seen")
    if mask is not None:
        arrays["mask"] = _mask(mask, shape)
    for name, lengths in (("query_seq_lengths", query_seq_lengths), ("key_value_seq_lengths", key_value_seq_lengths)):
        if lengths is not None:
            arrays[name] = _lengths(name, lengths, shape[0])
    if sinks is not None:
        arrays["sinks"] = _sinks(sinks, shape[1])
    scale = None if scale is None else _static("scale", scale, float)
    run = functools.partial(_attention, is_causal=_static("is_causal", is_causal, bool),
                            window=_window(local_window_size), scale=scale, softcap=_static("softcap", softcap, float),
                            by_xla=implementation == "xla")
    if implementation == "xla":
        run = _with_automatic_axes(run, q, k, v)
    o, lse = run(arrays)
    if unbatched:
        o, lse = o[0], lse[0]
    return (o, lse) if return_residual else o


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The disabled_checks that jax.export.export() needs for calls of this module: tessera's handlers are of this
    version of tessera alone. A program that loads the result imports tessera.jax first.

        jax.export.export(jax.jit(function), disabled_checks=tessera.jax.export_checks())(query)
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in _jax_calls.TARGETS]


def _with_automatic_axes(run, q, k, v):
    """`run`, which returns (o, lse), for arrays whose shardings are part of their types (AxisType.Explicit): XLA
    chooses them inside, and o and lse are sharded as q is."""
    mesh, explicit = explicit_axes(q)
    if not explicit:
        return run
    specs = [(*jax.typeof(a).sharding.spec, *(None,) * 4)[:4] for a in (q, k, v)]
    batch = next((spec[0] for spec in specs if spec[0] is not None), None)
    rows = (batch, *specs[0][1:3])
    return jax.sharding.auto_axes(run, axes=explicit, out_sharding=(NamedSharding(mesh, PartitionSpec(*rows, None)),
                                                                    NamedSharding(mesh, PartitionSpec(*rows))))


def _attention(arrays, is_causal, window, scale, softcap, by_xla):
    """(o [B, T, N, H], lse [B, T, N]) of arrays that dot_product_attention() has checked."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    scale = q.shape[3] ** -0.5 if scale is None else scale
    masks = [arrays["mask"]] if "mask" in arrays else []
    if "key_value_seq_lengths" in arrays:
        masks.append(jnp.arange(shape[3]) < arrays["key_value_seq_lengths"][:, None, None, None])
    left = right = _native.UNBOUNDED
    if window is not None:
        sides = None if by_xla else _sides(window, shape)
        if sides is None:
            masks.append((_distance(shape) >= -window[0]) & (_distance(shape) <= window[1]))
        else:
            left, right = sides
    if by_xla and is_causal:
        masks.append(_distance(shape) <= 0)
    bias = _bias(arrays.get("bias"), functools.reduce(jnp.logical_and, masks) if masks else None, q.dtype)
    if by_xla:
        o, lse = _composition(q, k, v, bias, scale, softcap)
    else:
        for name, array in (("query", q), ("key", k), ("value", v)):
            _jax_derivatives.expect_numbers(name, array.shape)
        scores = _jax_calls.Scores(2 if is_causal else 0, left, right, scale, softcap)
        inputs = _jax_derivatives.same_axes([q, k, v, *(() if bias is None else (bias,))])
        o, lse = _jax_derivatives.differentiable(scores, bias is not None, _jax_calls.keeps_residual(q.dtype))(*inputs)
    if "sinks" in arrays:
        o, lse = _with_sinks(o, lse, arrays["sinks"])
    if "query_seq_lengths" in arrays:
        rows = jnp.arange(shape[2])[None, :, None, None] < arrays["query_seq_lengths"][:, None, None, None]
        o = jnp.where(rows, o, 0)
    return o, lse.transpose(0, 2, 1)


def _with_sinks(o, lse, sinks):
    """(o, lse) with the sinks [N]: o is multiplied by exp(lse) / (exp(lse) + exp(sink)). lse: [B, N, T]."""
    sinks = sinks.astype(lse.dtype)[:, None]
    # A row that sees no key has LSE -inf, and -inf - -inf is NaN.
    share = jax.nn.sigmoid(lse - jnp.maximum(sinks, jnp.finfo(lse.dtype).min))
    return (o * share.transpose(0, 2, 1)[..., None]).astype(o.dtype), jnp.logaddexp(lse, sinks)


def _composition(q, k, v, bias, scale, softcap):
    """(o, lse [B, N, T]) of the operations of JAX, in float32 or more."""
    dtype, (batch, len_q, heads, dim), heads_kv = jnp.promote_types(q.dtype, jnp.float32), q.shape, k.shape[2]
    grouped = q.reshape(batch, len_q, heads_kv, heads // heads_kv, dim).astype(dtype)
    scores = scale * jnp.einsum("btmgh,bsmh->bmgts", grouped, k.astype(dtype))
    scores = scores.reshape(batch, heads, len_q, k.shape[1])
    if softcap != 0:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    highest = jax.lax.stop_gradient(scores.max(-1, keepdims=True, initial=-jnp.inf))
    highest = jnp.where(jnp.isfinite(highest), highest, 0)
    weights = jnp.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    seen = total > 0
    total = jnp.where(seen, total, 1)
    weights = (weights / total).reshape(batch, heads_kv, heads // heads_kv, len_q, k.shape[1])
    o = jnp.einsum("bmgts,bsmd->btmgd", weights, v.astype(dtype)).reshape(batch, len_q, heads, v.shape[3])
    return o.astype(q.dtype), jnp.where(seen, jnp.log(total) + highest, -jnp.inf)[..., 0]


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


def _static(name, value, kind):
    """kind(value), where kind is float or bool. Raises ValueError for a traced value."""
    try:
        return kind(value)
    except jax.errors.ConcretizationTypeError:
        expect(name, f"a {kind.__name__} that is known when the call is traced", "a traced array")


def _window(size):
    """(left, right) as JAX counts, from the index of the query; None for no window."""
    if size is None:
        return None
    try:
        left, right = map(operator.index, size if isinstance(size, (tuple, list)) else (size, size))
    except (TypeError, ValueError):
        expect("local_window_size", "an integer or (left, right)", repr(size))
    if min(left, right) < 0:
        expect("local_window_size", "0 or more on both sides", (left, right))
    return left, right


def _sides(window, shape):
    """The window relative to the bottom-right diagonal, as tessera counts; None where tessera has no such window."""
    diagonal = shape[3] - shape[2]
    sides = window[0] + diagonal, window[1] - diagonal
    return sides if min(sides) >= 0 else None


def _distance(shape):
    """int [T, S]: the index of the key less that of the query."""
    return jnp.arange(shape[3])[None, :] - jnp.arange(shape[2])[:, None]


def _lengths(name, lengths, batch):
    lengths = jnp.asarray(lengths)
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        expect(name, f"integers of shape [{batch}]", f"{lengths.dtype} {list(lengths.shape)}")
    return lengths


def _sinks(sinks, heads):
    sinks = jnp.asarray(sinks)
    if sinks.shape != (heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        expect("sinks", f"floating numbers of shape [{heads}]", f"{sinks.dtype} {list(sinks.shape)}")
    return sinks


def _broadcastable(name, array, shape):
    array = jnp.asarray(array)
    array = array.reshape((1,) * (4 - array.ndim) + array.shape) if array.ndim < 4 else array
    if array.ndim != 4 or any(size not in (1, full) for size, full in zip(array.shape, shape)):
        expect(name, f"a shape that broadcasts to {list(shape)}", list(array.shape))
    return array


def _mask(mask, shape):
    mask = _broadcastable("mask", mask, shape)
    if mask.dtype != jnp.bool_:
        expect("mask", "dtype bool", mask.dtype)
    return mask


def _bias(bias, mask, dtype):
    """The bias with -inf where the mask hides a key; float32 unless it has the dtype of the query."""
    if bias is not None and bias.dtype != dtype:
        bias = bias.astype(jnp.float32)
    if mask is None:
        return bias
    hidden = jnp.where(mask, 0, -jnp.inf).astype(jnp.float32)
    hidden = hidden.reshape((1,) * (4 - hidden.ndim) + hidden.shape)
    return hidden if bias is None else jnp.where(mask, bias.astype(jnp.float32), -jnp.inf)
