# SPDX-License-Identifier: Apache-2.0
"""The handlers for XLA: their registration, their calls, and how a call is partitioned over the devices of a mesh.

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
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from . import _native
from ._arrays import DTYPES, expect

TARGETS = ("tessera_jax_forward", "tessera_jax_backward")
_NOT_DIFFERENTIABLE = ('tessera.jax.dot_product_attention: this derivative is not there. The kernels have reverse '
                       'mode, once; implementation="xla" has every derivative, and takes the memory of all weights')


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


def _varying(kind):
    """The axes of jax.shard_map over which an array of this type varies."""
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


# --- One device -----------------------------------------------------------------------------------------------------

def _struct(shape, dtype, like):
    """A result that varies over the axes of jax.shard_map as `like` does."""
    kind = jax.typeof(like)
    if not _varying(kind):
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


def _forward(scores, q, k, v, *bias):
    """(o, lse)."""
    batch, q, k, v = q.shape[:-3], _flat(q), _flat(k), _flat(v)
    bias = [_flat_bias(b, batch) for b in bias]
    o = _struct((*q.shape[:3], v.shape[3]), q.dtype, q)
    lse = _struct((q.shape[0], q.shape[2], q.shape[1]), jnp.promote_types(q.dtype, jnp.float32), q)
    call = jax.ffi.ffi_call(TARGETS[0], (o, lse, _workspace(scores, q, k, v, bias, False)))
    o, lse, _ = call(q, k, v, *bias, **scores.attributes())
    return o.reshape(*batch, *o.shape[1:]), lse.reshape(*batch, *lse.shape[1:])


def _backward(scores, q, k, v, o, lse, do, dlse, *bias):
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


# --- Many devices ---------------------------------------------------------------------------------------------------
#
# Each dimension of an array has a label: b0, b1, .. the batch, n the heads of q, m those of k, t and s the lengths, h
# and d the head_dims; a dimension in which the bias is broadcast has a label of its own. The batch, the heads and the
# queries may be sharded, the keys and head_dims are not.

class _Shapes(typing.NamedTuple):
    """What a partitioned call knows at compile time."""
    scores: Scores
    backward: bool
    q: tuple
    k: tuple
    v: tuple
    bias: typing.Optional[tuple]

    @property
    def heads(self):
        return self.q[-2], self.k[-2]

    def labels(self):
        """(labels of each operand, labels of each result)."""
        batch = [f"b{i}" for i in range(len(self.q) - 3)]
        q, k, v, o = ([*batch, *dims] for dims in ("tnh", "smh", "smd", "tnd"))
        lse, bias = [*batch, "n", "t"], []
        if self.bias is not None:
            full = [*batch, "n", "t", "s"]
            sizes = [*self.q[:-3], self.q[-2], self.q[-3], self.k[-3]]
            bias = [[label if size == whole else f"u{i}"
                     for i, (label, size, whole) in enumerate(zip(full, self.bias, sizes))]]
        if self.backward:
            return [q, k, v, o, lse, o, lse, *bias], [q, k, v, *bias]
        return [q, k, v, *bias], [o, lse]

    def rule(self):
        """The keywords of def_partition that say which dimensions belong together.

        With grouped heads those of q and of k are unrelated here: an axis that does not divide the heads of k would be
        split in two otherwise, which a PartitionSpec can't say. _split() relates them."""
        name = {"n": "m"} if self.heads[0] == self.heads[1] else {}
        sides = [", ".join(" ".join(name.get(label, label) for label in array) for array in side)
                 for side in self.labels()]
        return dict(sharding_rule=" -> ".join(sides), need_replication_factors=("h", "s", "d"))


def _named(entry):
    """The mesh axes of one entry of a PartitionSpec."""
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry) if isinstance(entry, tuple) else ()


def _dividing(axes, sizes, length, taken=()):
    """The longest beginning of `axes`, without those taken, whose devices divide `length`."""
    kept, devices = [], 1
    for axis in axes:
        if axis in taken or length % (devices * sizes[axis]):
            break
        kept.append(axis)
        devices *= sizes[axis]
    return tuple(kept)


class _Split(typing.NamedTuple):
    """How a call is split: the mesh axes of each label, and those over which devices share heads of k."""
    axes: dict
    shared: tuple

    def spec(self, labels):
        return PartitionSpec(*(self.axes.get(label) or None for label in labels))


