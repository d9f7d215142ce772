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

    def attributes(self, bias, o_residual):
        return dict(causal=numpy.int32(self.causal), window_left=numpy.int64(self.window_left),
                    window_right=numpy.int64(self.window_right), scale=numpy.float64(self.scale),
                    softcap=numpy.float64(self.softcap), bias=numpy.int32(bias), o_residual=numpy.int32(o_residual))


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
        for platform, suffix in (("cpu", ""), ("CUDA", "_cuda")):
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(handlers, name + suffix)), platform=platform)


@functools.lru_cache(maxsize=None)
def on_cuda():
    """Whether arrays may lie on a CUDA device: JAX has one, and this build has kernels for it."""
    if not any(name.startswith("cuda.") for name in _native.kernel_names()):
        return False
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def keeps_residual(dtype):
    """Whether a forward that will have a backward keeps the residual of O. The rule knows the dtype alone, so gradients
    have the same bits in every batch, and those of tessera.torch."""
    return dtype in (jnp.bfloat16, jnp.float16) and on_cuda()


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


def _problem(scores, q, k, v, bias, backward):
    problem = _native.new_problem()
    problem.dtype = DTYPES[q.dtype.name]
    problem.batch, problem.len_q, problem.heads_q, problem.head_dim = q.shape
    problem.len_kv, problem.heads_kv, problem.head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    problem.bias, problem.bias_gradient = int(bool(bias)), int(backward and bool(bias))
    for name, value in scores._asdict().items():
        setattr(problem, name, value)
    return problem


def _cuda_bytes(problem, backward):
    """The bytes of workspace of the planned CUDA kernel and of the next one, which runs when the first refuses the
    alignment of the rows; 0 where there is no such kernel, and the call says so when it runs."""
    library, options = _native.library(), _native.sized(_native.Options)
    options.backend = _native.BACKENDS["cuda"]
    planned = ctypes.byref(problem), ctypes.byref(options), int(backward)
    info, refusal = _native.sized(_native.PlanInfo), _native.sized(_native.Refusal)
    if library.tessera_plan_query(*planned, ctypes.byref(info)):
        return 0
    found = info.workspace_bytes
    for index in range(info.refused):
        _native.check(library.tessera_plan_refusal(*planned, index, ctypes.byref(refusal)))
        if refusal.capable:
            options.kernel = refusal.kernel
            _native.check(library.tessera_plan_query(*planned, ctypes.byref(info)))
            return max(found, info.workspace_bytes)
    return found


def _workspace(scores, q, k, v, bias, backward):
    """The workspace, whose size depends on static shapes alone. A traced call does not know its platform, so the
    workspace is large enough for every platform that this process has."""
    problem, size = _problem(scores, q, k, v, bias, backward), ctypes.c_size_t()
    _native.check(_native.library().tessera_workspace_bytes(ctypes.byref(problem), None, int(backward),
                                                            ctypes.byref(size)))
    return _struct((max(size.value, _cuda_bytes(problem, backward) if on_cuda() else 0),), jnp.uint8, q)


def _flat(array, dims=3):
    """`array` with its batch in one dimension; dims: the dimensions after the batch."""
    return array.reshape(math.prod(array.shape[:-dims]), *array.shape[-dims:])


def _flat_bias(bias, batch):
    """A bias of 4 dimensions: the handlers take a batch of 1, or the whole batch."""
    if math.prod(bias.shape[:-3]) != 1:
        bias = jnp.broadcast_to(bias, (*batch, *bias.shape[-3:]))
    return _flat(bias)


def forward(scores, q, k, v, *bias, o_residual=False):
    """(o, lse), and with o_residual the residual of O: int8, the shape of o."""
    batch, q, k, v = q.shape[:-3], _flat(q), _flat(k), _flat(v)
    bias = [_flat_bias(b, batch) for b in bias]
    o = _struct((*q.shape[:3], v.shape[3]), q.dtype, q)
    lse = _struct((q.shape[0], q.shape[2], q.shape[1]), jnp.promote_types(q.dtype, jnp.float32), q)
    residual = [_struct(o.shape, jnp.int8, q)] if o_residual else []
    call = jax.ffi.ffi_call(TARGETS[0], (o, lse, _workspace(scores, q, k, v, bias, False), *residual))
    o, lse, _, *residual = call(q, k, v, *bias, **scores.attributes(len(bias), o_residual))
    return tuple(a.reshape(*batch, *a.shape[1:]) for a in (o, lse, *residual))


def backward(scores, q, k, v, o, lse, do, dlse, *rest, o_residual=False):
    """(dq, dk, dv), and dbias if there is a bias. rest: the residual of O with o_residual, then the bias if there is
    one."""
    shapes, batch = [a.shape for a in (q, k, v)], q.shape[:-3]
    residual, bias = [_flat(a) for a in rest[:o_residual]], rest[o_residual:]
    q, k, v, o, do = (_flat(a) for a in (q, k, v, o, do))
    flat_bias = [_flat_bias(b, batch) for b in bias]
    results = [_struct(a.shape, a.dtype, a) for a in (q, k, v)]
    results += [_workspace(scores, q, k, v, bias, True)] + [_struct(b.shape, b.dtype, b) for b in flat_bias]
    call = jax.ffi.ffi_call(TARGETS[1], tuple(results))
    *gradients, _, dbias = (*call(q, k, v, o, _flat(lse, 2), do, _flat(dlse, 2), *flat_bias, *residual,
                                  **scores.attributes(len(bias), o_residual)), *(() if bias else (None,)))
    gradients = tuple(g.reshape(shape) for g, shape in zip(gradients, shapes))
    return (*gradients, _unflat_bias(dbias, bias[0], batch)) if bias else gradients


def _unflat_bias(dbias, bias, batch):
    """The gradient of `bias` from that of _flat_bias(bias, batch)."""
    if math.prod(bias.shape[:-3]) == 1:
        return dbias.reshape(bias.shape)
    dbias = dbias.reshape(*batch, *dbias.shape[1:])
    summed = tuple(i for i, size in enumerate(bias.shape[:-3]) if size != batch[i])
    return dbias.sum(axis=summed, keepdims=True) if summed else dbias
