# SPDX-License-Identifier: Apache-2.0
"""The classes of xformers.ops.fmha.attn_bias: bands of keys, alone or for each sequence of a ragged batch."""
from __future__ import annotations

import dataclasses
import itertools
from typing import Iterable, Sequence

import torch
from torch import Tensor

from ._arrays import expect
from .torch import _attention

__all__ = ["AttentionBias", "BlockDiagonalCausalFromBottomRightMask",
           "BlockDiagonalCausalLocalAttentionFromBottomRightMask", "BlockDiagonalCausalLocalAttentionMask",
           "BlockDiagonalCausalLocalAttentionPaddedKeysMask", "BlockDiagonalCausalMask",
           "BlockDiagonalCausalWithOffsetGappyKeysMask", "BlockDiagonalCausalWithOffsetPaddedKeysMask",
           "BlockDiagonalGappyKeysMask", "BlockDiagonalLocalAttentionPaddedKeysMask", "BlockDiagonalMask",
           "BlockDiagonalPaddedKeysMask", "LocalAttentionFromBottomRightMask",
           "LowerTriangularFromBottomRightLocalAttentionMask", "LowerTriangularFromBottomRightMask",
           "LowerTriangularMask", "LowerTriangularMaskWithTensorBias"]


class AttentionBias:
    """The base class of what attn_bias may be beside a tensor. Subclasses are bands of keys, alone or for each
    sequence of a ragged batch."""
    _causal: str | None = None  # as tessera.torch.attention() has it
    _bias: Tensor | None = None

    def _window(self, len_q, len_kv):
        """(left, right) relative to the bottom-right diagonal, or None."""
        return None

    def _seen(self, len_q, len_kv):
        """bool [len_q, len_kv]: the keys that each query sees."""
        key, query = torch.arange(len_kv)[None, :], torch.arange(len_q)[:, None]
        diagonal = query + len_kv - len_q
        seen = key <= {None: len_kv, "top-left": query, "bottom-right": diagonal}[self._causal]
        left, right = self._window(len_q, len_kv) or (None, None)
        if left is not None:
            seen = seen & (key >= diagonal - left)
        return seen if right is None else seen & (key <= diagonal + right)

    def materialize(self, shape: Sequence[int], dtype: torch.dtype = torch.float32,
                    device: torch.device | str = "cpu") -> Tensor:
        """The bias as a tensor [*, len_q, len_kv], for tests: 0 where a query sees a key, -inf elsewhere."""
        bias = torch.zeros(shape[-2:]).masked_fill(~self._seen(*shape[-2:]), float("-inf"))
        return (bias.to(device, dtype) if self._bias is None else bias.to(device, dtype) + self._bias).expand(shape)


class LowerTriangularMask(AttentionBias):
    """Query i sees the keys 0 .. i."""
    _causal = "top-left"

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """LowerTriangularMask and a tensor that is added to the scores; it gets a gradient."""

    def __init__(self, bias: Tensor):
        self._bias = bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """The last query sees all keys, each one before it one key less."""
    _causal = "bottom-right"

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


def _from(name, size, least):
    """`size` as an integer. Raises ValueError unless it is one, from `least` on."""
    number = _attention._integer(size)
    if number is None or number < least:
        expect(name, f"an integer from {least} on", repr(size))
    return number


@dataclasses.dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """LowerTriangularFromBottomRightMask, of which each query sees the last _window_size keys."""
    _window_size: int

    def __post_init__(self):
        self._window_size = _from("window_size", self._window_size, 1)

    def _window(self, len_q, len_kv):
        return self._window_size - 1, None


@dataclasses.dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """The keys from window_left before the bottom-right diagonal to window_right after it."""
    window_left: int
    window_right: int

    def __post_init__(self):
        self.window_left = _from("window_left", self.window_left, 0)
        self.window_right = _from("window_right", self.window_right, 0)

    def _window(self, len_q, len_kv):
        return self.window_left, self.window_right


def _lengths(name, lengths):
    """The lengths as integers. Raises ValueError unless they are integers from 0 on."""
    return [_from(f"{name}[{i}]", length, 0) for i, length in enumerate(lengths)]


