# SPDX-License-Identifier: Apache-2.0
"""Copies between the GPUs of one host, over symmetric memory of a group's ranks: the GPUs' DMA units make them, which leaves
the multiprocessors to the kernels. NCCL's exchange gives equal bits where there is none.

The kernels for long sequences keep all multiprocessors until they end, so that what needs one, as NCCL does, waits."""
from __future__ import annotations

import collections
import functools
import os
import typing

import torch
import torch.distributed as dist

from . import _groups, _plan

# More copies than this for a step take the host longer than NCCL and a copy by rows.
_MOST_COPIES = 24
_ROUNDED = 1 << 20  # bytes
_MOST_VIEWS = 1024  # of a group's memory that are kept
_memory: dict = {}  # name of the group -> Peers, or None where the ranks have no symmetric memory


class Run(typing.NamedTuple):
    """Consecutive rows of a rank that go to consecutive rows of this one."""
    rank: int
    source: int
    row: int
    rows: int


def runs_of(rank, source) -> list[Run]:
    """The runs of rows that come from row source[i] of rank rank[i]; int64 [rows] both."""
    if not len(rank):
        return []
    breaks = torch.nonzero((rank.diff() != 0) | (source.diff() != 1)).flatten() + 1
    starts = [0, *breaks.tolist()]
    return [Run(int(rank[start]), int(source[start]), start, end - start)
            for start, end in zip(starts, [*starts[1:], len(rank)])]


class OfKeys(typing.NamedTuple):
    """The sources of the keys of a pass. own: (rows of this rank, rows that they become), int64 [copies] each: first
    every row once, where the others read it, and then the rows of all calls one after another. pulls: for each call the
    runs of other ranks."""
    own: tuple
    pulls: list


class Copies(typing.NamedTuple):
    """The copies that a rank makes, from its own rows and the others'. keys: forward and backward; parts: the runs of dK
    and dV, in the order of the rows that an exchange would receive; most_parts: the most rows of dK and dV that the
    calls of any rank make."""
    keys: tuple
    parts: list
    most_parts: int

    def to(self, device):
        """The Copies with their tensors on `device`."""
        return self._replace(keys=tuple(keys._replace(own=tuple(t.to(device) for t in keys.own)) for keys in self.keys))


@functools.lru_cache(maxsize=16)
def copies(layout: _plan.Layout) -> typing.Optional[list[Copies]]:
    """The Copies of each rank, or None where some rank would make too many."""
    plans = [_plan.plan(layout, rank) for rank in range(layout.ranks)]
    own = layout.total // layout.ranks * layout.batch
    most_parts = max(sum(call.keys.shape[0] for call in plan.backward) for plan in plans)
    found = []
    for rank, plan in enumerate(plans):
        if plan.send is None:
            index = torch.arange(own * layout.ranks)
            of_rank, of_row = index // own, index % own
        else:
            sent = [_to(p.send, p.sent, rank) for p in plans]
            of_row = torch.cat(sent)
            of_rank = torch.cat([torch.full((len(rows),), r) for r, rows in enumerate(sent)])
        keys = tuple(_of_keys(rank, own, [(of_rank[call.keys], of_row[call.keys]) for call in calls])
                     for calls in (plan.forward, plan.backward))
        returned = [_to(p.parts, p.parts_sent, rank) for p in plans]
        parts = runs_of(torch.cat([torch.full((len(rows),), r) for r, rows in enumerate(returned)]),
                        torch.cat(returned))
        if max(sum(map(len, of_pass.pulls)) for of_pass in keys) > _MOST_COPIES or len(parts) > _MOST_COPIES:
            return None
        found.append(Copies(keys, parts, most_parts))
    return found


def _of_keys(rank, own, calls):
    """The OfKeys of a pass. calls: the rank and the row that each key of a call comes from."""
    of_rank, of_row = (torch.cat(parts) for parts in zip(*calls))
    mine = torch.nonzero(of_rank == rank).flatten()
    every = torch.arange(own)
    pulls = [[run for run in runs_of(*call) if run.rank != rank] for call in calls]
    return OfKeys((torch.cat((every, of_row[mine])), torch.cat((every, own + mine))), pulls)


_on_devices: collections.OrderedDict = collections.OrderedDict()  # the last Copies of copies_on()


