# SPDX-License-Identifier: Apache-2.0
"""Cases of test_context_parallel.py: the copies between GPUs of one host bring what the collectives bring."""
import torch
import torch.distributed as dist

from context_parallel_support import case, reversed_chunks


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
                for calls, of_calls in zip((plan.forward, plan.backward), copies[rank].keys):
                    for call, runs in zip(calls, of_calls):
                        assert torch.equal(copied(runs, rows, len(call.keys)), received[call.keys]), (given, rank)
                made = [torch.arange(sum(len(c.keys) for c in p.backward)) + 10**6 * r for r, p in enumerate(plans)]
                returned = torch.cat([m[_peers._to(p.parts, p.parts_sent, rank)] for m, p in zip(made, plans)])
                assert torch.equal(copied(copies[rank].parts, made, len(returned)), returned), (given, rank)
                assert max(map(len, made)) == copies[rank].most_parts
    many = _plan.Layout(96, 1, 2, torch.arange(96).view(48, 2).t().flatten().numpy().tobytes(), None, True, -1, -1, 0)
    assert _peers.copies(many) is None  # each row is a run: NCCL exchanges them
    assert dist.get_world_size(groups[1]) == 1
