# SPDX-License-Identifier: Apache-2.0
"""Writes the results of transformers with the random models of examples/llama, and holds the files in the tree to them.
tests/llama holds the C++ program to the same files.

`python python/tests/test_llama_example.py` writes them.
"""
import importlib.util
import json
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

ROOT = pathlib.Path(__file__).parents[2]
EXPECTED = ROOT / "tests" / "llama"
NAMES = ("qwen3", "llama3")
PROMPTS = ([1, 2, 3, 5, 8, 13, 21, 34, 55, 89], [7], [(17 * n) % 96 + 1 for n in range(150)])
NEW_TOKENS = 40


def says(name: str, folder: pathlib.Path) -> dict:
    """Greedy tokens and the logits after each prompt, in fp32 with eager attention."""
    spec = importlib.util.spec_from_file_location("random_model", ROOT / "examples" / "llama" / "random_model.py")
    random_model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(random_model)
    random_model.write(name, folder)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    cases = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
            tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS,
                                    do_sample=False, pad_token_id=0)[0]
            # The gap between the two best logits says how far from a tie each choice was.
            best = model(tokens[None]).logits[0, len(prompt) - 1:-1].topk(2).values
        cases.append(dict(prompt=prompt, tokens=tokens.tolist(), logits=[round(x, 5) for x in logits.tolist()],
                          smallest_gap=round((best[:, 0] - best[:, 1]).min().item(), 4)))
    return dict(model=name, cases=cases)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_says_what_is_expected_of_the_example(name, tmp_path):
    expected = json.loads((EXPECTED / f"{name}.json").read_text())
    got = says(name, tmp_path)
    assert [case["tokens"] for case in got["cases"]] == [case["tokens"] for case in expected["cases"]]
    for ours, theirs in zip(got["cases"], expected["cases"]):
        assert ours["prompt"] == theirs["prompt"]
        torch.testing.assert_close(torch.tensor(ours["logits"]), torch.tensor(theirs["logits"]), rtol=1e-4, atol=1e-4)
        assert theirs["smallest_gap"] > 1e-3, "a tie decides the tokens"


if __name__ == "__main__":
    import tempfile
    for model_name in NAMES:
        with tempfile.TemporaryDirectory() as temporary:
            text = json.dumps(says(model_name, pathlib.Path(temporary)))
        (EXPECTED / f"{model_name}.json").write_text(text + "\n")
    sys.exit(0)
