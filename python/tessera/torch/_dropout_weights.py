# SPDX-License-Identifier: Apache-2.0
"""flash-attn's S_dmask: the weights, and which of them dropout kept. For tests: it takes the memory of all weights."""
import torch

from . import _operators

CHUNK = 256  # the largest head_dim: so many columns of the weights come out of one call


def _weights(arguments, positions, len_kv, dropout_p):
    """fp32 [batch, len_q, heads, len_kv] | [total_q, heads, len_kv]: O for values that are 1 at one key of a member.
    positions: [len_kv] | [total_kv], the place of each row of k in its member."""
    q, k = arguments[0].float(), arguments[1].float()
    columns = [q.new_zeros(*q.shape[:-1], 0)]
    for begin in range(0, len_kv, CHUNK):
        keys = torch.arange(begin, min(begin + CHUNK, len_kv), device=q.device)
        v = (positions[:, None] == keys).float()[:, None, :].expand(*k.shape[:-1], len(keys))
        columns.append(_operators.forward(q, k, v, *arguments[3:15], dropout_p, None)[0])
    return torch.cat(columns, -1)


def _signed(arguments, positions, len_kv):
    """The weights divided by the largest of their row, negative where dropped."""
    weights = _weights(arguments, positions, len_kv, 0.0)
    # Scores of 0 give all keys of a row one weight, so that none that is kept rounds to 0.
    even = (torch.zeros_like(arguments[0]),) + arguments[1:4] + (None,) + arguments[5:]
    kept = _weights(even, positions, len_kv, arguments[15]) > 0
    if len_kv > 0:
        largest = weights.amax(-1, keepdim=True)
        weights = weights / torch.where(largest == 0, 1.0, largest)
    return torch.where(kept, weights, -weights)


def _rounded(length):
    return (length + 127) // 128 * 128


def signed_weights(arguments):
    """S_dmask of the operators' 17 arguments, the seed among them: (batch, heads, len_q, len_kv), the lengths rounded
    up to 128 and the longest of a ragged batch."""
    with torch.no_grad():
        arguments = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
        q, k, cu_seqlens_q, cu_seqlens_kv = arguments[0], arguments[1], arguments[5], arguments[6]
        if cu_seqlens_q is None:
            batch, len_q, heads, len_kv = *q.shape[:3], k.shape[1]
            signed = _signed(arguments, torch.arange(len_kv, device=q.device), len_kv)
            result = q.new_zeros(batch, heads, _rounded(len_q), _rounded(len_kv))
            result[:, :, :len_q, :len_kv] = signed.transpose(1, 2)
            return result
        begins_q, begins_kv = cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()
        len_q, len_kv = arguments[8], arguments[9]
        positions = torch.cat([torch.arange(e - b, device=q.device) for b, e in zip(begins_kv, begins_kv[1:])])
        signed = _signed(arguments, positions, len_kv)
        result = q.new_zeros(len(begins_q) - 1, q.shape[1], _rounded(len_q), _rounded(len_kv))
        for member, (begin, end) in enumerate(zip(begins_q, begins_q[1:])):
            result[member, :, :end - begin, :len_kv] = signed[begin:end].transpose(0, 1)
        return result