def _split(shapes, labelled, sizes):
    """The _Split for arrays whose PartitionSpecs are known.

    labelled: (labels, spec) of each array, the most important first. sizes: mesh axis -> devices."""
    axes, taken = {}, set()

    def first(label, length):
        for labels, spec in labelled:
            entry = _named(spec[labels.index(label)]) if label in labels and len(spec) > labels.index(label) else ()
            kept = _dividing(entry, sizes, length, taken)
            if kept:
                return kept
        return ()
    for i, length in enumerate(shapes.q[:-3]):
        axes[f"b{i}"] = first(f"b{i}", length)
        taken.update(axes[f"b{i}"])
    heads_q, heads_kv = shapes.heads
    axes["n"] = first("n", heads_q) or first("m", heads_kv)
    axes["m"] = _dividing(axes["n"], sizes, heads_kv)
    taken.update(axes["n"])
    axes["t"] = first("t", shapes.q[-3])
    return _Split(axes, axes["n"][len(axes["m"]):])


def _shared_heads(split, q, k):
    """The heads of this device's part of k that its heads of q read, one of them for equal groups of heads of q."""
    heads = q.shape[-2]
    group = heads * jax.lax.psum(1, split.shared) // k.shape[-2]
    step = math.gcd(heads, group)  # a head of k for each so many heads of q
    return (jax.lax.axis_index(split.shared) * heads + jnp.arange(0, heads, step)) // group


def _sum_over(array, axes):
    if not axes:
        return array
    return jax.lax.psum(array.astype(jnp.promote_types(array.dtype, jnp.float32)), axes).astype(array.dtype)


def _local_band(scores, first, len_local, len_q, len_kv):
    """(scores, number of keys) for the queries from `first` to first + len_local - 1 alone, over the first keys.

    The call of a part has a bottom-right diagonal of its own, relative to which the band is moved."""
    shift = first + len_local - len_q
    left, right = (side if side == _native.UNBOUNDED else side + by for side, by in
                   ((scores.window_left, -shift), (scores.window_right, shift)))
    if scores.causal:  # top-left: query i sees the keys up to i
        right = min(right, first + len_local - len_kv)
    hidden = max(0, -right)  # keys at the end that no query of the part sees
    left -= hidden if left != _native.UNBOUNDED else 0
    if left < 0 or hidden > len_kv:
        left, hidden = 0, len_kv
    return scores._replace(causal=0, window_left=left, window_right=max(0, right)), len_kv - hidden


def _call(shapes, scores, len_kv, q, k, v, *rest):
    """One device's call over its first len_kv keys; the gradients of the others are 0."""
    hidden = k.shape[-3] - len_kv
    of_bias = shapes.bias is not None and shapes.bias[-1] == k.shape[-3] and hidden > 0
    if of_bias:
        rest = (*rest[:-1], rest[-1][..., :len_kv])
    k, v = k[..., :len_kv, :, :], v[..., :len_kv, :, :]
    if not shapes.backward:
        return _forward(scores, q, k, v, *rest)

    def padded(gradient, axis):
        return jnp.pad(gradient, [(0, hidden if i == gradient.ndim + axis else 0) for i in range(gradient.ndim)])
    dq, dk, dv, *dbias = _backward(scores, q, k, v, *rest)
    return dq, padded(dk, -3), padded(dv, -3), *(padded(d, -1) if of_bias else d for d in dbias)


def _on_each_device(shapes, split):
    """The function that a device runs on its part."""
    scores, rows = shapes.scores, split.axes.get("t", ())
    banded = scores.causal or min(scores.window_left, scores.window_right) < _native.UNBOUNDED

    def call(q, k, *rest):
        if not rows or not banded:
            return _call(shapes, scores, k.shape[-3], q, k, *rest)
        bands = [_local_band(scores, first, q.shape[-3], shapes.q[-3], k.shape[-3])
                 for first in range(0, shapes.q[-3], q.shape[-3])]
        return jax.lax.switch(jax.lax.axis_index(rows), [functools.partial(_call, shapes, *band) for band in bands],
                              q, k, *rest)

    def run(q, k, v, *rest):
        keys = (k, v)
        if split.shared:
            heads = _shared_heads(split, q, k)
            keys = tuple(jnp.take(a, heads, a.ndim - 2) for a in keys)
        if not shapes.backward:
            return call(q, *keys, *rest)
        dq, dk, dv, *dbias = call(q, *keys, *rest)
        if split.shared:
            dk, dv = (jnp.zeros_like(a).at[..., heads, :].add(d) for a, d in ((k, dk), (v, dv)))
        dk, dv = (_sum_over(d, (*split.shared, *rows)) for d in (dk, dv))
        labels = shapes.labels()[1][-1]  # of dbias, if there is one
        partial = [axis for label, axes in split.axes.items() if label != "m" and label not in labels for axis in axes]
        return dq, dk, dv, *(_sum_over(d, tuple(partial)) for d in dbias)
    return run


