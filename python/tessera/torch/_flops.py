# SPDX-License-Identifier: Apache-2.0
"""FLOP formulas of the operators for torch.utils.flop_counter.FlopCounterMode: the GEMMs of attention, 2 in the forward
and 5 in the backward, over all pairs of a query and a key. PyTorch counts its own attention in this way: causal masks
and windows take nothing off."""
import torch
from torch._subclasses import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from ._operators import Arguments


def _lengths(cu_seqlens, bound, total):
    """The lengths of a ragged batch, or a bound of each where the tensor has no numbers."""
    if isinstance(cu_seqlens, FakeTensor) or cu_seqlens.is_meta:
        return [total if bound < 0 else bound] * (cu_seqlens.shape[0] - 1)
    return cu_seqlens.diff().tolist()


def _pairs(a: Arguments):
    """The number of pairs of a query and a key, over all heads."""
    if a.cu_seqlens_q is not None:
        lengths = zip(_lengths(a.cu_seqlens_q, a.max_len_q, a.q.shape[0]),
                      _lengths(a.cu_seqlens_kv, a.max_len_kv, a.k.shape[0]))
        return a.q.shape[1] * sum(len_q * len_kv for len_q, len_kv in lengths)
    heads, length = (1, 2) if a.heads_first else (2, 1)
    return a.q.shape[0] * a.q.shape[heads] * a.q.shape[length] * a.k.shape[length]


@register_flop_formula([torch.ops.tessera.forward, torch.ops.tessera.forward_with_residual, torch.ops.tessera.attention,
                        torch.ops.tessera.attention_with_residual, torch.ops.tessera.attention_with_sinks,
                        torch.ops.tessera.attention_with_sinks_and_residual], get_raw=True)
def _forward(*arguments, out_val=None, sinks=None, **named):
    a = Arguments(*arguments[:len(Arguments._fields)], **named)  # sinks come last, and are no GEMM
    return 2 * _pairs(a) * (a.q.shape[-1] + a.v.shape[-1])


@register_flop_formula([torch.ops.tessera.forward_o, torch.ops.tessera.forward_few,
                        torch.ops.tessera.forward_few_with_residual], get_raw=True)
def _forward_few(q, k, v, causal=0, heads_first=False, *others, out_val=None, **named):
    return _forward(q, k, v, heads_first=heads_first)


@register_flop_formula([torch.ops.tessera.backward, torch.ops.tessera.attention_backward,
                        torch.ops.tessera.attention_with_sinks_backward], get_raw=True)
def _backward(*arguments, out_val=None, **named):
    names = [argument.name for argument in torch.ops.tessera.backward.default._schema.arguments]
    given = dict(zip(names, arguments), **named)
    a = Arguments(**{name: given[name] for name in Arguments._fields if name in given})
    return 2 * _pairs(a) * (3 * a.q.shape[-1] + 2 * a.v.shape[-1])
