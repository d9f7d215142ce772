# SPDX-License-Identifier: Apache-2.0
"""Types of models in toolkit/measure/compared_models.cc have the parameters that `tessera roofline --model` counts."""
import importlib.util
import pathlib
import random
import re

import pytest
from tessera import _command

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "compare_models.py"
TABLE = ROOT / "toolkit" / "measure" / "compared_models.cc"
USUAL = ["bert", "deepseek_v3", "llama", "mixtral", "qwen3"]
DRAWN = 5


def test_parameters_are_those_of_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("torch", reason="PyTorch is not installed")
    spec = importlib.util.spec_from_file_location("compare_models", SCRIPT)
    compare_models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compare_models)
    listed = re.findall(r'"([\w-]+)"', TABLE.read_text().split("kCompared[] = {")[1].split("};")[0])
    assert set(USUAL) < set(listed)
    known = [name for name in listed if name in transformers.CONFIG_MAPPING]
    for name in USUAL + random.Random(7).sample(known, DRAWN):
        ours, theirs, why = compare_models.compared(str(_command.program()), name)
        assert theirs, f"{name}: {why}"
        assert abs(ours / theirs - 1) <= compare_models.LIMIT, name