def copies_on(layout: _plan.Layout, rank: int, device: torch.device) -> typing.Optional[Copies]:
    """copies() of one rank with their tensors on a device."""
    of_ranks = copies(layout)
    if of_ranks is None:
        return None
    key = layout, rank, device
    found = _on_devices.pop(key, None) or of_ranks[rank].to(device)
    _on_devices[key] = found
    while len(_on_devices) > 16:
        _on_devices.popitem(last=False)
    return found


def _to(rows, counts, rank):
    """The part of `rows` that goes to `rank`. counts[r]: how many go to rank r, in the order of ranks."""
    first = sum(counts[:rank])
    return rows[first:first + counts[rank]]


class Peers:
    """Symmetric memory of a group: two buffers of K and V, which alternate from call to call, then two of dK and dV."""

    def __init__(self, group, device):
        self.group, self.device, self.buffer, self.stream = group, device, 0, None
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.sizes, self.handle, self.views = (0, 0), None, {}

    def reserve(self, keys, parts):
        """Allocates at least these numbers of bytes for K and V, and for dK and dV. All ranks pass the same numbers."""
        sizes = tuple(max(have, -(-wanted // _ROUNDED) * _ROUNDED) for have, wanted in zip(self.sizes, (keys, parts)))
        if sizes == self.sizes:
            return
        import torch.distributed._symmetric_memory as symmetric
        torch.cuda.synchronize(self.device)  # peers may still copy from the memory that is given up
        dist.barrier(self.group)
        self.handle, self.memory = None, None
        self.views.clear()
        memory = symmetric.empty(2 * sum(sizes), dtype=torch.uint8, device=self.device)
        self.handle = symmetric.rendezvous(memory, self.group.group_name)
        self.memory, self.sizes = memory, sizes

    def next_keys(self, limit):
        """The byte at which K and V of this call begin. Calls alternate between two buffers, so that a call may write
        while another rank still copies the K and V of the call before. This needs the same order of calls on every
        rank, so a call on another stream waits for the previous call's stream. All replays of a graph use one buffer:
        the ranks synchronize before they write it, and again when all have copied (PeerKeys)."""
        self.buffer ^= 1
        if torch.cuda.is_current_stream_capturing():
            self.synchronize(limit)
            return self.buffer * self.sizes[0]
        stream = torch.cuda.current_stream(self.device)
        if self.stream is not None and self.stream != stream:
            stream.wait_stream(self.stream)
        self.stream = stream
        return self.buffer * self.sizes[0]

    def gradients(self, step):
        """The byte at which dK and dV of a step begin."""
        return 2 * self.sizes[0] + step % 2 * self.sizes[1]

    def rows(self, rank, byte, rows, width, dtype):
        """Rows in the memory of a rank, [rows, width]."""
        key = rank, byte, rows, width, dtype
        view = self.views.get(key)
        if view is None:
            view = self.handle.get_buffer(rank, (rows, width), dtype, byte // dtype.itemsize)
            if len(self.views) < _MOST_VIEWS:
                self.views[key] = view
        return view

    def synchronize(self, limit):
        """The current stream waits until those of all ranks are here."""
        self.handle.barrier(channel=0, timeout_ms=min(int(limit * 1000), 2**31 - 1))


def of_group(name, device) -> typing.Optional[Peers]:
    """The Peers of a group, or None where its ranks can't have symmetric memory. All ranks call it together the first
    time."""
    if device.type != "cuda":
        return None
    if name not in _memory:
        _memory[name] = _made(name, device)
    return _memory[name]


def forget(name=None):
    """Drops the memory of a group, or of all."""
    if name is None:
        _memory.clear()
    else:
        _memory.pop(name, None)


_groups.on_forget(forget)


def _made(name, device):
    group = _groups.by_name(name)
    peers = None
    if os.environ.get("TESSERA_PEER_COPIES", "1") != "0":
        try:
            peers = Peers(group, device)
            if not all(torch.cuda.can_device_access_peer(device.index, other)
                       for other in range(torch.cuda.device_count()) if other != device.index):
                peers = None
        except (RuntimeError, ValueError):
            peers = None
    hosts = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, (_host(), peers is not None), group)
    if len({host for host, _ in hosts}) > 1 or not all(able for _, able in hosts):
        return None
    failure = None
    try:
        peers.reserve(1, 1)
    except Exception as error:  # PyTorch names no class for memory that can't be shared
        failure = str(error)
    dist.all_gather_object(hosts, failure, group)
    return None if any(hosts) else peers


def _host():
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename
