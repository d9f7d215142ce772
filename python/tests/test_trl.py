# SPDX-License-Identifier: Apache-2.0
"""TRL's SFTTrainer on a small Llama: losses and norms of gradients as with "sdpa". Nothing is downloaded: the tokenizer
knows 64 words, and the data are tokens."""
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which TRL needs")
trl = pytest.importorskip("trl", reason="trl is not installed")
import datasets  # noqa: E402 - TRL needs it
import tokenizers  # noqa: E402 - transformers needs it
import tessera.transformers  # noqa: E402
from test_trainer import MIXED, Losses, llama, texts  # noqa: E402


def tokenizer():
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 64)}}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>")),
        pad_token="<pad>", eos_token="<eos>")


def losses(attention, folder, **arguments):
    data = datasets.Dataset.from_list([dict(input_ids=text["input_ids"]) for text in texts(MIXED)])
    model, log = llama(attention), Losses()
    options = trl.SFTConfig(output_dir=str(folder), max_steps=3, per_device_train_batch_size=4, logging_steps=1,
                            report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, learning_rate=1e-2, seed=1,
                            max_length=32, **arguments)
    trl.SFTTrainer(model, args=options, train_dataset=data, processing_class=tokenizer(), callbacks=[log]).train()
    return torch.tensor(log.seen)


CASES = {"fp32": dict(bf16=False, gradient_checkpointing=False), "bf16, checkpoints": dict(bf16=True),
         "fp32, packed": dict(bf16=False, packing=True), "bf16, packed": dict(bf16=True, packing=True)}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_sdpa(name, tmp_path):
    tessera.transformers.register()
    got, want = (losses(attention, tmp_path, **CASES[name]) for attention in ("tessera", "sdpa"))
    assert len(got) == 6
    tolerance = 5e-3 if "bf16" in name else 1e-4
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
