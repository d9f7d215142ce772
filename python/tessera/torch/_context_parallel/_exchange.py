# SPDX-License-Identifier: Apache-2.0
"""What crosses ranks: rows of K and V before the calls, rows of dK and dV after them. On CUDA the copies into and out of
the buffers run on a stream of their own, beside the kernels of the calls."""
from __future__ import annotations

import contextlib
import datetime
import functools

import torch
import torch.distributed as dist


@functools.lru_cache(maxsize=None)
def _stream_of(device):
    return torch.cuda.Stream(device)


class Exchanges:
    """The collectives of one call on a group. limit: seconds that a rank waits for the others on the CPU; on CUDA the
    group's own timeout holds, since the host does not wait."""

    def __init__(self, group, plan, device, limit, function):
        self.group, self.plan, self.device, self.limit, self.function = group, plan, device, limit, function
        self.ranks = dist.get_world_size(group)
        self.side = _stream_of(device) if device.type == "cuda" else None

    def _beside(self):
        return torch.cuda.stream(self.side) if self.side is not None else contextlib.nullcontext()

    def _begin(self, *tensors):
        """The side stream goes on from where the current stream is, and reads these tensors."""
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream(self.device))
            for tensor in tensors:
                tensor.record_stream(self.side)

    def _collective(self, function, *arguments):
        try:
            return function(*arguments, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._failed(error) from None

    def _finish(self, work, received):
        """A function that returns `received` when it is there."""
        def finish():
            try:
                if work is not None:
                    with self._beside():
                        if self.side is not None:
                            work.wait()
                        else:
                            work.wait(datetime.timedelta(seconds=self.limit))
            except RuntimeError as error:
                raise self._failed(error) from None
            if self.side is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_stream(self.side)
                received.record_stream(current)
            return received
        return finish

    def _failed(self, error):
        return RuntimeError(f"{self.function}: rank {dist.get_rank(self.group)} of {self.ranks} got no answer from the "
                            f"others within {self.limit:g} s, or the process of another rank has ended "
                            f"({str(error).splitlines()[0][:200]})")

    def keys(self, k, v):
        """Starts to send rows of K and V, [rows, heads, head_dim] each. Returns a function that gives the received rows
        [.., heads * head_dim + heads * head_dim_v] when they are there."""
        self._begin(k, v)
        with self._beside():
            if self.plan.send is None:
                mine = _side_by_side(k, v)
                if self.ranks == 1:
                    return self._finish(None, mine)
                received = mine.new_empty((self.ranks * mine.shape[0], mine.shape[1]))
                return self._finish(self._collective(dist.all_gather_into_tensor, received, mine), received)
            return self._all_to_all(_side_by_side(k, v, self.plan.send), self.plan.sent, self.plan.received)

    def gradients(self, parts):
        """Starts to send the rows of dK and dV of all calls, a list of (dK, dV). Returns a function that gives the
        received rows."""
        self._begin(*(t for part in parts for t in part))
        with self._beside():
            of_k, of_v = (torch.cat(some) if len(some) > 1 else some[0] for some in zip(*parts))
            mine = _side_by_side(of_k, of_v, self.plan.parts)
            if self.ranks == 1:
                return self._finish(None, mine)
            return self._all_to_all(mine, self.plan.parts_sent, self.plan.parts_received)

    def _all_to_all(self, mine, sent, received):
        into = mine.new_empty((sum(received), mine.shape[1]))
        return self._finish(self._collective(dist.all_to_all_single, into, mine, received, sent), into)


def _side_by_side(k, v, chosen=None):
    """[rows, heads * head_dim + heads * head_dim_v]: the row of K, then the row of V. chosen: which rows; None: all."""
    width = k.shape[1] * k.shape[2]
    rows = k.new_empty((k.shape[0] if chosen is None else chosen.shape[0], width + v.shape[1] * v.shape[2]))
    for half, tensor in ((rows[:, :width], k), (rows[:, width:], v)):
        half = half.unflatten(1, tensor.shape[1:])
        if chosen is None:
            half.copy_(tensor)
        else:
            torch.index_select(tensor, 0, chosen, out=half)
    return rows


def halves(rows, heads, head_dim):
    """(K, V) of rows that lie side by side, as views."""
    width = heads * head_dim
    return rows[:, :width].unflatten(1, (heads, head_dim)), rows[:, width:].unflatten(1, (heads, -1))
