# SPDX-License-Identifier: Apache-2.0
"""Attention composed of PyTorch's own operators (math=True): derivatives of any order, forward mode, and the weights.

It has the meaning of docs/numerics.md and no kernel of tessera computes it, but for the draws of dropout. It takes the
time and the memory of all weights, [batch, heads_q, len_q, len_kv]. fp64 is computed in fp64, all else in fp32."""
import torch

from . import _dropout_weights, _shapes
from ._operators import Arguments
from ._tensors import expect_arguments, without_autocast

_HIDDEN = float("-inf")


def _visible(len_q, len_kv, a, device):
    """bool [len_q, len_kv], or None where every query sees every key."""
    if a.causal == 0 and a.window_left < 0 and a.window_right < 0:
        return None
    diagonal = torch.arange(len_q, device=device)[:, None] + (len_kv - len_q)  # the key on the bottom-right diagonal
    key = torch.arange(len_kv, device=device)
    seen = torch.ones(len_q, len_kv, dtype=torch.bool, device=device)
    if a.causal == 1:
        seen = key <= diagonal
    elif a.causal == 2:
        seen = key <= diagonal - (len_kv - len_q)
    if a.window_left >= 0:
        seen = seen & (key >= diagonal - a.window_left)
    if a.window_right >= 0:
        seen = seen & (key <= diagonal + a.window_right)
    return seen


def _scores(q, k, slopes, a):
    """[batch, heads_q, len_q, len_kv] of q and k with heads first, -inf where a query does not see a key."""
    len_q, len_kv = q.shape[2], k.shape[2]
    keys = k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1)
    scores = q @ keys.transpose(-1, -2) * (q.shape[-1] ** -0.5 if a.scale is None else a.scale)
    if a.softcap != 0:
        scores = a.softcap * torch.tanh(scores / a.softcap)
    if slopes is not None:
        i, j = torch.arange(len_q, device=q.device)[:, None], torch.arange(len_kv, device=q.device)
        scores = scores - slopes.to(q.dtype).reshape(-1, q.shape[1], 1, 1) * (i + (len_kv - len_q) - j).abs()
    if a.bias is not None:
        scores = scores + a.bias.to(q.dtype)
    seen = _visible(len_q, len_kv, a, q.device)
    return scores if seen is None else scores.masked_fill(~seen, _HIDDEN)


def _weights_and_lse(q, k, slopes, a):
    """The weights [batch, heads_q, len_q, len_kv], 0 in the row of a query that sees no key, and its LSE -inf."""
    scores = _scores(q, k, slopes, a)
    blind = (scores == _HIDDEN).all(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0.0)  # a row of -inf has no softmax, and derivatives that are NaN
    lse = scores.logsumexp(-1, keepdim=True).masked_fill(blind, _HIDDEN)
    return scores.softmax(-1).masked_fill(blind, 0.0), lse.squeeze(-1)


def _attended(q, k, v, slopes, kept, a):
    """O [batch, heads_q, len_q, head_dim_v] and LSE. kept: bool, which weights dropout keeps; None without dropout."""
    weights, lse = _weights_and_lse(q, k, slopes, a)
    if kept is not None:
        weights = weights * kept / (1 - a.dropout_p)
    return weights @ v.repeat_interleave(q.shape[1] // max(v.shape[1], 1), 1), lse


def _bounds(name, cu_seqlens, total):
    """The entries of cu_seqlens as numbers. Raises ValueError unless they rise from 0, to the total at most."""
    bounds = cu_seqlens.tolist()
    if bounds[:1] != [0] or bounds[-1] > total or sorted(bounds) != bounds:
        raise ValueError(f"{name}: expected values that rise from 0, to the total {total} at most, got {bounds}")
    return bounds


def _ragged(q, k, v, a):
    """O [total_q, heads_q, head_dim_v] and LSE [heads_q, total_q], one sequence at a time."""
    bounds_q = _bounds("cu_seqlens_q", a.cu_seqlens_q, q.shape[0])
    bounds_kv = _bounds("cu_seqlens_kv", a.cu_seqlens_kv, k.shape[0])
    kept = None if a.dropout_p == 0 else _dropout_weights.kept_in_ragged(a, bounds_kv)
    o, lse = [q.new_zeros(0, q.shape[1], v.shape[2])], [q.new_zeros(q.shape[1], 0)]
    for b in range(len(bounds_q) - 1):
        rows_q, rows_kv = slice(bounds_q[b], bounds_q[b + 1]), slice(bounds_kv[b], bounds_kv[b + 1])
        of_sequence = (t[rows].transpose(0, 1)[None] for t, rows in ((q, rows_q), (k, rows_kv), (v, rows_kv)))
        slopes = a.alibi_slopes if a.alibi_slopes is None or a.alibi_slopes.dim() == 1 else a.alibi_slopes[b]
        kept_here = None if kept is None else kept[rows_q, :, :rows_kv.stop - rows_kv.start].transpose(0, 1)
        own = _attended(*of_sequence, slopes, kept_here, a)
        o.append(own[0][0].transpose(0, 1))
        lse.append(own[1][0])
    behind = q.shape[0] - bounds_q[-1]  # rows of no sequence
    o.append(q.new_zeros(behind, q.shape[1], v.shape[2]))
    lse.append(q.new_full((q.shape[1], behind), float("-inf")))
    return torch.cat(o), torch.cat(lse, 1)


def _wide(a):
    """The dtype of the computation."""
    return torch.float64 if a.q.dtype == torch.float64 else torch.float32


def attention(arguments: Arguments, with_lse=True):
    """(O, LSE), or O without with_lse. Raises ValueError naming the argument, as the kernels do."""
    a = arguments
    expect_arguments(a)
    _shapes.expect(a)
    with without_autocast(a.q):
        q, k, v = (t.to(_wide(a)) for t in a[:3])
        if a.cu_seqlens_q is not None:
            o, lse = _ragged(q, k, v, a)
        else:
            q, k, v = (t if a.heads_first else t.transpose(1, 2) for t in (q, k, v))
            o, lse = _attended(q, k, v, a.alibi_slopes, None if a.dropout_p == 0 else _dropout_weights.kept(a), a)
            o = o if a.heads_first else o.transpose(1, 2)
        o = o.to(a.q.dtype)
    return (o, lse) if with_lse else o


def weights(arguments: Arguments):
    """The weights of dense q and k, [batch, heads_q, len_q, len_kv], before dropout."""
    a = arguments
    expect_arguments(a)
    _shapes.expect(a)
    with without_autocast(a.q):
        q, k = (t.to(_wide(a)) for t in (a.q, a.k))
        if not a.heads_first:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        return _weights_and_lse(q, k, a.alibi_slopes, a)[0]
