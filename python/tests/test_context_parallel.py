# SPDX-License-Identifier: Apache-2.0
"""One sequence over four processes of gloo on the CPU; context_parallel_processes.py has the cases."""
import pytest

import processes

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no torch.distributed with gloo", allow_module_level=True)
import context_parallel_processes  # noqa: E402

LIMIT = 600  # seconds; under 60 on an idle machine


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return processes.outcomes_of(context_parallel_processes, tmp_path_factory.mktemp("processes"), LIMIT)


@pytest.mark.parametrize("case", context_parallel_processes.CASES)
def test_context_parallel(outcomes, case):
    processes.expect_passed(outcomes, case)