@dataclasses.dataclass
class _SeqLenInfo:
    """The rows of each sequence in a tensor that holds one after another: from seqstart[i] to seqstart[i + 1] - 1, or,
    with seqlen, seqlen[i] of them."""
    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]
    seqlen: Tensor | None = None
    seqlen_py: list[int] | None = None

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], device: torch.device | str | None = None,
                     name: str = "seqlens") -> _SeqLenInfo:
        lengths = _lengths(name, seqlens)
        return cls._of(list(itertools.accumulate(lengths, initial=0)), lengths, None, device)

    @classmethod
    def _of(cls, starts, lengths, used, device):
        return cls(torch.tensor(starts, dtype=torch.int32, device=device), max(lengths, default=0),
                   min(lengths, default=0), starts,
                   None if used is None else torch.tensor(used, dtype=torch.int32, device=device), used)

    def intervals(self):
        """(begin, end) of the rows of each sequence."""
        lengths = self.seqlen_py or [end - begin for begin, end in zip(self.seqstart_py, self.seqstart_py[1:])]
        return [(begin, begin + length) for begin, length in zip(self.seqstart_py, lengths)]

    def to(self, device):
        return dataclasses.replace(self, seqstart=self.seqstart.to(device),
                                   seqlen=None if self.seqlen is None else self.seqlen.to(device))

    def split(self, x, batch_sizes=None):
        """The tensors [batch, length, ..] that x [1, total, ..] holds."""
        if x.shape[:2] != (1, self.seqstart_py[-1]):
            expect("x", f"shape [1, {self.seqstart_py[-1]}, ..]", list(x.shape))
        starts, first = [0], 0
        for size in batch_sizes or [1] * (len(self.seqstart_py) - 1):
            first += size
            starts.append(self.seqstart_py[first])
        parts = zip(batch_sizes or [1] * (len(starts) - 1), starts, starts[1:])
        return [x[:, begin:end].reshape(size, -1, *x.shape[2:]) for size, begin, end in parts]


def _joined(tensors):
    return torch.cat([t.reshape(1, -1, *t.shape[2:]) for t in tensors], 1)


