# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer on a small Llama: losses and norms of gradients as with "sdpa"."""
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")
import tessera.transformers  # noqa: E402


class Losses(transformers.TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.seen += [float(logs["loss"]), float(logs["grad_norm"])]


def texts(lengths):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 64, (length,), generator=generator).tolist() for length in lengths]
    return [dict(input_ids=row, labels=row) for row in rows]


def padded(batch):
    longest = max(len(text["input_ids"]) for text in batch)

    def column(name, filler):
        return torch.tensor([text[name] + [filler] * (longest - len(text[name])) for text in batch])
    ids = column("input_ids", 0)
    return dict(input_ids=ids, labels=column("labels", -100), attention_mask=(ids > 0).long())


def losses(attention, folder, lengths, collator, attention_dropout=0.0, **arguments):
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, attn_implementation=attention,
        attention_dropout=attention_dropout))
    log = Losses()
    options = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=4, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, learning_rate=1e-2, seed=1, **arguments)
    transformers.Trainer(model, options, train_dataset=texts(lengths), data_collator=collator, callbacks=[log]).train()
    return torch.tensor(log.seen)


WHOLE, MIXED = [24] * 12, [5, 29, 17, 8, 23, 11, 26, 14, 19, 7, 28, 10]
CASES = {"fp32": (WHOLE, None, {}), "bf16": (WHOLE, None, dict(bf16=True)),
         "bf16, checkpoints": (WHOLE, None, dict(bf16=True, gradient_checkpointing=True)),
         "reentrant checkpoints": (WHOLE, None, dict(gradient_checkpointing=True,
                                                     gradient_checkpointing_kwargs=dict(use_reentrant=True))),
         "bf16, padded": (MIXED, padded, dict(bf16=True)), "packed": (MIXED, "flat", {}),
         "bf16, packed": (MIXED, "flat", dict(bf16=True)),
         "bf16, packed with lengths": (MIXED, "flat with lengths", dict(bf16=True, gradient_checkpointing=True)),
         "dropout of all": (WHOLE, None, dict(attention_dropout=1.0))}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_sdpa(name, tmp_path):
    lengths, collator, arguments = CASES[name]
    if isinstance(collator, str):
        collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs="lengths" in collator)
    tessera.transformers.register()
    got, want = (losses(attention, tmp_path, lengths, collator, **arguments) for attention in ("tessera", "sdpa"))
    assert len(got) == 6
    tolerance = 5e-3 if "bf16" in name else 1e-4
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
