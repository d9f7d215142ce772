# SPDX-License-Identifier: Apache-2.0
"""The plan of one rank for a call: which rows of K and V it receives, which ragged calls it makes of them, and where the
parts of dK and dV go. A plan depends on lengths alone, so every rank makes the plans of all.

A segment is a run of rows of one document with the keys that they see, a sequence of a ragged call; without a mask it
is all of a rank's runs of a document. Its keys begin where the document begins, so tiles of keys are cut as in a call
on the whole document, and O and LSE have its bits."""
from __future__ import annotations

import collections
import dataclasses
import functools
import typing

import torch

from . import _order

# A ragged call gets copies of the keys of its segments, of at most this share of the rows of the sequence (and the keys
# of one segment at least). The two pieces of a zig-zag need 1 + 1 / (2 ranks).
_KEYS_OF_A_CALL = 1.25
# The two segments of a rank with so many rows are calls of their own in the backward. Beside each other, on two streams,
# they take 5.15 ms where one call takes 5.22 (two H200, 8,192 rows of a rank, 32/8 heads of 128, causal).
_SEPARATE_CALLS_FROM = 4096
# K and V are gathered whole when the ranks need more than this share of them, on average.
_GATHERED_FROM = 0.7


class Layout(typing.NamedTuple):
    """All that a plan depends on. total: rows of the sequence over all ranks; order: a name or the bytes of a permutation;
    left, right: the window, -1 for no limit; blocks: into how many equal blocks dK and dV are summed, 0: by pieces."""
    total: int
    batch: int
    ranks: int
    order: object
    offsets: typing.Optional[tuple]
    causal: bool
    left: int
    right: int
    blocks: int


class Segment(typing.NamedTuple):
    rank: int
    runs: tuple  # (first row, rows), counted in the rank
    start: int  # the position of the first row in the sequence
    first: int  # positions of the keys
    last: int
    shift: int  # how far the keys go beyond the last row

    @property
    def rows(self):
        return sum(rows for _, rows in self.runs)


@dataclasses.dataclass
class Call:
    """A ragged call. rows: the rows of q, a slice where they are consecutive; keys: which of the received rows are its
    keys, in order; shift: how much the diagonal is past the bottom right corner."""
    rows: typing.Union[slice, torch.Tensor]
    keys: torch.Tensor
    cu_q: torch.Tensor
    cu_kv: torch.Tensor
    max_q: int
    max_kv: int
    shift: int


@dataclasses.dataclass
class Plan:
    """send, sent, received: rows of K and V that go to each rank, and how many go to and come from each; send is None
    when all are gathered. parts: the rows of all backward calls' dK, dV in the order in which they are sent;
    parts_sent, parts_received: how many. Row r of dK and dV is the sum of the received rows sources[first[r]] up to
    sources[first[r + 1]], in this order."""
    rows: int
    send: typing.Optional[torch.Tensor]
    sent: list
    received: list
    forward: list
    backward: list
    parts: torch.Tensor
    parts_sent: list
    parts_received: list
    first: torch.Tensor
    sources: torch.Tensor

    def to(self, device):
        """The plan with its tensors on `device`."""
        if device.type == "cpu":
            return self

        def moved(tensor):
            return tensor.to(device) if isinstance(tensor, torch.Tensor) else tensor
        calls = [[dataclasses.replace(c, rows=moved(c.rows), keys=moved(c.keys), cu_q=moved(c.cu_q),
                                      cu_kv=moved(c.cu_kv)) for c in of_pass] for of_pass in (self.forward, self.backward)]
        return dataclasses.replace(self, send=moved(self.send), parts=moved(self.parts), first=moved(self.first),
                                   sources=moved(self.sources), forward=calls[0], backward=calls[1])


def positions_of(layout: Layout) -> torch.Tensor:
    """The positions of all ranks' rows, int64 [ranks, rows]."""
    order = layout.order
    if not isinstance(order, str):
        order = torch.frombuffer(bytearray(order), dtype=torch.int64)
    return _order.positions_of(order, layout.total, layout.ranks)


