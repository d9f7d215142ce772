# SPDX-License-Identifier: Apache-2.0
"""Every public function stands in a table of test_every_argument.py or in the tests of a file that is named here, and
the arguments of functions without a result of their own change what they are documented to change."""
import importlib
import inspect
import pathlib

import numpy
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera  # noqa: E402
import test_every_argument as arguments  # noqa: E402

# Public functions without a table, and the test file that holds them to their definition.
ELSEWHERE = {
    "tessera": {"append_kv": "test_append.py", "attention_backward": "test_attention.py",
                "decode_block": "test_decode_block.py", "merge": "test_merge.py", "plan": "test_plan.py",
                "predict": "test_plan.py"},
    "tessera.torch": {"balance_documents": "context_parallel_uses.py",
                      "context_parallel": "context_parallel_interfaces.py",
                      "context_parallel_attention": "context_parallel_support.py",
                      "context_parallel_plan": "context_parallel_plans.py",
                      "context_parallel_unshard": "context_parallel_interfaces.py",
                      "register_provider": "test_torch_sdpa.py",
                      "replace_context_parallel": "context_parallel_interfaces.py",
                      "sequence_positions": "context_parallel_uses.py", "shard_sequence": "context_parallel_uses.py",
                      "unshard_sequence": "context_parallel_uses.py"},
    "tessera.flash_attn": {}, "tessera.flash_attn_cute": {"flash_attn_combine": "test_flash_attn.py"},
    "tessera.flash_attn_3": {"flash_attn_combine": "test_flash_attn.py", "get_scheduler_metadata": "test_kvcache.py"}}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_every_function_stands_in_a_table(name):
    """Or a file of tests names it."""
    module = importlib.import_module(name)
    public = {n for n in module.__all__ if inspect.isfunction(getattr(module, n))}
    of_tables = {f.of or f.call for f in arguments.FUNCTIONS.values()}
    tabled = {n for n in public if getattr(module, n) in of_tables}
    assert public - tabled == set(ELSEWHERE[name])
    for function, file in ELSEWHERE[name].items():
        assert function in pathlib.Path(__file__).with_name(file).read_text(), f"{file} does not name {function}"


@pytest.mark.parametrize("function,argument,value", [
    (tessera.plan, "backward", True), (tessera.plan, "threads", 1), (tessera.plan, "kernel", "reference")], ids=str)
def test_a_plan_honours_its_arguments(function, argument, value):
    other = {"threads": 2} if argument == "threads" else {}
    assert str(function(**arguments.NUMPY, **{argument: value})) != str(function(**arguments.NUMPY, **other))


def test_a_prediction_honours_its_arguments():
    q = tessera.Spec((1, 4096, 16, 128), "bfloat16", "cuda")
    base = tessera.predict(q, q, q, machine="h200")
    for change in (dict(machine="a100"), dict(schedule="fa1"), dict(backward=True), dict(causal="top-left"),
                   dict(window=(100, 0))):
        assert tessera.predict(q, q, q, **{**dict(machine="h200"), **change}).ms != base.ms, change
    q = tessera.Spec((1, 2048, 16, 64))
    on_host = [tessera.predict(q, q, q, machine="xeon-16", **change) for change in (
        dict(kernel="cpu.fa1"), dict(schedule="fa1"), dict(kernel="cpu.standard"), dict(kernel="cpu.fa1", threads=1))]
    assert [p.schedule for p in on_host] == ["fa1", "fa1", "standard", "fa1"]
    assert on_host[0].ms == on_host[1].ms and len({p.ms for p in on_host}) == 3


def test_the_backward_honours_its_arguments():
    o, lse = tessera.attention(**arguments.NUMPY, return_lse=True)
    rng = numpy.random.default_rng(1)
    do, dlse = (rng.standard_normal(a.shape).astype(numpy.float32) for a in (o, lse))
    call = dict(do=do, **arguments.NUMPY, o=o, lse=lse)
    base = tessera.attention_backward(**call)
    assert not numpy.allclose(tessera.attention_backward(**{**call, "dlse": dlse})[0], base[0])
    assert not numpy.allclose(tessera.attention_backward(**{**call, "do": 2 * do})[0], base[0])
    out = tuple(numpy.empty_like(g) for g in base)
    assert all(a is b for a, b in zip(tessera.attention_backward(**call, out=out), out))
    assert all((a == b).all() for a, b in zip(out, base))
    assert len(tessera.attention_backward(**call, bias=numpy.zeros((1, 1, 1, arguments.LEN_KV), numpy.float32),
                                          bias_gradient=True)) == 4
    sinks = arguments.SINKS.numpy()
    o, lse = tessera.attention(**arguments.NUMPY, sinks=sinks, return_lse=True)
    of_sinks = dict(sinks=sinks, o=o, lse=lse)
    dsinks = tessera.attention_backward(**{**call, **of_sinks}, sinks_gradient=True)[3]
    assert dsinks.shape == sinks.shape and dsinks.any()
    assert len(tessera.attention_backward(**{**call, **of_sinks})) == 3
    for wrong, words in ((dict(bias_gradient=True), "^bias_gradient: "),
                         (dict(sinks_gradient=True), "^sinks_gradient: "), (dict(out=out[:2]), "^out: "),
                         (dict(stream=3), "^stream: expected None")):
        with pytest.raises(ValueError, match=words):
            tessera.attention_backward(**call, **wrong)
