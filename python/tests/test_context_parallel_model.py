# SPDX-License-Identifier: Apache-2.0
"""The cost model's steps, bytes and memory of a call over several GPUs that exchange by NCCL are those of
context_parallel_plan()."""
import json
import subprocess

import pytest

pytest.importorskip("torch")
import tessera.torch as tt
from tessera import _command


def predicted(ranks, rows, heads_kv, causal):
    """The passes of `tessera roofline --gpus`."""
    said = subprocess.run(
        [_command.program(), "roofline", "--json", "--device", "h200", "--gpus", str(ranks), "--rows", str(rows),
         "--heads", f"32/{heads_kv}", "--head-dim", "128", "--pass", "both", "--nccl",
         "--causal", "bottom-right" if causal else "none"], capture_output=True, text=True, check=True)
    return json.loads(said.stdout)["rows"][0]["passes"]


SHAPES = [(2, 512, 8, True), (2, 8192, 8, True), (4, 2048, 2, True), (4, 32768, 8, True), (4, 8192, 32, False),
          (3, 2048, 8, False)]


@pytest.mark.parametrize("ranks, rows, heads_kv, causal", SHAPES)
def test_sizes_are_those_of_the_plan(ranks, rows, heads_kv, causal):
    for number, found in enumerate(predicted(ranks, rows, heads_kv, causal)):
        order = "zigzag" if causal else "contiguous"
        plans = [tt.context_parallel_plan(ranks * rows, ranks, heads_kv, 128, causal=causal, order=order,
                                          steps=found["steps"], rank=rank) for rank in range(ranks)]
        assert found["order"] == order
        assert found["bytes_received"] == max((plan.bytes_forward, plan.bytes_backward)[number] for plan in plans)
        assert found["memory_bytes"] == max((plan.memory_forward, plan.memory_backward)[number] for plan in plans)


@pytest.mark.parametrize("rows", [512, 2048, 4096, 8192, 32768, 65536, 131072])
def test_steps_are_those_of_the_plan(rows):
    forward, backward = predicted(2, rows, 8, True)
    plan = tt.context_parallel_plan(2 * rows, 2, 8, 128)
    assert (forward["steps"], backward["steps"]) == (plan.steps, plan.backward_steps)
