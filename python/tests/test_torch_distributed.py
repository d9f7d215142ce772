# SPDX-License-Identifier: Apache-2.0
"""DTensors over four processes of gloo on the CPU; dtensor_processes.py has the cases."""
import pytest

import processes

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no torch.distributed with gloo", allow_module_level=True)
import dtensor_processes  # noqa: E402

LIMIT = 300  # seconds; a few on an idle machine


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return processes.outcomes_of(dtensor_processes, tmp_path_factory.mktemp("processes"), LIMIT)


@pytest.mark.parametrize("case", dtensor_processes.CASES)
def test_distributed_tensors(outcomes, case):
    processes.expect_passed(outcomes, case)
