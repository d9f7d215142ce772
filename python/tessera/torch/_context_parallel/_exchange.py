# SPDX-License-Identifier: Apache-2.0
"""The exchange between ranks by collectives: rows of K and V before the calls, rows of dK and dV after them."""
from __future__ import annotations

import contextlib
import datetime
import functools
import typing

import torch
import torch.distributed as dist


@functools.lru_cache(maxsize=None)
def stream_of(device):
    """The stream for what crosses ranks, of a higher priority than the kernels of attention."""
    return torch.cuda.Stream(device, priority=-1)


class Collectives:
    """Collectives of one call on a group. limit: seconds that a rank waits for the others on the CPU; on CUDA the
    group's own timeout holds, since the host does not wait."""

    def __init__(self, group, device, limit, function):
        self.group, self.device, self.limit, self.function = group, device, limit, function
        self.ranks = dist.get_world_size(group)

    def begin(self, collective, *arguments):
        try:
            return collective(*arguments, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._failed(error) from None

    def end(self, work):
        """Waits on the CPU; on CUDA the current stream waits."""
        try:
            if self.device.type == "cpu":
                work.wait(datetime.timedelta(seconds=self.limit))
            else:
                work.wait()
        except RuntimeError as error:
            raise self._failed(error) from None

    def _failed(self, error):
        return RuntimeError(f"{self.function}: rank {dist.get_rank(self.group)} of {self.ranks} got no answer from the "
                            f"others within {self.limit:g} s, or the process of another rank has ended "
                            f"({str(error).splitlines()[0][:200]})")


class Step(typing.NamedTuple):
    """A group of key heads whose K and V have arrived."""
    first: int  # heads
    last: int
    call: typing.Callable  # from the number of a call to the context in which it runs, which gives its rows of K and V
    join: typing.Callable  # has the caller's stream wait for the calls


def buffers_of(plan, calls, own, ranks, steps):
    """(rows of a buffer of received rows, how many such buffers, rows of the copies for the calls, how many sets of
    these) that Keys allocates. own: the rows of this rank, over the batch; steps: how many."""
    received = own * ranks if plan.send is None else sum(plan.received)
    twins = min(steps, 2)
    copies = [call.keys.shape[0] for call in calls]
    # The keys of all calls are made beside the kernels if they are not many more than the rows.
    if sum(copies) <= 1.5 * own * ranks:
        return received, 1, copies, twins
    return received, twins, [], twins


class Keys:
    """K and V of all ranks, one group of key heads (a step) after another: those of the next step travel while the
    caller computes. On CUDA the copies into and out of the buffers, and the wait for the others, are on a stream of
    their own. Each buffer has a twin, and the stream waits until the caller is done with the one that it writes.

    k, v: this rank's rows [rows, heads, head_dim]. steps: the heads (first, last) of each."""

    def __init__(self, collectives, plan, calls, k, v, steps):
        self.collectives, self.plan, self.calls, self.k, self.v, self.steps = collectives, plan, calls, k, v, steps
        self.each = k.shape[2] + v.shape[2]
        self.own = k.shape[0] if plan.send is None else plan.send.shape[0]
        self.rows, count, copies, twins = buffers_of(plan, calls, k.shape[0], collectives.ranks, len(steps))
        self.ahead = bool(copies)
        most = max(last - first for first, last in steps) * self.each
        self.received = [k.new_empty(self.rows * most) for _ in range(count)]
        self.packed = [[k.new_empty(rows * most) for rows in copies] for _ in range(twins)]
        self.side, self.open = None, []  # open: what has begun and was not waited for
        if k.is_cuda:
            self.side, self.current = stream_of(k.device), torch.cuda.current_stream(k.device)
            self.ready, self.free = ([torch.cuda.Event() for _ in range(twins)] for _ in range(2))
            self.side.wait_stream(self.current)

    def _beside(self):
        return torch.cuda.stream(self.side) if self.side is not None else contextlib.nullcontext()

    def _buffer(self, flat, rows, step):
        first, last = self.steps[step]
        width = (last - first) * self.each
        return flat[:rows * width].view(rows, width)

    def _received(self, step):
        return self._buffer(self.received[step % len(self.received)], self.rows, step)

    def _packed(self, step):
        twin = self.packed[step % len(self.packed)]
        return [self._buffer(flat, call.keys.shape[0], step) for flat, call in zip(twin, self.calls)]

    def _start(self, step):
        """Begins the exchange of a step, and returns a function that finishes it."""
        first, last = self.steps[step]
        with self._beside():
            if self.side is not None and step >= 2:
                self.side.wait_event(self.free[step % 2])
            into = self._received(step)
            work = None
            if self.collectives.ranks == 1:
                side_by_side(self.k[:, first:last], self.v[:, first:last], None, into)
            else:
                mine = self.k.new_empty((self.own, into.shape[1]))
                side_by_side(self.k[:, first:last], self.v[:, first:last], self.plan.send, mine)
                if self.plan.send is None:
                    work = self.collectives.begin(dist.all_gather_into_tensor, into, mine)
                else:
                    work = self.collectives.begin(dist.all_to_all_single, into, mine, self.plan.received, self.plan.sent)
            if work is not None:
                self.open.append(work)
        if self.side is None:
            return lambda: self._finish(step, work)
        self._finish(step, work)
        return lambda: self.current.wait_event(self.ready[step % 2])

    def _finish(self, step, work):
        with self._beside():
            if work is not None:
                self.open.remove(work)
                self.collectives.end(work)
            if self.ahead:
                for call, into in zip(self.calls, self._packed(step)):
                    torch.index_select(self._received(step), 0, call.keys, out=into)
            if self.side is not None:
                self.ready[step % 2].record(self.side)

    def __iter__(self):
        """Yields a Step for each group of key heads. Closing it waits for what has begun, which writes its buffers."""
        try:
            yield from self._each()
        finally:
            self._settle()

    def _settle(self):
        if self.side is not None:
            self.current.wait_stream(self.side)
        for work in self.open:
            with contextlib.suppress(RuntimeError):
                self.collectives.end(work)

    def _each(self):
        pending = self._start(0)
        for step, (first, last) in enumerate(self.steps):
            finish, pending = pending, None
            # One buffer of received rows is free for the next step when the keys of this one are made.
            if self.side is None and self.ahead:
                finish()
            if step + 1 < len(self.steps):
                pending = self._start(step + 1)
            if self.side is not None or not self.ahead:
                finish()
            if self.ahead:
                keys_of = self._packed(step).__getitem__
            else:
                received = self._received(step)

                def keys_of(index):
                    return received.index_select(0, self.calls[index].keys)
            yield Step(first, last, lambda index: contextlib.nullcontext(keys_of(index)), lambda: None)
            if self.side is not None:
                self.free[step % 2].record(self.current)


@contextlib.contextmanager
def steps(*arguments):
    """A context in which the iterator of Keys(*arguments) runs. An error in it leaves no exchange that writes memory
    which is free."""
    with contextlib.closing(iter(Keys(*arguments))) as each:
        yield each


class Gradients:
    """The rows of dK and dV of all calls of a step, on their way to the ranks that hold the keys."""

    def __init__(self, collectives, plan, parts):
        """parts: dK and dV of all calls, [rows, width], in the order of the plan's calls."""
        self.collectives, self.work = collectives, None
        self.received = mine = parts.index_select(0, plan.parts)
        if collectives.ranks > 1:
            self.received = mine.new_empty((sum(plan.parts_received), mine.shape[1]))
            self.work = collectives.begin(dist.all_to_all_single, self.received, mine, plan.parts_received,
                                          plan.parts_sent)

    def finish(self):
        """The received rows, [rows, heads * head_dim + heads * head_dim_v]."""
        received, self.received = self.received, None
        self._arrive()
        return received

    def _arrive(self):
        work, self.work = self.work, None
        if work is not None:
            self.collectives.end(work)

    def settle(self):
        """Waits for rows that nobody asked for, which still write memory."""
        with contextlib.suppress(RuntimeError):
            self._arrive()


def side_by_side(k, v, chosen, into):
    """Writes rows of K, each followed by the row of V. chosen: which rows; None: all."""
    width = k.shape[1] * k.shape[2]
    for half, tensor in ((into[:, :width], k), (into[:, width:], v)):
        half = half.unflatten(1, tensor.shape[1:])
        if chosen is None:
            half.copy_(tensor)
        else:
            torch.index_select(tensor, 0, chosen, out=half)


def halves(rows, heads, head_dim):
    """(K, V) of rows that lie side by side, as views."""
    count, width = rows.shape[0], heads * head_dim
    return rows[:, :width].view(count, heads, head_dim), rows[:, width:].view(count, heads, rows.shape[1] // heads - head_dim)
