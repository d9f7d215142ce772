# SPDX-License-Identifier: Apache-2.0
"""What crosses ranks by copies between GPUs of one host: the counterparts of Keys and Gradients of _exchange.

Each rank writes its rows where the others can read them, and the ranks meet once for K and V, and once for dK and dV of
each step. Every rank then copies what it needs to where its kernels read it, on a stream of its own, while kernels of
another step run."""
from __future__ import annotations

import contextlib
import functools

import torch

from . import _exchange


class PeerKeys:
    """K and V of all ranks, one group of key heads (a step) after another, as Keys gives them.

    peers, runs: the Peers of the group, and the runs of rows of each call. limit: seconds that a rank waits."""

    def __init__(self, peers, runs, calls, k, v, steps, limit):
        self.peers, self.runs, self.calls, self.k, self.v, self.steps = peers, runs, calls, k, v, steps
        self.each, self.limit = k.shape[2] + v.shape[2], limit
        most = max(last - first for first, last in steps) * self.each
        twins = min(len(steps), 2)
        self.packed = [[k.new_empty(call.keys.shape[0] * most) for call in calls] for _ in range(twins)]
        self.current = torch.cuda.current_stream(k.device)
        # What is one call hides nothing, so its copies are on the caller's stream: more streams cost the host time.
        # Several calls run on two streams in turn, so that one fills the multiprocessors that another leaves idle.
        self.side, self.streams = None, [self.current]
        if len(steps) * len(calls) > 1:
            self.side = _exchange.stream_of(k.device)
            self.streams.append(_second_stream(k.device))
        self.ready, self.free = ([[torch.cuda.Event() for _ in calls] for _ in range(twins)] for _ in range(2))

    def _width(self, step):
        first, last = self.steps[step]
        return (last - first) * self.each

    def _rows(self, rank, step, first, rows):
        """Rows from `first` on of K and V of a step, in the memory of a rank."""
        width, size = self._width(step), self.k.dtype.itemsize
        byte = self.begin + (self.k.shape[0] * self.each * self.steps[step][0] + first * width) * size
        return self.peers.rows(rank, byte, rows, width, self.k.dtype)

    def _packed(self, step):
        width = self._width(step)
        return [flat[:call.keys.shape[0] * width].view(-1, width)
                for flat, call in zip(self.packed[step % 2], self.calls)]

    def _publish(self):
        """Writes this rank's K and V where the others read them."""
        self.begin = self.peers.next_keys(self.limit)
        count, (rows, heads, dim), each = len(self.steps), self.k.shape, self.each
        if heads % count == 0 and dim == self.v.shape[2]:  # equal steps: one launch for K, and one for V
            of_steps = self.peers.rows(self.peers.rank, self.begin, count * rows, heads // count * each, self.k.dtype)
            of_steps = of_steps.view(count, rows, 2, heads // count, dim)
            for half, tensor in ((0, self.k), (1, self.v)):
                of_steps[:, :, half].copy_(tensor.unflatten(1, (count, heads // count)).transpose(0, 1))
        else:
            for step, (first, last) in enumerate(self.steps):
                _exchange.side_by_side(self.k[:, first:last], self.v[:, first:last], None,
                                       self._rows(self.peers.rank, step, 0, rows))
        self.peers.meet(self.limit)

    def _copy(self, step, index):
        into = self._packed(step)[index]
        for run in self.runs[index]:
            into[run.row:run.row + run.rows].copy_(self._rows(run.rank, step, run.source, run.rows))
        return into

    def _start(self, step):
        with torch.cuda.stream(self.side):
            for index, ready in enumerate(self.ready[step % 2]):
                if step >= 2:
                    self.side.wait_event(self.free[step % 2][index])
                self._copy(step, index)
                ready.record(self.side)

    @contextlib.contextmanager
    def _call(self, step, index):
        stream = self.streams[(step * len(self.calls) + index) % 2]
        with torch.cuda.stream(stream):
            stream.wait_event(self.ready[step % 2][index])
            yield self._packed(step)[index]
            self.free[step % 2][index].record(stream)

    def _join(self):
        for stream in self.streams[1:]:
            self.current.wait_stream(stream)

    def __iter__(self):
        """Yields a Step for each group of key heads."""
        self._publish()
        if self.side is None:
            yield _exchange.Step(*self.steps[0], lambda index: contextlib.nullcontext(self._copy(0, index)), self._join)
            return
        for stream in (self.side, *self.streams[1:]):
            stream.wait_stream(self.current)
        try:
            for step in range(min(2, len(self.steps))):
                self._start(step)
            for step, (first, last) in enumerate(self.steps):
                yield _exchange.Step(first, last, functools.partial(self._call, step), self._join)
                if step + 2 < len(self.steps):
                    self._start(step + 2)
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
        peers.meet(limit)
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
