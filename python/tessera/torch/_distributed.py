# SPDX-License-Identifier: Apache-2.0
"""Attention on DTensors: each process of the mesh computes its own part with the kernels.

The batch and the heads may be sharded over any dimensions of the mesh, and stay so in O, in LSE and in all gradients.
No sum crosses processes then, so the bits are those of one process. All else is gathered first: keys, queries and
head_dim that are sharded, and partial sums."""
from __future__ import annotations

import torch

from . import _errors, _shapes
from ._operators import TENSORS, Arguments, dims_of

# The dimensions (batch, heads) of results, None where there is none: dense O with heads first or not, dense LSE and
# weights, ragged O and LSE.
_DENSE_O, _HEADS_FIRST_O, _DENSE_LSE, _RAGGED_O, _RAGGED_LSE = (0, 2), (0, 1), (0, 1), (None, 1), (None, 0)


def are_in(arguments) -> bool:
    """Whether DTensors are among the tensors of a call."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor
    return any(isinstance(t, DTensor) for t in arguments[:TENSORS])


def of_o_and_lse(a: Arguments):
    """The dimensions (batch, heads) of O and of LSE."""
    if a.cu_seqlens_q is not None:
        return _RAGGED_O, _RAGGED_LSE
    return (_HEADS_FIRST_O if a.heads_first else _DENSE_O), _DENSE_LSE


OF_WEIGHTS = (_DENSE_LSE,)


def _mesh_of(a):
    """The mesh of all tensors. Raises ValueError that names the one that is no DTensor or is on another mesh."""
    from torch.distributed.tensor import DTensor
    given = [(name, t) for name, t in zip(Arguments._fields, a[:TENSORS]) if t is not None]
    first, mesh = next((name, t.device_mesh) for name, t in given if isinstance(t, DTensor))
    for name, tensor in given:
        if not isinstance(tensor, DTensor):
            if name != "seed":  # a number of the host, which _agreed() sends to all processes
                raise ValueError(f"{name}: expected a DTensor, as {first} is, got a {type(tensor).__name__}; "
                                 "torch.distributed.tensor.distribute_tensor makes one")
        elif tensor.device_mesh != mesh:
            raise ValueError(f"{name}: expected a DTensor on the mesh of {first}, {mesh}, got one on "
                             f"{tensor.device_mesh}")
    return mesh


def _sharded(a, mesh, batch, heads):
    """The dimension of attention that each dimension of the mesh shards: "batch", "heads" or None. q decides, then k, then
    v.

    Each process needs the key heads of its query heads. Equal numbers of heads are cut equally; otherwise the parts
    have to divide the heads of k. Dropout draws by the index in the batch and of the head, so nothing is sharded."""
    from torch.distributed.tensor import Shard
    sharded, parts = [], 1
    for dim in range(mesh.ndim):
        places = (t.placements[dim] for t in (a.q, a.k, a.v))
        found = [("batch" if p.dim == batch else "heads") for p in places
                 if type(p) is Shard and p.dim in (batch, heads)]
        what = found[0] if found and a.dropout_p == 0 else None
        if what == "heads":
            heads_q, heads_kv, cut = a.q.shape[heads], a.k.shape[heads], parts * mesh.size(dim)
            if heads_q == heads_kv or heads_kv % cut == 0:
                parts = cut
            else:
                what = None
        sharded.append(what)
    return sharded


def _placements(sharded, batch, heads, missing=None):
    """Shard(batch) or Shard(heads) by dimension of the mesh; `missing` (Replicate()) where the tensor has no such
    dimension."""
    from torch.distributed.tensor import Replicate, Shard
    dims = {"batch": batch, "heads": heads, None: None}
    places = []
    for what in sharded:
        if dims[what] is not None:
            places.append(Shard(dims[what]))
        else:
            places.append(missing if what is not None and missing is not None else Replicate())
    return places


def _local(tensor, placements, of_gradient=None):
    """This process's part of a DTensor, differentiable. of_gradient: the placements of the part's gradient."""
    if list(tensor.placements) != placements:
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local(grad_placements=of_gradient or placements)


def _agreed(seed, mesh):
    """The seed of the mesh's first process, in host memory: each process may have drawn its own."""
    from torch.distributed.tensor import DTensor, distribute_tensor
    if seed is None:
        return None
    return (seed if isinstance(seed, DTensor) else distribute_tensor(seed, mesh)).full_tensor().cpu()


def _parts(a, mesh, sharded, batch, heads):
    """The Arguments of this process."""
    from torch.distributed.tensor import Partial
    rows = _placements(sharded, batch, heads)
    parts = {name: _local(getattr(a, name), rows) for name in ("q", "k", "v")}
    for name in Arguments._fields[3:TENSORS]:
        tensor = getattr(a, name)
        if tensor is not None and name != "seed":
            own = dims_of(name, tensor)
            # A tensor that many sequences or heads share has the sum of their gradients.
            parts[name] = _local(tensor, _placements(sharded, *own), _placements(sharded, *own, missing=Partial()))
    return a._replace(**parts, seed=_agreed(a.seed, mesh))


def _strides(shape, order):
    """The strides of a dense tensor whose dimensions are in this order in memory, the last one innermost."""
    strides, stride = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], stride = stride, stride * max(shape[dim], 1)
    return tuple(strides)


def _whole(part, mesh, sharded, dims, sizes):
    """The DTensor of which `part` is this process's. dims, sizes: its dimensions (batch, heads) and their sizes."""
    from torch.distributed.tensor import DTensor
    shape, order = list(part.shape), list(range(part.dim()))
    for dim, size in zip(dims, sizes):
        if dim is not None:
            shape[dim] = size
    if not part.is_contiguous():  # with heads first the libraries also allocate [batch, len, heads, head_dim]
        order[1:3] = 2, 1
    return DTensor.from_local(part, mesh, _placements(sharded, *dims), run_check=False, shape=torch.Size(shape),
                              stride=_strides(shape, order))


def run(function, a: Arguments, dims_of_results):
    """The results of `function`, which takes Arguments and returns a tensor or several, as DTensors.

    dims_of_results: the dimensions (batch, heads) of each. Raises ValueError that names a tensor of `a` which is no
    DTensor, is on another mesh or has a shape that does not fit."""
    mesh = _mesh_of(a)
    try:
        _shapes.expect(a)
    except RuntimeError as error:
        raise _errors.translated(error) from None
    batch, heads = of_o_and_lse(a)[0]
    sharded = _sharded(a, mesh, batch, heads)
    results = function(_parts(a, mesh, sharded, batch, heads))
    several = isinstance(results, tuple)
    sizes = (None if batch is None else a.q.shape[batch], a.q.shape[heads])
    whole = tuple(_whole(part, mesh, sharded, dims, sizes)
                  for part, dims in zip(results if several else (results,), dims_of_results))
    return whole if several else whole[0]
