# SPDX-License-Identifier: Apache-2.0
"""Which rows of a sequence a rank holds: the named orders, permutations, and how documents are balanced."""
from __future__ import annotations

import functools
import operator
import typing

import torch

NAMES = ("zigzag", "contiguous")
_GOOD_ENOUGH = 1.03  # the pairs of the fullest rank beside those in the best order
_LAW = "a permutation of 0 .. {} (row i of rank r is the position order[r * rows + i])"


class Piece(typing.NamedTuple):
    """Consecutive rows of one rank that are consecutive in the sequence."""
    rank: int
    row: int  # the first one, counted in the rank
    start: int  # its position in the sequence
    length: int

    @property
    def end(self):
        return self.start + self.length


@functools.lru_cache(maxsize=256)
def _named(name: str, total: int, ranks: int, argument: str = "q") -> torch.Tensor:
    """The positions [ranks, rows] of a named order. argument: the caller's name of what has `total` rows."""
    positions = torch.arange(total)
    if name == "contiguous":
        if total % ranks:
            raise ValueError(f"{argument}: expected a sequence whose length {ranks} ranks divide, got {total} rows")
        return positions.reshape(ranks, -1)
    if name != "zigzag":
        raise ValueError(f"order: expected 'zigzag', 'contiguous' or {_LAW.format(total - 1)}, got {name!r}")
    if total % (2 * ranks):
        raise ValueError(f"{argument}: expected a sequence whose length 2 * {ranks} divides (order 'zigzag' on {ranks} "
                         f"ranks), got {total} rows; pad it, or name the order 'contiguous'")
    chunks = positions.reshape(2 * ranks, -1)
    return torch.cat((chunks[:ranks], chunks[ranks:].flip(0)), 1)


def tensor_of(order):
    """A permutation as a tensor. Raises ValueError for what can't be one."""
    try:
        return torch.as_tensor(order)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"order: expected 'zigzag', 'contiguous' or integers, got a {type(order).__name__}") from None


def positions_of(order, total: int, ranks: int, argument: str = "q") -> torch.Tensor:
    """The position in the sequence of each row, int64 [ranks, rows]. order: a name, or a permutation of the positions
    as a sequence or a tensor [total]. argument: as in _named(). Raises ValueError."""
    if isinstance(order, str):
        return _named(order, total, ranks, argument)
    found = tensor_of(order).detach().cpu()
    if found.dtype not in (torch.int32, torch.int64) or found.dim() != 1 or found.numel() != total:
        raise ValueError(f"order: expected {_LAW.format(total - 1)}, got a tensor {list(found.shape)} of {found.dtype}")
    found = found.long()
    if total % ranks:
        raise ValueError(f"{argument}: expected a sequence whose length {ranks} ranks divide, got {total} rows")
    if not torch.equal(found.sort().values, torch.arange(total)):
        raise ValueError(f"order: expected {_LAW.format(total - 1)}, got numbers that repeat or are out of range")
    return found.reshape(ranks, -1)


def pieces_of(positions: torch.Tensor) -> list[Piece]:
    """The pieces of all ranks, by rank and row."""
    pieces, rows = [], positions.shape[1]
    for rank, own in enumerate(positions):
        starts = [0, *(torch.nonzero(own.diff() != 1).flatten() + 1).tolist()]
        for row, end in zip(starts, [*starts[1:], rows]):
            pieces.append(Piece(rank, row, int(own[row]), end - row))
    return pieces


def offsets_of(cu_seqlens, total=None) -> list[int]:
    """The offsets of documents as a list. Raises ValueError unless they begin with 0, never descend, and end within
    `total`."""
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
            raise ValueError(f"cu_seqlens: expected int32 or int64 [documents + 1], got {cu_seqlens.dtype} "
                             f"{list(cu_seqlens.shape)}")
        cu_seqlens = cu_seqlens.tolist()
    try:
        offsets = [operator.index(offset) for offset in cu_seqlens]
    except TypeError:
        raise ValueError(f"cu_seqlens: expected integers [documents + 1], got {cu_seqlens!r:.80}") from None
    if not offsets or offsets[0] != 0 or any(a > b for a, b in zip(offsets, offsets[1:])):
        raise ValueError(f"cu_seqlens: expected offsets that begin at 0 and never decrease, got {_shown(offsets)}")
    if total is not None and offsets[-1] > total:
        raise ValueError(f"cu_seqlens: expected offsets of the whole sequence, {total} rows over all ranks, got "
                         f"{_shown(offsets)}")
    return offsets


