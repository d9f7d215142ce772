# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer with Accelerate's ParallelismConfig(cp_size=2), whose context_parallel is tessera's:

    torchrun --nproc-per-node 2 python/tests/trainer_on_ranks.py

prints the losses and the norms of gradients of three steps on 2 ranks, then those of one process (rank 0 alone, without
parallelism), and how often tessera's attention ran. It needs Accelerate, which refuses this on CPUs; its check is left
out here, so that gloo runs it.
"""
import os
import sys

import torch
import transformers
from accelerate import parallelism_config

import tessera.torch as tt
from tessera.torch._context_parallel import _groups


class Losses(transformers.TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.seen += [(round(float(logs["loss"]), 5), round(float(logs["grad_norm"]), 5))]


def losses(**more):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, attn_implementation="sdpa"))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 64, (24,), generator=generator).tolist() for _ in range(12)]
    log = Losses()
    options = transformers.TrainingArguments(
        output_dir="trainer_on_ranks", max_steps=3, per_device_train_batch_size=4, logging_steps=1, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True, learning_rate=1e-2, seed=1, **more)
    transformers.Trainer(model, options, train_dataset=[dict(input_ids=row, labels=row) for row in rows],
                         callbacks=[log]).train()
    return log.seen


def main():
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    parallelism_config.ParallelismConfig._validate_accelerator = lambda *_: None
    made, agree = [], _groups.agree
    _groups.agree = lambda *arguments: made.append(0) or agree(*arguments)
    tt.replace_context_parallel()
    if "RANK" in os.environ:
        seen = losses(parallelism_config=parallelism_config.ParallelismConfig(cp_size=2))
        print(f"rank {os.environ['RANK']}: {seen}, {len(made)} passes of tessera's attention", flush=True)
        if os.environ["RANK"] == "0":  # the program again, without torchrun's variables
            alone = {name: value for name, value in os.environ.items()
                     if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
            torch.distributed.destroy_process_group()
            os.execve(sys.executable, [sys.executable, __file__], alone)
    else:
        print(f"one process: {losses()}", flush=True)


if __name__ == "__main__":
    main()
