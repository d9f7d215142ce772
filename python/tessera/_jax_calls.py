# SPDX-License-Identifier: Apache-2.0
"""The handlers for XLA: their registration, and their calls on one device.

The functions here take a batch of any number of leading dimensions: q [*batch, len_q, heads_q, head_dim], o alike, lse
[*batch, heads_q, len_q], bias [*batch or 1s, heads_q or 1, len_q or 1, len_kv or 1]. vmap adds one dimension in front.
A device flattens its own part of the batch, so the batch stays sharded in any of these dimensions.
"""
import ctypes
import functools
import math
import typing

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import NamedSharding, PartitionSpec

from . import _native
from ._arrays import DTYPES

TARGETS = ("tessera_jax_forward", "tessera_jax_backward")


class Scores(typing.NamedTuple):
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
def register():
    """Registers the handlers with XLA, once."""
    _native.library()  # libtessera_jax links against it, and this error is clearer
    path = _native.library_dir() / "libtessera_jax.so"
    try:
        handlers = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"the handlers for JAX can't be loaded from {path}: {error}") from error
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(handlers, name)), platform="cpu")


def varying(kind):
    """The axes of jax.shard_map over which an array of this type varies."""
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def _struct(shape, dtype, like):
    """A result that varies over the axes of jax.shard_map as `like` does."""
    kind = jax.typeof(like)
    if not varying(kind):
        return jax.ShapeDtypeStruct(shape, dtype)
    if not hasattr(kind, "manual_axis_type"):  # before JAX 0.10
        return jax.ShapeDtypeStruct(shape, dtype, vma=kind.vma)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(kind.sharding.mesh, PartitionSpec()),
                                manual_axis_type=kind.manual_axis_type)


def _workspace(scores, q, k, v, bias, backward):
    """The workspace, whose size depends on static shapes alone."""
    problem = _native.new_problem()
    problem.dtype = DTYPES[q.dtype.name]
    problem.batch, problem.len_q, problem.heads_q, problem.head_dim = q.shape
    problem.len_kv, problem.heads_kv, problem.head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    problem.bias, problem.bias_gradient = int(bool(bias)), int(backward and bool(bias))
    for name, value in scores._asdict().items():
        setattr(problem, name, value)
    size = ctypes.c_size_t()
    _native.check(_native.library().tessera_workspace_bytes(ctypes.byref(problem), None, int(backward),
                                                            ctypes.byref(size)))
    return _struct((size.value,), jnp.uint8, q)


def _flat(array, dims=3):
    """`array` with its batch in one dimension; dims: the dimensions after the batch."""
    return array.reshape(math.prod(array.shape[:-dims]), *array.shape[-dims:])


def _flat_bias(bias, batch):
    """A bias of 4 dimensions: the handlers take a batch of 1, or the whole batch."""
    if math.prod(bias.shape[:-3]) != 1:
        bias = jnp.broadcast_to(bias, (*batch, *bias.shape[-3:]))
    return _flat(bias)


def forward(scores, q, k, v, *bias):
    """(o, lse)."""
    batch, q, k, v = q.shape[:-3], _flat(q), _flat(k), _flat(v)
    bias = [_flat_bias(b, batch) for b in bias]
    o = _struct((*q.shape[:3], v.shape[3]), q.dtype, q)
    lse = _struct((q.shape[0], q.shape[2], q.shape[1]), jnp.promote_types(q.dtype, jnp.float32), q)
    call = jax.ffi.ffi_call(TARGETS[0], (o, lse, _workspace(scores, q, k, v, bias, False)))
    o, lse, _ = call(q, k, v, *bias, **scores.attributes())
    return o.reshape(*batch, *o.shape[1:]), lse.reshape(*batch, *lse.shape[1:])


def backward(scores, q, k, v, o, lse, do, dlse, *bias):
    """(dq, dk, dv), and dbias if there is a bias."""
    shapes, batch = [a.shape for a in (q, k, v)], q.shape[:-3]
    q, k, v, o, do = (_flat(a) for a in (q, k, v, o, do))
    flat_bias = [_flat_bias(b, batch) for b in bias]
    results = [_struct(a.shape, a.dtype, a) for a in (q, k, v)]
    results += [_workspace(scores, q, k, v, bias, True)] + [_struct(b.shape, b.dtype, b) for b in flat_bias]
    call = jax.ffi.ffi_call(TARGETS[1], tuple(results))
    *gradients, _, dbias = (*call(q, k, v, o, _flat(lse, 2), do, _flat(dlse, 2), *flat_bias, **scores.attributes()),
                            *(() if bias else (None,)))
    gradients = tuple(g.reshape(shape) for g, shape in zip(gradients, shapes))
    return (*gradients, _unflat_bias(dbias, bias[0], batch)) if bias else gradients


def _unflat_bias(dbias, bias, batch):
    """The gradient of `bias` from that of _flat_bias(bias, batch)."""
    if math.prod(bias.shape[:-3]) == 1:
        return dbias.reshape(bias.shape)
    dbias = dbias.reshape(*batch, *dbias.shape[1:])
    summed = tuple(i for i, size in enumerate(bias.shape[:-3]) if size != batch[i])
    return dbias.sum(axis=summed, keepdims=True) if summed else dbias