def _cuts(pieces, layout, offsets, blocks):
    """The positions at which rows are cut beside the ends of pieces."""
    cuts = {offset for offset in offsets if 0 < offset < layout.total}
    if blocks:
        cuts |= set(range(0, layout.total, layout.total // blocks))
    return sorted(cuts)


def _segments(pieces, layout: Layout, blocks: int):
    """The segments of all ranks, by rank and row."""
    offsets = [0, layout.total] if layout.offsets is None else list(layout.offsets)
    if offsets[-1] < layout.total:
        offsets.append(layout.total)  # rows past the last document
    behind = layout.total if layout.offsets is None else layout.offsets[-1]
    cuts = torch.tensor(_cuts(pieces, layout, offsets, blocks), dtype=torch.int64)
    starts = torch.tensor(offsets, dtype=torch.int64)
    found = []
    for piece in pieces:
        inside = cuts[(cuts > piece.start) & (cuts < piece.end)].tolist()
        for start, end in zip([piece.start, *inside], [*inside, piece.end]):
            row = piece.row + start - piece.start
            if start >= behind:
                found.append(Segment(piece.rank, ((row, end - start),), start, start, start, 0))
                continue
            document = int(torch.searchsorted(starts, start, right=True)) - 1
            first, stop = offsets[document], offsets[document + 1]
            right = 0 if layout.causal else layout.right
            last = stop if right < 0 else min(stop, end + right)
            found.append(Segment(piece.rank, ((row, end - start),), start, first, last, last - end))
    masked = layout.causal or layout.left >= 0 or layout.right >= 0
    return found if masked or blocks else _joined(found)


def _joined(segments):
    """Segments in which all rows of a rank that see the same keys are one, which a call without a mask allows."""
    joined = {}
    for s in segments:
        key = s.rank, s.first, s.last
        before = joined.get(key)
        joined[key] = s if before is None else before._replace(runs=before.runs + s.runs,
                                                               start=min(before.start, s.start))
    return list(joined.values())


def _batches(segments, layout: Layout, apart: bool):
    """Segments of one rank in lists, each of which is a call: one shift, and a bound on the keys. apart: a call for each
    of two segments."""
    if apart and len(segments) == 2:
        return [(_shift(segment, layout), [segment]) for segment in segments]
    limit, lists, open_ = layout.total * _KEYS_OF_A_CALL, [], {}
    for segment in segments:
        shift = _shift(segment, layout)
        last, keys = open_.get(shift, (None, 0))
        own = segment.last - segment.first
        if last is None or keys + own > limit:
            last, keys = [], 0
            lists.append((shift, last))
        last.append(segment)
        open_[shift] = last, keys + own
    return lists


def _shift(segment, layout: Layout):
    return segment.shift if not layout.causal and (layout.left >= 0 or layout.right >= 0) else 0


def _ranges(ranges, base=None):
    """The integers of all ranges (start, end), one range after another."""
    parts = [torch.arange(a, b) for a, b in ranges]
    found = torch.cat(parts) if parts else torch.arange(0)
    return found if base is None else base[found]


def _call(shift, segments, place, layout: Layout, rows: int):
    """place: int64 [total], where the received rows have each position, for the first sequence of the batch; the rows of
    the next sequence follow `stride` later."""
    where, stride = place
    batch = layout.batch
    own = _ranges([(row, row + count) for s in segments for row, count in s.runs])
    keys = _ranges([(s.first, s.last) for s in segments], where)
    step = torch.arange(batch)[:, None]
    count, first = own.numel(), int(own[0]) if own.numel() else 0
    consecutive = bool((own == torch.arange(first, first + count)).all())
    if consecutive and (batch == 1 or count == rows):
        all_rows = slice(first, first + count * batch)
    else:
        all_rows = (own + torch.arange(batch)[:, None] * rows).flatten()
    lengths_q = [s.rows for s in segments] * batch
    lengths_kv = [s.last - s.first for s in segments] * batch
    offsets = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_kv)]
    of_keys = (keys + step * stride(keys)).flatten() if callable(stride) else (keys + step * stride).flatten()
    return Call(all_rows, of_keys, *offsets, max(lengths_q), max(lengths_kv), shift)


def _exchange(pieces, segments, positions, layout: Layout, rank: int):
    """(send, sent, received, (where, stride)): the way of K and V to this rank."""
    total, batch, ranks = layout.total, layout.batch, layout.ranks
    rows = total // ranks
    owner, row = torch.empty(total, dtype=torch.int64), torch.empty(total, dtype=torch.int64)
    for r, own in enumerate(positions):
        owner[own], row[own] = r, torch.arange(rows)
    needed = torch.zeros(ranks, total, dtype=torch.bool)
    for s in segments:
        needed[s.rank, s.first:s.last] = True
    if float(needed.float().mean()) > _GATHERED_FROM or ranks == 1:
        return None, [], [], (owner * (rows * batch) + row, rows)
    member = torch.arange(batch)[:, None] * rows
    send, sent, received = [], [], []
    where, stride = torch.zeros(total, dtype=torch.int64), torch.zeros(total, dtype=torch.int64)
    begin = 0
    for other in range(ranks):
        wanted = row[needed[other] & (owner == rank)].sort().values
        send.append((wanted + member).flatten())
        sent.append(batch * wanted.numel())
        own = torch.nonzero(needed[rank] & (owner == other)).flatten()
        own = own[row[own].argsort()]
        where[own] = begin + torch.arange(own.numel())
        stride[own] = own.numel()
        received.append(batch * own.numel())
        begin += batch * own.numel()
    return torch.cat(send), sent, received, (where, _stride_of(where, stride, begin))


