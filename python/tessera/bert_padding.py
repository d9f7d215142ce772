# SPDX-License-Identifier: Apache-2.0
"""The functions of flash_attn.bert_padding: between a padded batch and its rows without padding.

compat.install() gives them under that name. They are differentiable and run on any device.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._arrays import expect
from ._layer_masks import padding

__all__ = ["index_first_axis", "index_first_axis_residual", "index_put_first_axis", "pad_input", "unpad_input",
           "unpad_input_for_concatenated_sequences"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """input[indices]: the rows (n, ...) of `input` (rows, ...)."""
    return input.index_select(0, indices)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(input[indices], input without a gradient)."""
    return index_first_axis(input, indices), input.detach()


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...): `values` (n, ...) in the rows `indices`, 0 in the others."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, ...): `hidden_states` (n, ...) where unpad_input() took them from, 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _expect_shape(name, mask, hidden_states):
    if mask.shape != hidden_states.shape[:2]:
        expect(name, f"shape {list(hidden_states.shape[:2])}, as hidden_states has", list(mask.shape))


def _kept(name, mask, hidden_states):
    _expect_shape(name, mask, hidden_states)
    return padding(name, mask)  # the host waits for the number of kept rows, too


def _rows(hidden_states, kept, lengths):
    """(the rows where `kept` is True, their indices, cu_seqlens of sequences with these lengths, the longest)."""
    indices = kept.flatten().nonzero().flatten()
    longest = int(lengths.max()) if lengths.numel() else 0
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
                ) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of hidden_states (batch, seqlen, ...) where attention_mask (batch, seqlen) is 1 or True.

    unused_mask: likewise, rows that get space and are not used. Both are bool, or numbers that are 0 or 1.
    Returns (rows (n, ...), indices (n,), cu_seqlens int32 (batch + 1,), the longest sequence, seqused int32 (batch,)).
    """
    kept = _kept("attention_mask", attention_mask, hidden_states)
    used = kept.sum(-1, dtype=torch.int32)
    if unused_mask is not None:
        kept = kept | _kept("unused_mask", unused_mask, hidden_states)
    return *_rows(hidden_states, kept, kept.sum(-1, dtype=torch.int32)), used


def unpad_input_for_concatenated_sequences(hidden_states: Tensor, attention_mask_in_length: Tensor
                                           ) -> tuple[Tensor, Tensor, Tensor, int]:
    """The rows of hidden_states (batch, seqlen, ...), each row of which is several sequences one after another.

    attention_mask_in_length: integers (batch, seqlen), the lengths of the sequences of each row, from its begin on,
        then zeros.
    Returns (rows (n, ...), indices (n,), cu_seqlens int32 (sequences + 1,), the longest sequence)."""
    _expect_shape("attention_mask_in_length", attention_mask_in_length, hidden_states)
    if attention_mask_in_length.dtype == torch.bool or attention_mask_in_length.is_floating_point():
        expect("attention_mask_in_length", "integers, the lengths of sequences",
               str(attention_mask_in_length.dtype).removeprefix("torch."))
    totals = attention_mask_in_length.sum(-1, keepdim=True)
    kept = torch.arange(hidden_states.shape[1], device=hidden_states.device) < totals
    if bool(((attention_mask_in_length < 0) | (totals > hidden_states.shape[1])).any()):
        expect("attention_mask_in_length", f"lengths from 0 on whose sum in a row is at most {hidden_states.shape[1]}",
               f"a smallest length of {int(attention_mask_in_length.min())} and a largest sum of {int(totals.max())}")
    return _rows(hidden_states, kept, attention_mask_in_length[attention_mask_in_length > 0])