@dataclasses.dataclass
class BlockDiagonalMask(AttentionBias):
    """A ragged batch in tensors [1, total, ..]: the queries of a sequence see the keys of that sequence."""
    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *,
                     device: torch.device | str | None = None) -> BlockDiagonalMask:
        """For sequences of these lengths; kv_seqlen: default q_seqlen."""
        if kv_seqlen is not None and len(kv_seqlen) != len(q_seqlen):
            expect("kv_seqlen", f"{len(q_seqlen)} lengths, as q_seqlen has", len(kv_seqlen))
        of_q = _SeqLenInfo.from_seqlens(q_seqlen, device, "q_seqlen")
        same = kv_seqlen is None or list(kv_seqlen) == list(q_seqlen)
        return cls(of_q, of_q if same else _SeqLenInfo.from_seqlens(kv_seqlen, device, "kv_seqlen"))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[BlockDiagonalMask, Tensor]:
        """(mask, tensor [1, total, ..]) of tensors [batch, length, ..]."""
        mask, joined, _, _ = cls.from_tensor_lists_qkv(tensors, tensors)
        return mask, joined

    @classmethod
    def from_tensor_lists_qkv(cls, tensors_q: Sequence[Tensor], tensors_k: Sequence[Tensor],
                              tensors_v: Sequence[Tensor] | None = None
                              ) -> tuple[BlockDiagonalMask, Tensor, Tensor, Tensor | None]:
        """(mask, q, k, v or None), as from_tensor_list()."""
        if [t.shape[0] for t in tensors_q] != [t.shape[0] for t in tensors_k]:
            expect("tensors_k", f"batches {[t.shape[0] for t in tensors_q]}, as tensors_q has",
                   [t.shape[0] for t in tensors_k])
        lengths = [[t.shape[1] for t in tensors for _ in range(t.shape[0])] for tensors in (tensors_q, tensors_k)]
        mask = cls.from_seqlens(*lengths, device=tensors_q[0].device)
        mask._batch_sizes = [t.shape[0] for t in tensors_q]
        return mask, _joined(tensors_q), _joined(tensors_k), None if tensors_v is None else _joined(tensors_v)

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The inverse of from_tensor_list()."""
        if self.q_seqinfo.seqstart_py != self.k_seqinfo.seqstart_py:
            expect("split", "equal lengths of queries and keys; split_queries() and split_kv() take others", "others")
        return self.split_queries(tensor)

    def to(self, device: torch.device | str) -> BlockDiagonalMask:
        """The mask with its tensors on this device."""
        return dataclasses.replace(self, q_seqinfo=self.q_seqinfo.to(device), k_seqinfo=self.k_seqinfo.to(device))

    def _made(self, cls, *more):
        return cls(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, *more)

    def make_causal(self) -> BlockDiagonalCausalMask:
        return self._made(BlockDiagonalCausalMask)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return self._made(BlockDiagonalCausalFromBottomRightMask)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        return self._made(BlockDiagonalCausalLocalAttentionMask, window_size)

    def make_local_attention_from_bottomright(self, window_size: int
                                              ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        return self._made(BlockDiagonalCausalLocalAttentionFromBottomRightMask, window_size)

    def _blocks(self):
        """(queries, keys) of each sequence, as (begin, end)."""
        return list(zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals()))

    def _seen(self, len_q, len_kv):
        seen = torch.zeros(len_q, len_kv, dtype=torch.bool)
        for (begin_q, end_q), (begin_k, end_k) in self._blocks():
            seen[begin_q:end_q, begin_k:end_k] = super()._seen(end_q - begin_q, end_k - begin_k)
        return seen

    def _sequences(self, total_kv):
        """(starts of queries, starts of keys) with a sequence without queries for the keys that nobody sees."""
        starts_q, starts_k = [0], [0]
        for (_, end_q), (begin_k, end_k) in self._blocks():
            if begin_k > starts_k[-1]:
                starts_q.append(starts_q[-1])
                starts_k.append(begin_k)
            starts_q.append(end_q)
            starts_k.append(end_k)
        if total_kv > starts_k[-1]:
            starts_q.append(starts_q[-1])
            starts_k.append(total_kv)
        return starts_q, starts_k


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """BlockDiagonalMask, each sequence a LowerTriangularMask."""
    _causal = "top-left"


@dataclasses.dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """BlockDiagonalMask, each sequence a LowerTriangularFromBottomRightMask. None has more queries than keys."""
    _causal = "bottom-right"

    def __post_init__(self):
        for i, ((begin_q, end_q), (begin_k, end_k)) in enumerate(self._blocks()):
            if end_q - begin_q > end_k - begin_k:
                expect("kv_seqlen", f"at least the {end_q - begin_q} queries of sequence {i}", end_k - begin_k)


@dataclasses.dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """BlockDiagonalCausalMask, of which each query sees the last _window_size keys."""
    _window_size: int = 0

    def __post_init__(self):
        self._window_size = _from("window_size", self._window_size, 1)

    def _window(self, len_q, len_kv):
        return self._window_size - 1 + len_kv - len_q, None  # from the top-left diagonal

    def _one_window(self):
        """_window() of all sequences, which must be the same."""
        windows = {self._window(end_q - begin_q, end_k - begin_k)[0] for (begin_q, end_q), (begin_k, end_k)
                   in self._blocks()}
        if len(windows) > 1 or min(windows, default=0) < 0:
            raise NotImplementedError(
                "attn_bias: expected one window for all sequences, as there is with equal lengths of "
                "queries and keys or with BlockDiagonalCausalLocalAttentionFromBottomRightMask, got "
                f"{type(self).__name__} with other lengths")
        return (windows.pop() if windows else 0), None


@dataclasses.dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """BlockDiagonalCausalFromBottomRightMask, of which each query sees the last _window_size keys."""
    _window_size: int = 0

    def __post_init__(self):
        super().__post_init__()
        self._window_size = _from("window_size", self._window_size, 1)

    def _window(self, len_q, len_kv):
        return self._window_size - 1, None


class BlockDiagonalGappyKeysMask(BlockDiagonalMask):
    """BlockDiagonalMask whose sequences have keys anywhere, in ascending order: kv_seqlen[i] of them from
    kv_seqstarts[i] on."""

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqstarts: Sequence[int], kv_seqlen: Sequence[int], *,
                     device: torch.device | str | None = None) -> BlockDiagonalGappyKeysMask:
        """kv_seqstarts: one more than there are sequences, the last is the number of keys."""
        lengths, starts = _lengths("kv_seqlen", kv_seqlen), _lengths("kv_seqstarts", kv_seqstarts)
        if len(lengths) != len(q_seqlen) or len(starts) != len(lengths) + 1:
            expect("kv_seqstarts", f"{len(q_seqlen) + 1} starts and as many lengths as q_seqlen has, {len(q_seqlen)}",
                   f"{len(starts)} and {len(lengths)}")
        if any(begin + length > end for begin, length, end in zip(starts, lengths, starts[1:])):
            raise NotImplementedError("kv_seqstarts: expected sequences of keys in ascending order without overlap, "
                                      f"got starts {starts} with lengths {lengths}")
        return cls(_SeqLenInfo.from_seqlens(q_seqlen, device, "q_seqlen"), _SeqLenInfo._of(starts, lengths, lengths, device))


class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """BlockDiagonalGappyKeysMask, each sequence a LowerTriangularFromBottomRightMask."""
    _causal = "bottom-right"


class BlockDiagonalPaddedKeysMask(BlockDiagonalGappyKeysMask):
    """BlockDiagonalMask with kv_padding rows of keys for each sequence, the first kv_seqlen[i] of which are used."""

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int],
                     causal_diagonal: None = None, *, device: torch.device | str | None = None
                     ) -> BlockDiagonalPaddedKeysMask:
        if causal_diagonal is not None:
            expect("causal_diagonal", "None", repr(causal_diagonal))
        kv_padding = _from("kv_padding", kv_padding, 1)
        if any(length > kv_padding for length in kv_seqlen):
            expect("kv_seqlen", f"at most kv_padding, {kv_padding}", max(kv_seqlen))
        return super().from_seqlens(q_seqlen, range(0, kv_padding * (len(kv_seqlen) + 1), kv_padding), kv_seqlen,
                                    device=device)


class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """BlockDiagonalPaddedKeysMask, each sequence a LowerTriangularFromBottomRightMask."""
    _causal = "bottom-right"


@dataclasses.dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalCausalWithOffsetPaddedKeysMask):
    """BlockDiagonalCausalWithOffsetPaddedKeysMask, of which each query sees the last _window_size keys."""
    _window_size: int = 0

    def __post_init__(self):
        self._window_size = _from("window_size", self._window_size, 1)

    def _window(self, len_q, len_kv):
        return self._window_size - 1, None

    @classmethod
    def from_seqlens_local(cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_size: int
                           ) -> BlockDiagonalCausalLocalAttentionPaddedKeysMask:
        """from_seqlens() of BlockDiagonalPaddedKeysMask with a window."""
        return BlockDiagonalPaddedKeysMask.from_seqlens(q_seqlen, kv_padding, kv_seqlen)._made(cls, window_size)


@dataclasses.dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """BlockDiagonalPaddedKeysMask, each sequence a LocalAttentionFromBottomRightMask."""
    window_left: int = 0
    window_right: int = 0

    def __post_init__(self):
        self.window_left = _from("window_left", self.window_left, 0)
        self.window_right = _from("window_right", self.window_right, 0)

    def _window(self, len_q, len_kv):
        return self.window_left, self.window_right

    @classmethod
    def from_seqlens_local(cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_left: int,
                           window_right: int) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """from_seqlens() of BlockDiagonalPaddedKeysMask with a window."""
        padded = BlockDiagonalPaddedKeysMask.from_seqlens(q_seqlen, kv_padding, kv_seqlen)
        return padded._made(cls, window_left, window_right)
