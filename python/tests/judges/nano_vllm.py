# SPDX-License-Identifier: Apache-2.0
"""Runs nano-vllm, unchanged, on tessera and on the CPU: a random Qwen3, greedy, beside transformers' "sdpa".

    PYTHONPATH=$(python -m tessera.compat) python python/tests/judges/nano_vllm.py FOLDER/nano-vllm

The parts that need a GPU are replaced from outside: torch.cuda, Triton's compiler by its interpreter (which appends
to the cache), nccl by gloo, torch.compile by nothing, and a CUDA graph by a call on the tensors that it was captured
with, so that its rows of padding (length 0, slot -1, old rows of the table) are there. nano-vllm needs xxhash. The
pages have 256 keys. Prompts share pages, so that prefills over the cache run too. Prints what was called, and how
many prompts have the tokens of "sdpa"; exit status 1 unless all have."""
import collections
import contextlib
import functools
import os
import pathlib
import sys
import tempfile
import types

os.environ.update(TRITON_INTERPRET="1", TORCHDYNAMO_DISABLE="1")
sys.path.insert(0, sys.argv[1])

import torch  # noqa: E402
import transformers  # noqa: E402

import flash_attn  # noqa: E402

NEW, PAGES, LENGTH = 10, 24, 1024
SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=97, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=LENGTH)
ROPE = dict(rope_type="default", rope_theta=1000000.0)  # nano-vllm's default, since it reads another field of the config
calls = collections.Counter()


def pretend_cuda():
    page_bytes = 2 * SIZES["num_hidden_layers"] * 256 * SIZES["num_key_value_heads"] * SIZES["head_dim"] * 4
    cuda = torch.cuda
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *_: None)
    cuda.mem_get_info = lambda *_: (int(PAGES * page_bytes / 0.9) + 1,) * 2
    cuda.memory_stats = lambda *_: collections.defaultdict(int)
    cuda.CUDAGraph, cuda.graph = Graph, lambda *_: contextlib.nullcontext()
    # It writes into the results of float() and to(), which are copies in 16 bits, the dtypes that it is made for.
    to = torch.Tensor.to
    torch.Tensor.to = lambda self, *into, **keywords: to(self, *into, **{**keywords, "copy": True})
    torch.Tensor.float = lambda self: self.to(torch.float32)
    torch.Tensor.cuda = lambda self, *_, **__: self
    set_default_device, make = torch.set_default_device, torch.tensor
    torch.set_default_device = lambda device: set_default_device("cpu")
    torch.tensor = lambda *values, pin_memory=False, **keywords: make(*values, **keywords)
    init = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, *rest, **keywords: init("gloo", *rest, **keywords)


class Graph:
    """The replay of nano-vllm's decoding step: the model on the tensors that the graph reads."""
    runner = None

    def pool(self):
        return None

    def replay(self):
        from nanovllm.utils.context import get_context, set_context
        runner, of_step = self.runner, get_context()
        size = next(size for size, graph in runner.graphs.items() if graph is self)
        tensors = types.SimpleNamespace(**{name: t[:size] for name, t in runner.graph_vars.items()})
        set_context(False, slot_mapping=tensors.slot_mapping, context_lens=tensors.context_lens,
                    block_tables=tensors.block_tables)
        calls["rows of padding"] += int((tensors.context_lens == 0).sum())
        tensors.outputs.copy_(runner.model(tensors.input_ids, tensors.positions))
        set_context(False, slot_mapping=of_step.slot_mapping, context_lens=of_step.context_lens,
                    block_tables=of_step.block_tables)


def counted(name):
    function = getattr(flash_attn, name)

    @functools.wraps(function)
    def call(*args, **keywords):
        calls[name + (" over pages" if keywords.get("block_table") is not None else "")] += 1
        return function(*args, **keywords)
    setattr(flash_attn, name, call)


def saved_model(folder):
    from tokenizers import Tokenizer, models
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, eos_token_id=None, bos_token_id=None,
                                                                   pad_token_id=0, dtype=torch.float32,
                                                                   rope_parameters=ROPE)).eval()
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(SIZES["vocab_size"])}, unk_token="0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0").save_pretrained(folder)
    return model


def main():
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        counted(name)
    pretend_cuda()
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 97, (n,), generator=draw).tolist() for n in (3, 40, 300, 255, 256)]
    prompts.append(prompts[2][:256] + prompts[1])  # begins with a page of another one
    with tempfile.TemporaryDirectory() as folder:
        model = saved_model(folder)
        want = [model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
                               pad_token_id=0)[0, len(p):].tolist() for p in prompts]
        import nanovllm
        wrong = 0
        for eager in (True, False):
            engine = nanovllm.LLM(folder, enforce_eager=eager, max_model_len=LENGTH, max_num_seqs=8,
                                  max_num_batched_tokens=LENGTH)
            Graph.runner = engine.model_runner
            settings = nanovllm.SamplingParams(temperature=1e-6, max_tokens=NEW, ignore_eos=True)
            for turn in ("first", "second"):  # the second one finds pages of the first in the cache
                calls.clear()
                found = [output["token_ids"] for output in engine.generate(prompts, settings, use_tqdm=False)]
                equal = sum(a == b for a, b in zip(found, want))
                wrong += len(prompts) - equal
                print(f"{'eager' if eager else 'as graphs'}, {turn} time: {equal} of {len(prompts)} equal; {dict(calls)}")
            engine.exit()
            import atexit
            atexit.unregister(engine.exit)
    print(f"flash_attn is {getattr(flash_attn, '__tessera__', 'another')}; nano-vllm of {pathlib.Path(sys.argv[1]).name}")
    return wrong != 0


if __name__ == "__main__":
    sys.exit(main())
