# SPDX-License-Identifier: Apache-2.0
"""Which keys a layer's queries see, as numbers and offsets instead of a mask of all pairs: for tessera.transformers.

A batch of padded rows, of packed documents or of chunks is a ragged batch of the same memory. Rows that do not count
become sequences of it too: a run of padding is one sequence that has its queries and no keys, and another one that has its
keys and no queries. Such sequences cost no work, and their O, dQ, dK and dV are 0. The number of sequences follows from
shapes, and the offsets are computed where the mask is, so the host reads nothing.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def padding(name, mask, may_read=True):
    """A mask of padding as bool: True where it is True or 1, False where it is False or 0. Other numbers are refused: in
    a mask that is added to scores 0 is a row that counts. may_read: whether the host may wait for the numbers; if not,
    their device stops the program. A bool mask is not read. Raises ValueError."""
    if mask.dtype == torch.bool:
        return mask
    kept = mask == 1
    odd = ~(kept | (mask == 0))
    words = f"{name}: expected bool, or numbers that are 1 for a row that counts and 0 for padding, got "
    if not may_read:
        torch._assert_async(~odd.any(), words + "others")
    elif bool(odd.any()):
        raise ValueError(f"{words}{mask[odd][0].item()} in a mask of {str(mask.dtype).removeprefix('torch.')}")
    return kept


class Offsets(NamedTuple):
    """The sequences of a ragged batch: int32 [sequences + 1] each, and a bound of their lengths."""
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_len_q: int
    max_len_kv: int


class LayerMask(NamedTuple):
    """The mask of a layer with queries [batch, heads, len_q, head_dim] and keys [batch, kv_heads, len_kv, head_dim].

    window_left, window_right: keys before and after a query's own that it sees; -1: no limit.
    keys: bool [batch, len_kv], False for padding. documents: int [batch, len], the document of each row.
    chunk: a query sees keys of its own chunk of so many rows; the first begins with the first key that counts; 0: none.
    offsets: the sequences of the ragged batch that says the same as these three; None: the batch is dense."""
    batch: int
    len_q: int
    len_kv: int
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    keys: Tensor | None = None
    documents: Tensor | None = None
    chunk: int = 0
    offsets: Offsets | None = None
    ndim = 4  # generate() hands a mask that it made to the model, which asks whether it is one of 2 dimensions

    def expect(self, query, key):
        """Raises ValueError unless it is the mask of these tensors."""
        expected = (self.batch, self.len_q, self.len_kv)
        got = (query.shape[0], query.shape[2], key.shape[2])
        if expected != got:
            raise ValueError("attention_mask: expected query and key of the sizes (batch, len_q, len_kv) = "
                             f"{expected} that the mask was made for, got {got}")

    def dense(self, device):
        """bool, broadcasts to [batch, 1, len_q, len_kv]: True where the key takes part."""
        distance = (torch.arange(self.len_q, device=device)[:, None] + (self.len_kv - self.len_q)
                    - torch.arange(self.len_kv, device=device))
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        if self.causal:
            seen = seen & (distance >= 0)
        if self.window_left >= 0:
            seen = seen & (distance <= self.window_left)
        if self.window_right >= 0:
            seen = seen & (distance >= -self.window_right)
        if self.keys is not None:
            seen = seen & self.keys[:, None, None, :]
        if self.documents is not None:
            seen = seen & _equal_pairs(self.documents)
        if self.chunk:
            index = torch.arange(self.len_kv, device=device)[None]
            begin = 0 if self.keys is None else run_of(self.keys).begin[:, None]
            seen = seen & _equal_pairs(torch.div(index - begin, self.chunk, rounding_mode="floor"))
        return seen


def _equal_pairs(numbers):
    return numbers[:, None, :, None] == numbers[:, None, None, :]


class Run(NamedTuple):
    """The keys of each row that count, if they are one run: int64 [batch] each."""
    begin: Tensor
    end: Tensor
    is_one: Tensor  # bool [batch]


def run_of(keys):
    """The Run of bool [batch, len]. A row without keys has an empty run."""
    begin = (keys.cumsum(-1) == 0).sum(-1)
    end = begin + keys.sum(-1)
    index = torch.arange(keys.shape[1], device=keys.device)
    inside = (index >= begin[:, None]) & (index < end[:, None])
    return Run(begin, end, (keys == inside).all(-1))


def _offsets(q, kv, max_len_q, max_len_kv):
    return Offsets(q.to(torch.int32), kv.to(torch.int32), max_len_q, max_len_kv)


def _opened(of_q, of_kv, max_len_q, max_len_kv):
    """Offsets whose sequences end at the entries of [batch, sequences of a row]."""
    return _offsets(*(F.pad(ends.flatten(), (1, 0)) for ends in (of_q, of_kv)), max_len_q, max_len_kv)


def _closed(offsets, total):
    return torch.cat([offsets, torch.full((1,), total, dtype=offsets.dtype, device=offsets.device)])


def _first_rows(batch, length, device):
    return torch.arange(batch, device=device) * length


def of_padded_rows(run, length, chunk=0):
    """Offsets in which each row has the sequences [begin, end) of queries and keys. With a chunk, a row's run is cut into
    sequences of so many, beginning with its begin."""
    first = _first_rows(len(run.begin), length, run.begin.device)
    begin, end, last = first + run.begin, first + run.end, first + length
    if chunk:
        cuts = begin[:, None] + torch.arange(1, (length + chunk - 1) // chunk + 1, device=begin.device) * chunk
        cuts = torch.minimum(cuts, end[:, None])
    else:
        cuts = end[:, None]
    of_q = torch.cat([begin[:, None], begin[:, None], cuts, last[:, None], last[:, None]], 1)
    of_kv = torch.cat([first[:, None], begin[:, None], cuts, end[:, None], last[:, None]], 1)
    return _opened(of_q, of_kv, length, length)


def of_padded_keys(run, len_q, len_kv):
    """Offsets in which all queries of a row see the keys [begin, end) of theirs."""
    batch, device = len(run.begin), run.begin.device
    first_q, first_kv = (_first_rows(batch, length, device) for length in (len_q, len_kv))
    of_q = torch.stack([first_q, first_q + len_q, first_q + len_q], 1)
    of_kv = torch.stack([first_kv + run.begin, first_kv + run.end, first_kv + len_kv], 1)
    return _opened(of_q, of_kv, len_q, len_kv)


def of_chunks(batch, length, chunk, device):
    """Offsets that cut each sequence of the batch into chunks of `chunk` rows."""
    cuts = (torch.arange((length + chunk - 1) // chunk, device=device) * chunk).expand(batch, -1)
    cuts = cuts + _first_rows(batch, length, device)[:, None]
    offsets = _closed(cuts.flatten(), batch * length)
    return _offsets(offsets, offsets, min(chunk, length), min(chunk, length))


def count_is_known(begins):
    """Whether the host may read how many documents there are. An eager model may: transformers has just read whether
    there are any, which waited for the same numbers."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing() or type(begins) is not Tensor
                or (begins.is_cuda and torch.cuda.is_current_stream_capturing()))


def of_documents(begins):
    """Offsets of bool [batch, len], True at the first row of a document. If the host does not know how many documents
    there are, it takes as many sequences as rows, and the last ones are empty."""
    batch, length = begins.shape
    row = torch.arange(batch * length, device=begins.device)
    offsets = torch.where(begins.flatten(), row, batch * length).sort().values
    if count_is_known(begins):
        offsets = offsets[:int(begins.sum())]
    offsets = _closed(offsets, batch * length)
    return _offsets(offsets, offsets, length, length)
