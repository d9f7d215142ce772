# SPDX-License-Identifier: Apache-2.0
"""How a call of the handlers for XLA is split over the devices of a mesh.

Each dimension of an array has a label: b0, b1, .. the batch, n the heads of q, m those of k, t and s the lengths, h
and d the head_dims; a dimension in which the bias is broadcast has a label of its own. The batch, the heads and the
queries may be sharded, the keys and head_dims are not.
"""
import functools
import math
import typing

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from . import _native
from ._jax_calls import Scores, backward, forward


class Shapes(typing.NamedTuple):
    """The static properties of a partitioned call."""
    scores: Scores
    is_backward: bool
    q: tuple
    k: tuple
    v: tuple
    bias: typing.Optional[tuple]
    o_residual: bool  # the forward returns the residual of O, the backward takes it

    @property
    def heads(self):
        return self.q[-2], self.k[-2]

    def labels(self):
        """(labels of each operand, labels of each result)."""
        batch = [f"b{i}" for i in range(len(self.q) - 3)]
        q, k, v, o = ([*batch, *dims] for dims in ("tnh", "smh", "smd", "tnd"))
        lse, bias, residual = [*batch, "n", "t"], [], [o] if self.o_residual else []
        if self.bias is not None:
            full = [*batch, "n", "t", "s"]
            sizes = [*self.q[:-3], self.q[-2], self.q[-3], self.k[-3]]
            bias = [[label if size == whole else f"u{i}"
                     for i, (label, size, whole) in enumerate(zip(full, self.bias, sizes))]]
        if self.is_backward:
            return [q, k, v, o, lse, o, lse, *residual, *bias], [q, k, v, *bias]
        return [q, k, v, *bias], [o, lse, *residual]

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


def _exact(dtype):
    """The dtype in which gradients of this dtype are summed."""
    return jnp.promote_types(dtype, jnp.float32)


def _sum_over(array, axes, dtype):
    """The sum over the devices of these mesh axes."""
    return (jax.lax.psum(array.astype(_exact(dtype)), axes) if axes else array).astype(dtype)


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
    if not shapes.is_backward:
        return forward(scores, q, k, v, *rest, o_residual=shapes.o_residual)

    def padded(gradient, axis):
        return jnp.pad(gradient, [(0, hidden if i == gradient.ndim + axis else 0) for i in range(gradient.ndim)])
    dq, dk, dv, *dbias = backward(scores, q, k, v, *rest, o_residual=shapes.o_residual)
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
        if not shapes.is_backward:
            return call(q, *keys, *rest)
        dq, dk, dv, *dbias = call(q, *keys, *rest)
        if split.shared:
            dk, dv = (jnp.zeros(a.shape, _exact(a.dtype)).at[..., heads, :].add(d.astype(_exact(a.dtype)))
                      for a, d in ((k, dk), (v, dv)))
        dk, dv = (_sum_over(d, (*split.shared, *rows), k.dtype) for d in (dk, dv))
        labels = shapes.labels()[1][-1]  # of dbias, if there is one
        partial = [axis for label, axes in split.axes.items() if label != "m" and label not in labels for axis in axes]
        return dq, dk, dv, *(_sum_over(d, tuple(partial), d.dtype) for d in dbias)
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


def with_automatic_axes(shapes, arrays):
    """The partitioned call for arrays whose shardings may be part of their types. A gradient is sharded as its array,
    o and lse as q."""
    call = _partitioned(shapes)
    mesh, explicit = explicit_axes(arrays[0])
    if not explicit:
        return call
    operands, results = shapes.labels()
    specs = [jax.typeof(a).sharding.spec for a in arrays]
    if shapes.is_backward:
        of_results = [*specs[:3], *specs[len(operands) - 1:][:len(results) - 3]]
    else:
        split = _split(shapes, list(zip(operands, specs)), dict(mesh.shape))
        of_results = [split.spec(labels) for labels in results]
    return jax.sharding.auto_axes(call, axes=explicit,
                                  out_sharding=tuple(NamedSharding(mesh, spec) for spec in of_results))
