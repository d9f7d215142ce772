# SPDX-License-Identifier: Apache-2.0
"""flash-attn's S_dmask: the weights, negative where dropout dropped them. It takes the memory of all weights, so it is
meant for tests."""
import torch

from . import _operators

CHUNK = 256  # the largest head_dim, and so the columns of the weights that one call computes


def _weights(arguments, positions, len_kv):
    """The weights, fp32 [batch, len_q, heads, len_kv] or [total_q, heads, len_kv]: O of values that are 1 at one key.
    positions: [len_kv] or [total_kv], the index of each row of k in its sequence."""
    q, k = arguments.q.float(), arguments.k.float()
    columns = [q.new_zeros(*q.shape[:-1], 0)]
    for begin in range(0, len_kv, CHUNK):
        keys = torch.arange(begin, min(begin + CHUNK, len_kv), device=q.device)
        v = (positions[:, None] == keys).float()[:, None, :].expand(*k.shape[:-1], len(keys))
        columns.append(_operators.forward(*arguments._replace(q=q, k=k, v=v))[0])
    return torch.cat(columns, -1)


def _kept(q, k, arguments, positions, len_kv):
    """Which weights dropout keeps, in the shape of _weights(). With scores of 0 all keys of a row have one weight, so
    no weight that is kept rounds to 0. q, k: tensors of 0 with the rows and heads of those of `arguments`."""
    return _weights(_operators.Arguments(q, k, k, cu_seqlens_q=arguments.cu_seqlens_q,
                                         cu_seqlens_kv=arguments.cu_seqlens_kv, seed=arguments.seed,
                                         max_len_q=arguments.max_len_q, max_len_kv=arguments.max_len_kv,
                                         dropout_p=arguments.dropout_p), positions, len_kv) > 0


def kept(arguments):
    """bool [batch, heads_q, len_q, len_kv]: which weights of a dense call its dropout keeps."""
    rows = [t.transpose(1, 2).shape[:3] if arguments.heads_first else t.shape[:3] for t in arguments[:2]]
    q, k = (torch.zeros(*shape, 1, device=arguments.q.device) for shape in rows)
    return _kept(q, k, arguments, torch.arange(k.shape[1], device=q.device), k.shape[1]).transpose(1, 2)


def kept_in_ragged(arguments, bounds_kv):
    """bool [total_q, heads_q, longest sequence of keys]: which weights of a ragged call its dropout keeps. bounds_kv:
    the numbers of cu_seqlens_kv."""
    q, k = (torch.zeros(*t.shape[:2], 1, device=arguments.q.device) for t in arguments[:2])
    lengths = [end - begin for begin, end in zip(bounds_kv, bounds_kv[1:])]
    positions = torch.cat([torch.arange(length, device=q.device) for length in [0, *lengths]])
    return _kept(q, k, arguments, positions, max([0, *lengths]))


def _signed(arguments, positions, len_kv):
    """The weights divided by the largest of their row, negative where dropped."""
    weights = _weights(arguments._replace(dropout_p=0.0), positions, len_kv)
    kept = _kept(torch.zeros_like(arguments.q), torch.zeros_like(arguments.k), arguments, positions, len_kv)
    if len_kv > 0:
        largest = weights.amax(-1, keepdim=True)
        weights = weights / torch.where(largest == 0, 1.0, largest)
    return torch.where(kept, weights, -weights)


def _rounded(length):
    return (length + 127) // 128 * 128


def signed_weights(arguments):
    """S_dmask of the operators' Arguments, rows first and with a seed: [batch, heads, len_q, len_kv], both lengths
    rounded up to 128; of a ragged batch the lengths are max_len_q and max_len_kv."""
    with torch.no_grad():
        arguments = arguments._make(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
        q, k = arguments.q, arguments.k
        if arguments.cu_seqlens_q is None:
            batch, len_q, heads, len_kv = *q.shape[:3], k.shape[1]
            signed = _signed(arguments, torch.arange(len_kv, device=q.device), len_kv)
            result = q.new_zeros(batch, heads, _rounded(len_q), _rounded(len_kv))
            result[:, :, :len_q, :len_kv] = signed.transpose(1, 2)
            return result
        begins_q, begins_kv = arguments.cu_seqlens_q.tolist(), arguments.cu_seqlens_kv.tolist()
        len_q, len_kv = arguments.max_len_q, arguments.max_len_kv
        positions = torch.cat([torch.arange(e - b, device=q.device) for b, e in zip(begins_kv, begins_kv[1:])])
        signed = _signed(arguments, positions, len_kv)
        result = q.new_zeros(len(begins_q) - 1, q.shape[1], _rounded(len_q), _rounded(len_kv))
        for sequence, (begin, end) in enumerate(zip(begins_q, begins_q[1:])):
            result[sequence, :, :end - begin, :len_kv] = signed[begin:end].transpose(0, 1)
        return result
