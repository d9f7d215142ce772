# SPDX-License-Identifier: Apache-2.0
"""Cases of test_context_parallel.py: copies between GPUs of one host give the same rows as the collectives."""
import contextlib
import os
import unittest.mock

import torch
import torch.distributed as dist

from context_parallel_support import FOLDER, NAMES, case, expect, inputs, ranks_part, reversed_chunks


def copied(runs, sources, rows):
    """The rows that `runs` bring, of the rows of each rank."""
    into = torch.full((rows,), -1)
    for run in runs:
        into[run.row:run.row + run.rows] = sources[run.rank][run.source:run.source + run.rows]
    return into


@case
def copies_bring_what_collectives_bring(groups):
    """By numbers in the place of rows: those of K and V, and of dK and dV, of every rank, each with one of its own."""
    from tessera.torch._context_parallel import _peers, _plan
    layouts = [dict(), dict(batch=3), dict(causal=False, left=20, right=9), dict(causal=True, left=5, order="contiguous"),
               dict(offsets=(0, 13, 50, 50, 61, 96)), dict(blocks=12), dict(order="permutation")]
    for ranks in (2, 3, 4):
        for given in layouts:
            options = {"batch": 1, "order": "zigzag", "offsets": None, "causal": True, "left": -1, "right": -1,
                       "blocks": 0, **given}
            if options["order"] == "permutation":
                options["order"] = reversed_chunks(ranks).numpy().tobytes()
            layout = _plan.Layout(96, options["batch"], ranks, options["order"], options["offsets"], options["causal"],
                                  options["left"], options["right"], options["blocks"])
            copies, plans = _peers.copies(layout), [_plan.plan(layout, rank) for rank in range(ranks)]
            if copies is None:
                assert options["blocks"] or options["batch"] > 1 or options["offsets"], given
                continue
            own = 96 // ranks * layout.batch
            rows = [torch.arange(own) + rank * own for rank in range(ranks)]
            for rank, plan in enumerate(plans):
                if plan.send is None:
                    received = torch.cat(rows)
                else:
                    received = torch.cat([r[_peers._to(p.send, p.sent, rank)] for r, p in zip(rows, plans)])
                for calls, keys in zip((plan.forward, plan.backward), copies[rank].keys):
                    of_row, to_row = keys.own
                    assert torch.equal(of_row[:own], to_row[:own]) and torch.equal(of_row[:own], torch.arange(own))
                    begin = own
                    for call, pulls in zip(calls, keys.pulls):
                        found, end = copied(pulls, rows, len(call.keys)), begin + len(call.keys)
                        mine = (to_row >= begin) & (to_row < end)
                        found[to_row[mine] - begin] = rows[rank][of_row[mine]]
                        assert torch.equal(found, received[call.keys]), (given, rank)
                        begin = end
                made = [torch.arange(sum(len(c.keys) for c in p.backward)) + 10**6 * r for r, p in enumerate(plans)]
                returned = torch.cat([m[_peers._to(p.parts, p.parts_sent, rank)] for m, p in zip(made, plans)])
                assert torch.equal(copied(copies[rank].parts, made, len(returned)), returned), (given, rank)
                assert max(map(len, made)) == copies[rank].most_parts
    many = _plan.Layout(96, 1, 2, torch.arange(96).view(48, 2).t().flatten().numpy().tobytes(), None, True, -1, -1, 0)
    assert _peers.copies(many) is None  # each row is a run: NCCL exchanges them
    assert dist.get_world_size(groups[1]) == 1


class SharedFiles:
    """Peers whose memory is a file of each rank, for processes of one machine without a GPU."""

    def __init__(self, group):
        self.group, self.rank, self.buffer, self.sizes = group, dist.get_rank(group), 0, (1 << 18, 1 << 20)
        self.names = [f"{FOLDER}/{group.group_name.replace('/', '_')}.{r}" for r in range(dist.get_world_size(group))]
        with open(self.names[self.rank], "wb") as file:
            file.truncate(2 * sum(self.sizes))
        dist.barrier(group)
        self.memory = [torch.from_file(name, True, os.path.getsize(name), dtype=torch.uint8) for name in self.names]

    def reserve(self, keys, parts):
        assert keys <= self.sizes[0] and parts <= self.sizes[1]

    def next_keys(self, limit):
        self.buffer ^= 1
        return self.buffer * self.sizes[0]

    def gradients(self, step):
        return 2 * self.sizes[0] + step % 2 * self.sizes[1]

    def rows(self, rank, byte, rows, width, dtype):
        return self.memory[rank][byte:byte + rows * width * dtype.itemsize].view(dtype).view(rows, width)

    def synchronize(self, limit):
        dist.barrier(self.group)


def _set_separate_calls_from(rows):
    """Sets from how many rows on two segments are calls of their own, and drops the plans that were made before."""
    from tessera.torch._context_parallel import _peers, _plan
    _plan._SEPARATE_CALLS_FROM = rows
    _plan.plan.cache_clear()
    _plan._on_devices.clear()
    _peers.copies.cache_clear()
    _peers._on_devices.clear()


@case
def copies_give_the_bits_of_collectives(groups):
    """Imitates copies between GPUs of one host: files stand for their memory, and streams run everything at once."""
    from tessera.torch._context_parallel import _peers, _setup
    stream = unittest.mock.MagicMock()
    patches = [unittest.mock.patch.object(torch.cuda, name, with_) for name, with_ in (
        ("current_stream", lambda device: stream), ("Stream", lambda *a, **k: stream), ("Event", unittest.mock.MagicMock),
        ("stream", lambda _: contextlib.nullcontext()))]
    for ranks in (2, 3, 4):
        if ranks not in groups:
            continue
        files = SharedFiles(groups[ranks])
        for options in ({"causal": True}, {"window": (20, 9)}, {"causal": True, "cu_seqlens": [0, 13, 50, 61, 90]}):
            for order, steps, apart, sizes in (("zigzag", 1, 8, {}), ("contiguous", 2, 10**6, {}),
                                               ("zigzag", 3, 8, dict(heads_q=5, heads_kv=5)), ("zigzag", 6, 8, dict(heads_kv=6, heads_q=6)),
                                               ("zigzag", None, 10**6, dict(batch=3))):
                if "cu_seqlens" in options and "batch" in sizes:
                    continue
                _set_separate_calls_from(apart)
                whole = inputs(**sizes)
                want = ranks_part(whole, groups[ranks], order, options, steps=steps)
                with contextlib.ExitStack() as stack:
                    for patch in patches:
                        stack.enter_context(patch)
                    of_group = stack.enter_context(unittest.mock.patch.object(_peers, "of_group", return_value=files))
                    got = ranks_part(whole, groups[ranks], order, options, steps=steps)
                    assert of_group.called
                expect(got, want, NAMES, 0, f"{options}, {order}, {steps} steps, {ranks} ranks")
    _set_separate_calls_from(4096)
    assert not _setup.setups
