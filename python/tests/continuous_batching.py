# SPDX-License-Identifier: Apache-2.0
"""A program for test_continuous_batching.py: transformers' continuous batching with whatever `flash_attn` the path
gives, beside generate() with "sdpa". On the CPU nothing of transformers is changed but its tests for a GPU; on CUDA
nothing is.

    PYTHONPATH=$(python -m tessera.compat) python continuous_batching.py llama|qwen3 eager|padded
    PYTHONPATH=$(python -m tessera.compat) python continuous_batching.py llama|qwen3 eager|graph cuda

It prints the calls of the functions of flash_attn, and how many of the prompts have the tokens of "sdpa"."""
import collections
import sys

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

import flash_attn

MODEL, WAY = sys.argv[1:3]
CUDA = sys.argv[3:] == ["cuda"]
NEW = 12
calls = collections.Counter()
shapes = collections.Counter()


def counted(name):
    import functools
    function = getattr(flash_attn, name)

    @functools.wraps(function)  # transformers reads the signature
    def call(*args, **keywords):
        calls[name] += 1
        if CUDA:
            pass  # a graph is captured: nothing may be read
        elif name == "flash_attn_with_kvcache":
            shapes["rows of nobody"] += int((keywords["cache_seqlens"] < 0).sum())
        else:
            shapes["rows past the last offset"] += len(args[0]) - int(keywords["cu_seqlens_q"][-1])
        return function(*args, **keywords)
    setattr(flash_attn, name, call)


def pretend_cuda():
    """transformers asks in three places whether there is a GPU."""
    from transformers.generation import continuous_batching
    from transformers.utils import import_utils
    import_utils.is_torch_cuda_available = lambda: True
    import_utils.is_flash_attn_2_available.cache_clear()
    transformers.PreTrainedModel._flash_attn_can_dispatch = lambda *_, **__: True
    if WAY == "padded":
        continuous_batching.model_runner.ModelRunner.pad_inputs = property(lambda self: True, lambda self, wanted: None)

    class Torch:
        cuda = type("Cuda", (), {"is_available": staticmethod(lambda: True)})

        def __getattr__(self, name):
            return getattr(torch, name)
    continuous_batching.initialization.torch = Torch()


def model():
    torch.manual_seed(0)
    common = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=97, eos_token_id=None,
                  max_position_embeddings=512, bos_token_id=None, pad_token_id=0)
    if MODEL == "llama":
        config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=16, **common)
        return transformers.LlamaForCausalLM(config).eval()
    config = transformers.Qwen3Config(num_attention_heads=4, num_key_value_heads=1, head_dim=32, **common)
    return transformers.Qwen3ForCausalLM(config).eval()


def main():
    for name in ("flash_attn_with_kvcache", "flash_attn_varlen_func"):
        counted(name)
    if not CUDA:
        pretend_cuda()
    of_model = model().to("cuda", torch.float16) if CUDA else model()
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 97, (length,), generator=draw).tolist() for length in (3, 17, 40, 8, 25)]
    of_model.set_attn_implementation("sdpa")
    settings = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    want = [of_model.generate(torch.tensor([p], device=of_model.device), eos_token_id=None, **settings)[0, len(p):].tolist() for p in prompts]
    of_model.set_attn_implementation("flash_attention_2")
    found = of_model.generate_batch(
        prompts, generation_config=GenerationConfig(eos_token_id=-1, **settings), warmup=False, progress_bar=False,
        continuous_batching_config=ContinuousBatchingConfig(
            block_size=16, num_blocks=64, max_batch_tokens=64, use_cuda_graph=WAY == "graph", max_blocks_per_request=8,
            max_requests_per_batch=16))
    tokens = {tuple(result.prompt_ids): result.generated_tokens for result in found.values()}
    equal = sum(tokens.get(tuple(prompt)) == right for prompt, right in zip(prompts, want))
    print(f"{flash_attn.__name__} by {getattr(flash_attn, '__tessera__', 'another')}, transformers "
          f"{transformers.__version__}; {dict(calls)}; {dict(shapes)}")
    print(f"{equal} of {len(prompts)} equal")
    return equal != len(prompts)


if __name__ == "__main__":
    sys.exit(main())
