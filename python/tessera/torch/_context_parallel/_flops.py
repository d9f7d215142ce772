# SPDX-License-Identifier: Apache-2.0
"""FLOP formulas of the operators for torch.utils.flop_counter.FlopCounterMode: this rank's rows times the keys of their
documents, as of the other operators (../_flops.py)."""
import torch
import torch.distributed as dist
from torch.utils.flop_counter import register_flop_formula

from . import _groups, _operators, _order  # noqa: F401 - _operators defines what is counted


def _pairs(q, permutation, cu_seqlens, group, order):
    """The pairs of a query of this rank and a key, over all heads; masks take nothing off."""
    group = _groups.by_name(group)
    ranks, total = dist.get_world_size(group), q.shape[1] * dist.get_world_size(group)
    if cu_seqlens is None:
        return q.shape[0] * q.shape[2] * q.shape[1] * total
    own = _order.positions_of(order if permutation is None else permutation, total, ranks)[dist.get_rank(group)]
    offsets = torch.tensor(_order.offsets_of(cu_seqlens, total))
    lengths = torch.cat((offsets.diff(), torch.zeros(1, dtype=torch.int64)))  # rows past the last one see no key
    return q.shape[2] * int(lengths[torch.searchsorted(offsets, own, right=True) - 1].sum())


@register_flop_formula([torch.ops.tessera.context_parallel], get_raw=True)
def _forward(q, k, v, sinks, permutation, cu_seqlens, group, order, *settings, out_val=None, **named):
    return 2 * _pairs(q, permutation, cu_seqlens, group, order) * (q.shape[-1] + v.shape[-1])


@register_flop_formula([torch.ops.tessera.context_parallel_backward], get_raw=True)
def _backward(d_o, dlse, q, k, v, o, lse, o_residual, sinks, permutation, cu_seqlens, group, order, *settings,
              out_val=None, **named):
    return 2 * _pairs(q, permutation, cu_seqlens, group, order) * (3 * q.shape[-1] + 2 * v.shape[-1])
