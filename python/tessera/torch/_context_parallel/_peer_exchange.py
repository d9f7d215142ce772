# SPDX-License-Identifier: Apache-2.0
"""The exchange by copies between GPUs of one host: the counterparts of Keys and Gradients of _exchange.

Each rank writes its rows where the others can read them, and the ranks synchronize once for K and V, and once for dK
and dV of each step. Every rank then copies the rows that it needs into the memory that its kernels read, on a separate
stream, while kernels of another step run."""
from __future__ import annotations

import contextlib
import functools

import torch

from .. import _operators
from . import _exchange


# With up to so many steps each has memory of its own for the keys of its calls; with more, two take turns. Then the own
# rows of a later step are copied when memory is free, which waits for the kernels that run.
_MOST_SETS = 4


class PeerKeys:
    """K and V of all ranks, one group of key heads (a step) after another, as Keys gives them.

    copies: the Copies of the pass. ordered: whether a step's calls wait for what the caller's stream did before. limit:
    seconds that a rank waits for the others."""

    def __init__(self, peers, copies, calls, k, v, steps, ordered, limit):
        self.peers, self.copies, self.k, self.v, self.steps = peers, copies, k, v, steps
        self.each, self.ordered, self.limit = k.shape[2] + v.shape[2], ordered, limit
        self.rows = [call.keys.shape[0] for call in calls]
        self.sets = len(steps) if len(steps) <= _MOST_SETS else 2
        wide = max(map(self._width, range(len(steps))))
        self.memory = [k.new_empty(sum(self.rows) * (self._width(step) if self.sets == len(steps) else wide))
                       for step in range(self.sets)]
        self.current = torch.cuda.current_stream(k.device)
        # A single call hides no copies, so they run on the caller's stream: more streams cost the host time.
        # Several calls run on two streams in turn, so that one fills the multiprocessors that another leaves idle.
        self.side, self.streams = None, [self.current]
        if len(steps) * len(calls) > 1:
            self.side = _exchange.stream_of(k.device)
            self.streams.append(_second_stream(k.device))
            self.ready, self.free = ([[torch.cuda.Event() for _ in calls] for _ in steps] for _ in range(2))

    def _width(self, step):
        first, last = self.steps[step]
        return (last - first) * self.each

    def _shared(self, rank, step, first, rows):
        """Rows from `first` on of K and V of a step, in the memory of a rank."""
        width, size = self._width(step), self.k.dtype.itemsize
        byte = self.begin + (self.k.shape[0] * self.each * self.steps[step][0] + first * width) * size
        return self.peers.rows(rank, byte, rows, width, self.k.dtype)

    def _packed(self, step):
        """The keys of all calls of a step, [rows, width]."""
        width = self._width(step)
        return self.memory[step % self.sets][:sum(self.rows) * width].view(-1, width)

    def _of_call(self, step, index):
        begin = sum(self.rows[:index])
        return self._packed(step)[begin:begin + self.rows[index]]

    def _copy_own(self, step, to):
        """Copies this rank's rows in one launch: where the others read them, and to the keys of its own calls."""
        first, last = self.steps[step]
        heads, (of_row, to_row), own = slice(first, last), self.copies.own, self.k.shape[0]
        if to == "both":
            targets = self._shared(self.peers.rank, step, 0, own), self._packed(step)
        elif to == "others":
            targets, of_row, to_row = (self._shared(self.peers.rank, step, 0, own),) * 2, of_row[:own], to_row[:own]
        else:
            targets, of_row, to_row = (self._packed(step),) * 2, of_row[own:], to_row[own:] - own
        _operators.copy_rows(*targets, self.k[:, heads], self.v[:, heads], of_row, to_row)

    def _publish(self):
        """Copies this rank's rows, and synchronizes with the other ranks."""
        self.begin = self.peers.next_keys(self.limit)
        for step in range(len(self.steps)):
            self._copy_own(step, "both" if step < self.sets else "others")
        self.peers.synchronize(self.limit)

    def _pull(self, step, index):
        into = self._of_call(step, index)
        for run in self.copies.pulls[index]:
            into[run.row:run.row + run.rows].copy_(self._shared(run.rank, step, run.source, run.rows))
        return into

    def _start(self, step):
        with torch.cuda.stream(self.side):
            if step >= self.sets:
                for free in self.free[step - self.sets]:
                    self.side.wait_event(free)
                self._copy_own(step, "calls")
            for index, ready in enumerate(self.ready[step]):
                self._pull(step, index)
                ready.record(self.side)

    @contextlib.contextmanager
    def _call(self, step, index):
        stream = self.streams[(step * len(self.rows) + index) % 2]
        with torch.cuda.stream(stream):
            stream.wait_event(self.ready[step][index])
            yield self._of_call(step, index)
            self.free[step][index].record(stream)

    def _join(self):
        for stream in self.streams[1:]:
            self.current.wait_stream(stream)

    def _part(self):
        """In a graph: synchronizes the ranks when all have copied, before the next call writes to the same buffer."""
        if self.k.is_cuda and torch.cuda.is_current_stream_capturing():
            self.peers.synchronize(self.limit)

    def __iter__(self):
        """Yields a Step for each group of key heads."""
        self._publish()
        if self.side is None:
            yield _exchange.Step(*self.steps[0], lambda index: contextlib.nullcontext(self._pull(0, index)), self._join)
            self._part()
            return
        for stream in (self.side, *self.streams[1:]):
            stream.wait_stream(self.current)
        try:
            for step in range(self.sets):
                self._start(step)
            for step, (first, last) in enumerate(self.steps):
                if self.ordered and step:
                    for stream in self.streams[1:]:
                        stream.wait_stream(self.current)
                yield _exchange.Step(first, last, functools.partial(self._call, step), self._join)
                if step + self.sets < len(self.steps):
                    self._start(step + self.sets)
            self._join()
            self._part()
        finally:
            self._join()
            self.current.wait_stream(self.side)


@functools.lru_cache(maxsize=None)
def _second_stream(device):
    return torch.cuda.Stream(device)


class PeerGradients:
    """The rows of dK and dV of all calls of a step, on their way to the ranks that hold the keys."""

    def __init__(self, peers, copies, byte, mine, limit, alone):
        """mine: dK and dV of the step's calls, [rows, width], in this rank's symmetric memory from `byte` on. alone:
        whether no other step follows, beside whose kernels the copies could run."""
        self.peers, self.copies, self.byte, self.mine = peers, copies, byte, mine
        self.current, self.ready = torch.cuda.current_stream(mine.device), None
        self.received = mine.new_empty((sum(run.rows for run in copies.parts), mine.shape[1]))
        peers.synchronize(limit)
        if alone:
            self._copy()
            return
        side, self.ready = _exchange.stream_of(mine.device), torch.cuda.Event()
        side.wait_stream(self.current)
        with torch.cuda.stream(side):
            self._copy()
            self.ready.record(side)

    def _copy(self):
        width, dtype = self.mine.shape[1], self.mine.dtype
        for run in self.copies.parts:
            at = self.byte + run.source * width * dtype.itemsize
            self.received[run.row:run.row + run.rows].copy_(self.peers.rows(run.rank, at, run.rows, width, dtype))

    def finish(self):
        """The received rows, [rows, heads * head_dim + heads * head_dim_v]."""
        self.settle()
        received, self.received = self.received, None
        return received

    def settle(self):
        """Has the caller's stream wait for the rows, which still write memory."""
        if self.ready is not None:
            self.current.wait_event(self.ready)