def _stride_of(where, stride, total):
    """A function from rows of the first sequence to how much later the next one's rows are."""
    by_row = torch.zeros(max(total, 1), dtype=torch.int64)
    by_row[where[stride > 0]] = stride[stride > 0]
    return lambda rows: by_row[rows]


def _parts(lists, pieces, layout: Layout, rank: int, segments, rows: int):
    """(parts, parts_sent, parts_received, first, sources) of the backward. lists: this rank's calls."""
    batch, ranks = layout.batch, layout.ranks
    place, begin = {}, 0  # segment -> (the first row of its first sequence in the calls' dK, dV, rows to the next sequence)
    for _, of_call in lists:
        keys = sum(s.last - s.first for s in of_call)
        for s in of_call:
            place[s] = begin, keys
            begin += s.last - s.first
        begin += (batch - 1) * keys
    in_order = sorted(segments, key=lambda s: s.start)

    def overlaps(source, target):
        """(segment, position of the first key, of the last, row of the first in its rank), in the order of the sum."""
        for s in in_order:
            if s.rank == source:
                for piece in pieces:
                    if piece.rank == target:
                        first, last = max(s.first, piece.start), min(s.last, piece.end)
                        if first < last:
                            yield s, first, last, piece.row + first - piece.start
    parts, sent = [], []
    for target in range(ranks):
        count = 0
        for s, first, last, _ in overlaps(rank, target):
            base, stride = place[s]
            index = torch.arange(first - s.first, last - s.first) + base
            parts.append((index + torch.arange(batch)[:, None] * stride).flatten())
            count += batch * (last - first)
        sent.append(count)
    sums, received, begin = [], [], 0
    for source in range(ranks):
        before = begin
        for s, first, last, row in overlaps(source, rank):
            sums.append((s.start, begin, row, last - first))
            begin += batch * (last - first)
        received.append(begin - before)
    return (torch.cat(parts) if parts else torch.arange(0), sent, received,
            *_sources([(at, row, count) for _, at, row, count in sorted(sums)], batch, rows))


def _sources(sums, batch, rows):
    """(first, sources) of a Plan. sums: (first received row, first own row, rows) of parts, in the order of the sum; the
    rows of the other sequences of the batch follow."""
    own = [torch.arange(row, row + count) + member * rows for _, row, count in sums for member in range(batch)]
    received = [torch.arange(at, at + batch * count) for at, _, count in sums]
    if not own:
        return torch.zeros(batch * rows + 1, dtype=torch.int64), torch.arange(0)
    own, received = torch.cat(own), torch.cat(received)
    counts = torch.bincount(own, minlength=batch * rows)
    first = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    return first, received[own.argsort(stable=True)]


@functools.lru_cache(maxsize=16)
def plan(layout: Layout, rank: int) -> Plan:
    """The Plan of one rank. Raises ValueError naming the argument."""
    if layout.blocks and layout.total % layout.blocks:
        raise ValueError(f"gradient_blocks: expected a divisor of the {layout.total} rows, got {layout.blocks}")
    positions = positions_of(layout)
    pieces = _order.pieces_of(positions)
    rows = layout.total // layout.ranks
    segments = _segments(pieces, layout, 0)
    send, sent, received, place = _exchange(pieces, segments, positions, layout, rank)
    finer = _segments(pieces, layout, layout.blocks) if layout.blocks else segments
    calls = []
    for of_pass, apart in ((segments, False), (finer, rows >= _SEPARATE_CALLS_FROM)):
        lists = _batches([s for s in of_pass if s.rank == rank], layout, apart)
        calls.append([_call(shift, some, place, layout, rows) for shift, some in lists])
    parts = _parts(lists, pieces, layout, rank, finer, rows)
    return Plan(rows, send, sent, received, *calls, *parts)


_on_devices: collections.OrderedDict = collections.OrderedDict()  # the last plans of plan_on()


def is_made(layout: Layout, rank: int, device: torch.device) -> bool:
    """Whether plan_on() has this plan already."""
    return (layout, rank, device) in _on_devices


def plan_on(layout: Layout, rank: int, device: torch.device) -> Plan:
    """plan() with its tensors on a device."""
    key = layout, rank, device
    found = _on_devices.pop(key, None) or plan(layout, rank).to(device)
    _on_devices[key] = found
    while len(_on_devices) > 16:
        _on_devices.popitem(last=False)
    return found
