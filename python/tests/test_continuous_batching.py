# SPDX-License-Identifier: Apache-2.0
"""transformers' continuous batching, unchanged, on tessera: greedy tokens are those of generate() with "sdpa"."""
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
from tessera import compat  # noqa: E402

PROGRAM = pathlib.Path(__file__).with_name("continuous_batching.py")


@pytest.mark.parametrize("model,way,by", [("llama", "padded", "the folder"), ("qwen3", "eager", "install()")])
def test_tokens_are_those_of_sdpa(model, way, by):
    pytest.importorskip("transformers.generation.continuous_batching", reason="this transformers has none")
    path = os.pathsep.join([str(pathlib.Path(compat.FOLDER).parents[1]), os.environ.get("PYTHONPATH", "")])
    if by == "the folder":
        command = [str(PROGRAM), model, way]
        path = os.pathsep.join([compat.FOLDER, path])
    else:
        command = ["-c", f"import runpy, sys, tessera.compat; tessera.compat.install('flash_attn'); "
                         f"sys.argv = ['', {model!r}, {way!r}]; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0 and "5 of 5 equal" in done.stdout, done.stdout + done.stderr[-2000:]
    assert "flash_attn by tessera.flash_attn" in done.stdout
    calls = int(re.search(r"'flash_attn_with_kvcache': (\d+)", done.stdout)[1])
    assert calls >= 20, done.stdout  # two layers, and eleven tokens after the first
    nobody = int(re.search(r"'rows of nobody': (\d+)", done.stdout)[1])
    assert (nobody > 0) == (way == "padded"), done.stdout


def test_the_folder_is_a_distribution():
    """transformers asks for a distribution and its version before it imports flash_attn; version 3 comes from the same
    folder."""
    said = subprocess.run([sys.executable, "-c", """
import importlib.metadata as metadata
print(metadata.packages_distributions()["flash_attn"], metadata.version("flash-attn"))
import flash_attn_interface
from flash_attn.bert_padding import pad_input, unpad_input
import flash_attn
from flash_attn.layers.rotary import apply_rotary_emb
print(flash_attn.__tessera__, flash_attn_interface.__tessera__, flash_attn.__version__)
"""], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join([
        compat.FOLDER, str(pathlib.Path(compat.FOLDER).parents[1]), os.environ.get("PYTHONPATH", "")])})
    assert said.stdout.splitlines() == ["['flash-attn'] 2.8.3", "tessera.flash_attn tessera.flash_attn_3 2.8.3"], said