@functools.lru_cache(maxsize=1024)
def _partitioned(shapes):
    """The call as a function of its arrays, which XLA's partitioner splits as _split() says."""
    operands, results = shapes.labels()

    def shardings(mesh, arguments, result):
        known = [(labels, a.sharding.spec) for labels, a in zip((*operands, *results), (*arguments, *result))
                 if isinstance(getattr(a, "sharding", None), NamedSharding)]
        split = _split(shapes, known, dict(mesh.shape))
        return split, [tuple(NamedSharding(mesh, split.spec(labels)) for labels in side)
                       for side in (operands, results)]

    def partition(mesh, arguments, result):
        split, (of_arguments, of_results) = shardings(mesh, arguments, result)
        return mesh, _on_each_device(shapes, split), of_results, of_arguments

    def infer(mesh, arguments, result):
        return shardings(mesh, arguments, ())[1][1]

    whole = _on_each_device(shapes, _Split({}, ()))
    function = custom_partitioning(lambda *arrays: whole(*arrays))
    function.def_partition(partition, infer_sharding_from_operands=infer, **shapes.rule())
    return jax.jit(function)


def explicit_axes(array):
    """(mesh, the names of its axes along which shardings are part of the types of arrays)."""
    mesh = jax.typeof(array).sharding.mesh
    return mesh, tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit)


def _with_automatic_axes(shapes, arrays):
    """The partitioned call for arrays whose shardings may be part of their types. A gradient is sharded as its array,
    o and lse as q."""
    call = _partitioned(shapes)
    mesh, explicit = explicit_axes(arrays[0])
    if not explicit:
        return call
    operands, results = shapes.labels()
    specs = [jax.typeof(a).sharding.spec for a in arrays]
    if shapes.backward:
        of_results = [*specs[:3], *specs[len(operands) - 1:][:len(results) - 3]]
    else:
        split = _split(shapes, list(zip(operands, specs)), dict(mesh.shape))
        of_results = [split.spec(labels) for labels in results]
    return jax.sharding.auto_axes(call, axes=explicit,
                                  out_sharding=tuple(NamedSharding(mesh, spec) for spec in of_results))


# --- vmap and derivatives ---------------------------------------------------------------------------------------------

def same_axes(arrays):
    """The arrays, each marked as varying over all axes of jax.shard_map over which one of them varies."""
    varying = [_varying(jax.typeof(a)) for a in arrays]
    every = frozenset().union(*varying)
    cast = getattr(jax.lax, "pcast", None)
    missing = [tuple(sorted(every - has)) for has in varying]
    return [a if not axes else cast(a, axes, to="varying") if cast else jax.lax.pvary(a, axes)
            for a, axes in zip(arrays, missing)]


def _batched(scores, backward, with_bias):
    """The call as a function of its arrays, with a rule for vmap that adds a dimension to the batch."""
    @jax.custom_jvp
    @jax.custom_batching.custom_vmap
    def function(*arrays):
        arrays = same_axes(arrays)
        q, k, v = (a.shape for a in arrays[:3])
        bias = arrays[-1].shape if with_bias else None
        return tuple(_with_automatic_axes(_Shapes(scores, backward, q, k, v, bias), arrays)(*arrays))

    @function.fun.def_vmap
    def rule(size, batched, *arrays):
        arrays = [a if is_batched else jnp.broadcast_to(a, (size, *a.shape)) for a, is_batched in zip(arrays, batched)]
        results = function(*arrays)
        return results, (True,) * len(results)

    @function.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(_NOT_DIFFERENTIABLE)

    return function


@functools.lru_cache(maxsize=1024)
def differentiable(scores, with_bias):
    """(q, k, v[, bias]) -> (o, lse), with gradients of both results for every argument."""
    forward, backward = (_batched(scores, is_backward, with_bias) for is_backward in (False, True))

    @jax.custom_vjp
    def function(*arrays):
        return forward(*arrays)

    def forward_rule(*arrays):
        o, lse = forward(*arrays)
        return (o, lse), (arrays, o, lse)

    def backward_rule(saved, gradients):
        (q, k, v, *bias), o, lse = saved
        return backward(q, k, v, o, lse, *gradients, *bias)

    function.defvjp(forward_rule, backward_rule)

    def explained(*arrays):
        try:
            return function(*arrays)
        except TypeError as error:  # JAX's own names nobody
            if "forward-mode" in str(error):
                raise NotImplementedError(_NOT_DIFFERENTIABLE) from None
            raise
    return explained


def expect_numbers(name, shape):
    """Raises ValueError unless a shape has numbers alone, since the size of the workspace depends on them."""
    if not all(isinstance(size, int) for size in shape):
        expect(name, 'a shape of numbers, since only implementation="xla" takes symbolic ones',
               f"({', '.join(map(str, shape))})")
