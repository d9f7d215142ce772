# SPDX-License-Identifier: Apache-2.0
"""Every public function stands in a table of test_every_argument.py or in the tests of a file that is named here, and
the arguments of functions without a result of their own change what they are documented to change."""
import inspect
import pathlib
import re

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera  # noqa: E402
import test_every_argument as arguments  # noqa: E402
import test_every_argument_of_adapters as adapters  # noqa: E402
import test_every_argument_of_passes as passes  # noqa: E402
import test_every_argument_of_the_core as core  # noqa: E402
import test_every_argument_on_ranks as ranks  # noqa: E402
import test_types  # noqa: E402

# Public functions without a table, and the test file that calls them and holds them to their definition.
ELSEWHERE = {
    "tessera": {},
    "tessera.compat": {"install": "test_compat.py", "installed": "test_compat.py", "uninstall": "test_compat.py"},
    "tessera.vllm": {"register": "test_vllm.py"},
    "tessera.which": {"read": "test_which.py", "explain": "test_which.py"},
    "tessera.torch": {"register_provider": "test_torch_sdpa.py",
                      "replace_context_parallel": "context_parallel_interfaces.py"},
    "tessera.flash_attn": {}, "tessera.flash_attn_cute": {"flash_attn_combine": "test_flash_attn.py"},
    "tessera.flash_attn_3": {"flash_attn_combine": "test_flash_attn.py", "get_scheduler_metadata": "test_kvcache.py"},
    "tessera.transformers": {"register": "test_transformers.py",
                             "register_context_parallel": "context_parallel_interfaces.py"},
    "tessera.jax": {"export_checks": "test_jax.py"},
    "tessera.xformers": {}, "tessera.bert_padding": {}, "tessera.rotary": {},
    "tessera.ring_flash_attn": {}}
TABLES = {**arguments.FUNCTIONS, **adapters.FUNCTIONS, **passes.FUNCTIONS, **core.FUNCTIONS, **ranks.FUNCTIONS}


@pytest.mark.parametrize("name", test_types.MODULES)
def test_every_function_stands_in_a_table(name):
    """Or a file of tests calls it."""
    module = test_types.module(name)
    public = {n for n, value in test_types.public(module) if inspect.isfunction(value)}
    of_tables = [f.of or f.call for f in TABLES.values()]
    if name == "tessera.jax":
        of_tables += [module.dot_product_attention]  # its table gets it where JAX is
    if name == "tessera.transformers":
        of_tables += [module.attention_forward]
    tabled = {n for n in public if getattr(module, n) in of_tables}
    assert public - tabled == set(ELSEWHERE[name])
    for function, file in ELSEWHERE[name].items():
        text = pathlib.Path(__file__).with_name(file).read_text()  # some run programs that are strings in them
        assert re.search(rf"(?<!def )\b{function}\(", text), f"{file} does not call {function}"


def test_every_module_is_walked():
    assert set(ELSEWHERE) == set(test_types.MODULES)


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
