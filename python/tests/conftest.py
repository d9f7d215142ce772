# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests of the package: a generator, and the devices that tests of PyTorch's tensors run on."""
import importlib.util
import os
import re

import pytest
import seeds

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of a GPU that others share
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):  # for test_jax_sharded.py
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"


def why_no_cuda():
    """None where tests can run on a CUDA device, else the reason why they run on the CPU only."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    import torch
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    from tessera import _native
    from tessera.torch import _library
    if not any(name.startswith("cuda.") for name in _native.kernel_names()):
        return "this build of tessera has no CUDA kernels"
    return _library.status()[_library.CUDA_LIBRARY]


NO_CUDA = why_no_cuda()
DEVICES = ["cpu"] if NO_CUDA else ["cpu", "cuda"]


def pytest_generate_tests(metafunc):
    """A test with the argument `device` runs on each device that is there."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES, scope="session")


def pytest_terminal_summary(terminalreporter):
    if seeds.OF_RUN:
        terminalreporter.write_line(f"random numbers of TESSERA_SEED={seeds.OF_RUN}")
    if NO_CUDA:
        terminalreporter.write_line(f"on the CPU only: {NO_CUDA}")
        return
    count = {outcome: sum("cuda" in re.split(r"[][_.-]", report.nodeid) for report in reports)
             for outcome, reports in terminalreporter.stats.items() if outcome in ("passed", "failed", "skipped")}
    terminalreporter.write_line("on cuda: " + ", ".join(f"{number} {outcome}" for outcome, number in count.items()))


@pytest.fixture
def rng():
    """A NumPy generator with one seed in most runs."""
    import numpy
    return numpy.random.default_rng(seeds.random_seed(20261122))
