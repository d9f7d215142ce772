# SPDX-License-Identifier: Apache-2.0
"""One sequence over four processes of gloo on the CPU; context_parallel_processes.py has the cases."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no torch.distributed with gloo", allow_module_level=True)
import context_parallel_processes  # noqa: E402

LIMIT = 600  # seconds; under 60 on an idle machine. Processes that wait for each other would wait for ever.


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """One result of each process: case -> None or its traceback."""
    folder = tmp_path_factory.mktemp("processes")
    said = subprocess.run([sys.executable, context_parallel_processes.__file__, folder], capture_output=True, text=True,
                          timeout=LIMIT, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    found = [json.loads(path.read_text()) for path in sorted(pathlib.Path(folder).glob("*.json"))]
    assert len(found) == context_parallel_processes.PROCESSES, said.stderr
    return found


@pytest.mark.parametrize("case", context_parallel_processes.CASES)
def test_context_parallel(outcomes, case):
    for rank, outcome in enumerate(outcomes):
        assert case in outcome, f"process {rank} did not reach it"
        assert outcome[case] is None, f"process {rank}: {outcome[case]}"
