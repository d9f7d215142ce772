# SPDX-License-Identifier: Apache-2.0
"""Tests over several processes. A program forks them and writes what each case raised into FOLDER/RANK.json; a test
runs the program once and looks at the outcome of one case."""
import contextlib
import json
import os
import pathlib
import subprocess
import sys


@contextlib.contextmanager
def group_of_one():
    """Within it, this process is the default group of torch.distributed, by gloo."""
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fork_all(count, work):
    """Runs work(rank) in `count` forks, so that PyTorch is imported once; no thread of PyTorch runs yet."""
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            try:
                work(rank)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def outcomes_of(module, folder, limit):
    """One result of each process of the program `module`, which has PROCESSES: case -> None or its traceback.

    limit: seconds, since processes that wait for each other would wait for ever."""
    said = subprocess.run([sys.executable, module.__file__, folder], capture_output=True, text=True, timeout=limit,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    found = [json.loads(path.read_text()) for path in sorted(pathlib.Path(folder).glob("*.json"))]
    assert len(found) == module.PROCESSES, said.stderr
    return found


def expect_passed(outcomes, case):
    for rank, outcome in enumerate(outcomes):
        assert case in outcome, f"process {rank} did not reach it"
        assert outcome[case] is None, f"process {rank}: {outcome[case]}"
