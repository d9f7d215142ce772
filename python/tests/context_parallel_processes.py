# SPDX-License-Identifier: Apache-2.0
"""`python context_parallel_processes.py FOLDER [CASE...]` forks four processes, which form groups of 1 to 4 by gloo on
the CPU, and writes what each case raised into FOLDER/RANK.json."""
import os
import sys
import time
import traceback
import warnings

import torch
import torch.distributed as dist

import context_parallel_bits  # noqa: F401
import context_parallel_copies  # noqa: F401
import context_parallel_interfaces  # noqa: F401
import context_parallel_plans  # noqa: F401
import context_parallel_uses  # noqa: F401
import processes
import context_parallel_errors  # noqa: F401  isort: skip - its last case ends a process
from context_parallel_support import CASES, ENDED, FOLDER, OUTCOMES, PROCESSES, write


def work(rank):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=rank, world_size=PROCESSES)
    groups = {n: dist.new_group(list(range(n))) for n in range(2, PROCESSES + 1)}
    alone = [dist.new_group([r]) for r in range(PROCESSES)][rank]
    ENDED.update(late=dist.new_group([0, 1]), refuses=dist.new_group([0, 1]), dies=dist.new_group(list(range(PROCESSES))),
                 mixed=dist.new_group([0, 1], backend="cpu:gloo,cuda:gloo"))
    for name, function in CASES.items():
        torch.manual_seed(0)
        begin = time.monotonic()
        try:
            function({1: alone, **{n: group for n, group in groups.items() if rank < n}})
            OUTCOMES[name] = None
        except Exception:
            OUTCOMES[name] = traceback.format_exc()
            break  # the processes no longer agree on what they send
        finally:
            write(rank)
            if rank == 0:
                print(f"{name}: {time.monotonic() - begin:.1f} s", file=sys.stderr)
    os._exit(0)  # another process may have stopped, and destroy_process_group() would wait for it


if __name__ == "__main__":
    if len(sys.argv) > 2:
        wanted = {name: CASES[name] for name in sys.argv[2:]}
        CASES.clear()
        CASES.update(wanted)
    processes.fork_all(PROCESSES, work)
