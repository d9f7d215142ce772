# SPDX-License-Identifier: Apache-2.0
"""The cost model's steps, bytes and memory of a call over several GPUs, by NCCL and by copies, are those of
context_parallel_plan(), whose times are the model's."""
import json
import subprocess

import pytest

pytest.importorskip("torch")
import tessera.torch as tt
from tessera import _command


def predicted(ranks, rows, heads_kv, causal, copies=False):
    """The passes of `tessera roofline --gpus`."""
    said = subprocess.run(
        [_command.program(), "roofline", "--json", "--device", "h200", "--gpus", str(ranks), "--rows", str(rows),
         "--heads", f"32/{heads_kv}", "--head-dim", "128", "--pass", "both", *([] if copies else ["--nccl"]),
         "--causal", "bottom-right" if causal else "none"], capture_output=True, text=True, check=True)
    return json.loads(said.stdout)["rows"][0]["passes"]


SHAPES = [(2, 512, 8, True), (2, 8192, 8, True), (4, 2048, 2, True), (4, 32768, 8, True), (4, 8192, 32, False),
          (3, 2048, 8, False)]


@pytest.mark.parametrize("ranks, rows, heads_kv, causal", SHAPES)
@pytest.mark.parametrize("copies", [False, True], ids=["nccl", "copies"])
def test_sizes_are_those_of_the_plan(ranks, rows, heads_kv, causal, copies):
    for number, found in enumerate(predicted(ranks, rows, heads_kv, causal, copies)):
        order = "zigzag" if causal else "contiguous"
        plans = [tt.context_parallel_plan(ranks * rows, ranks, heads_kv, 128, causal=causal, order=order, rank=rank,
                                          copies=copies, steps=None if copies else found["steps"]) for rank in range(ranks)]
        assert {plan.by for plan in plans} == {"copies" if copies else "collectives"}
        assert found["order"] == order
        assert found["bytes_received"] == max((plan.bytes_forward, plan.bytes_backward)[number] for plan in plans)
        assert found["memory_bytes"] == max((plan.memory_forward, plan.memory_backward)[number] for plan in plans)


@pytest.mark.parametrize("rows", [512, 2048, 4096, 8192, 32768, 65536, 131072])
def test_steps_are_those_of_the_plan(rows):
    forward, backward = predicted(2, rows, 8, True)
    plan = tt.context_parallel_plan(2 * rows, 2, 8, 128, copies=False)
    assert (forward["steps"], backward["steps"]) == (plan.steps, plan.backward_steps)


@pytest.mark.parametrize("copies", [False, True], ids=["nccl", "copies"])
def test_times_are_those_of_the_model(copies):
    forward, backward = predicted(4, 8192, 8, True, copies)
    plan = tt.context_parallel_plan(32768, 4, 8, 128, heads_q=32, copies=copies, device="h200")
    assert (plan.ms_forward, plan.ms_backward) == (forward["ms"], backward["ms"])
    offsets = [0, 1000, 9000, 30000, 32768]
    packed = dict(cu_seqlens=offsets, heads_q=32, copies=copies, device="h200")
    whole = tt.context_parallel_plan(32768, 4, 8, 128, order=tt.balance_documents(offsets, 4), **packed)
    assert 0 < whole.ms_forward < plan.ms_forward and whole.ms_forward < whole.ms_backward


def test_times_need_no_process(monkeypatch):
    """They come from the library, also where the command is not installed."""
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(_command, "program", None)
    plan = tt.context_parallel_plan(16384, 2, 8, 128, heads_q=32, copies=True, device="h200")
    assert 0 < plan.ms_forward < plan.ms_backward
    windowed = tt.context_parallel_plan(16384, 2, 8, 128, heads_q=32, order="contiguous", window=(1024, 0), device="h200")
    assert 0 < windowed.ms_forward < plan.ms_forward
    assert tt.context_parallel_plan(16384, 2, 8, 320, device="h200").ms_forward is None  # no kernel has this head_dim


def test_what_is_not_predicted():
    """Another order than the model's, blocks of gradients, and a name that nobody knows."""
    for kind in (dict(order="contiguous"), dict(gradient_blocks=8), dict(steps=2), dict(cu_seqlens=[0, 100, 4096])):
        plan = tt.context_parallel_plan(4096, 2, 8, 128, device="h200", **kind)
        assert plan.ms_forward is None and plan.ms_backward is None
    with pytest.raises(ValueError, match="^device: expected .*h200.*, got \"h201\""):
        tt.context_parallel_plan(4096, 2, 8, 128, device="h201")
    with pytest.raises(ValueError, match="^heads_q: expected a multiple of the 8 heads of k, got 12"):
        tt.context_parallel_plan(4096, 2, 8, 128, heads_q=12)


def test_copies_that_are_too_many_go_by_collectives():
    """Each row of a reversed order is a run of its own."""
    plan = tt.context_parallel_plan(96, 2, 2, 32, order=list(reversed(range(96))), copies=True)
    assert plan.by == "collectives"
    assert tt.context_parallel_plan(96, 1, 2, 32, copies=True).by == "collectives"