def _shown(offsets):
    return str(offsets) if len(offsets) < 9 else f"{str(offsets[:8])[:-1]}, ..] of {len(offsets)}"


@functools.lru_cache(maxsize=64)
def of_documents(name: str, offsets: tuple, ranks: int) -> torch.Tensor:
    """The order in which each document is cut by itself, in the order `name`, and a rank's parts follow each other:
    int64 [total]. Raises ValueError."""
    parts = []
    for start, end in zip(offsets, offsets[1:]):
        each = 2 * ranks if name == "zigzag" else ranks
        if (end - start) % each:
            raise ValueError(f"cu_seqlens: expected documents whose lengths {each} divides, got one of {end - start} rows")
        parts.append(_named(name, end - start, ranks) + start)
    return torch.cat(parts, 1).flatten() if parts else torch.arange(0)


def balance_documents(cu_seqlens: torch.Tensor | typing.Sequence[int], ranks: int, *, causal: bool = True,
                      chunks: int = 8, total: int | None = None) -> torch.Tensor:
    """An order that gives each rank as many rows and about as many pairs of a query and a key as the others.

    cu_seqlens: offsets of the packed documents, [documents + 1]; ranks: how many; causal: whether a row sees the rows
        of its document up to itself, or all of them.
    chunks: the parts that a rank gets at most; more parts balance better and make more small calls.
    total: rows of the sequence; default: the last offset. Rows past it belong to no document.
    Returns int64 [total], for order= of context_parallel_attention(): of the contiguous order, the zig-zag and those of
    2, 4 and `chunks` parts a rank, the first one whose fullest rank has at most 3 % more pairs than that of the best.
    Fewer parts exchange fewer rows and make fewer calls. Raises ValueError."""
    offsets = offsets_of(cu_seqlens, total)
    total = offsets[-1] if total is None else whole_number("total", total, 0)
    whole_number("chunks", chunks, 1)
    if total % whole_number("ranks", ranks, 1):
        raise ValueError(f"ranks: expected a divisor of the {total} rows, got {ranks}")
    pairs = pairs_of_rows(offsets, total, causal)
    rows = total // ranks
    names = [name for name in ("contiguous", "zigzag") if name == "contiguous" or total % (2 * ranks) == 0]
    orders = [_named(name, total, ranks) for name in names]
    most = next((n for n in range(min(chunks, rows), 0, -1) if rows % n == 0), 1)
    orders += [_dealt(pairs, rows, ranks, each) for each in sorted({n for n in (2, 4, most) if n <= most and rows % n == 0})]
    fullest = [_fullest(pairs, order) for order in orders]
    return next(order for order, full in zip(orders, fullest) if full <= _GOOD_ENOUGH * min(fullest)).flatten()


def _dealt(pairs, rows, ranks, each):
    """The order int64 [ranks, rows] after dealing `each` chunks to every rank: the chunk with most pairs goes first, to the
    rank with the fewest pairs that has room. A rank's chunks are in ascending order."""
    size = rows // each
    loads, held = [0] * ranks, [[] for _ in range(ranks)]
    of_chunks = pairs.reshape(-1, size).sum(1)
    for chunk in of_chunks.argsort(descending=True, stable=True).tolist():
        rank = min((r for r in range(ranks) if len(held[r]) < each), key=lambda r: (loads[r], r))
        loads[rank] += int(of_chunks[chunk])
        held[rank].append(chunk)
    positions = torch.tensor([sorted(own) for own in held])[:, :, None] * size + torch.arange(size)
    return positions.reshape(ranks, rows)


def whole_number(name, value, least):
    """`value` if it is an integer from `least` on. Raises ValueError naming the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected an integer from {least} on, got {value!r}")
    return value


def pairs_of_rows(offsets, total, causal):
    """How many keys each row sees, int64 [total]."""
    pairs = torch.zeros(total, dtype=torch.int64)
    for start, end in zip(offsets, offsets[1:]):
        pairs[start:end] = torch.arange(1, end - start + 1) if causal else end - start
    return pairs


def _fullest(pairs, order):
    return int(pairs[order].sum(1).max())
