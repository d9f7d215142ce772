# SPDX-License-Identifier: Apache-2.0
"""Cases of test_context_parallel.py: the interfaces of others - PyTorch's context_parallel, ring_flash_attn,
transformers - and a small Llama whose losses are those of one process."""
import importlib.util
import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as functional

import tessera.torch as tt
import torch_reference as reference
from context_parallel_support import both_passes, case, expect, inputs, one_process, raises, rows_of
from tessera import ring_flash_attn as ring

STEPS, TOKENS, VOCABULARY = 5, 48, 64


@case
def pytorchs_context(groups):
    """Within context_parallel() PyTorch's SDPA is attention over all ranks, buffers are cut and come back."""
    from torch.nn.functional import scaled_dot_product_attention as under_its_own_name
    q, k, v, d_o = (t.transpose(1, 2).contiguous() for t in inputs(heads_kv=4))
    kept, cut = reference.random((1, 96), 7), torch.arange(96)
    for causal in (True, False):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        o = tt.scaled_dot_product_attention(*leaves, is_causal=causal)
        want = (o.detach(), *torch.autograd.grad(o, leaves, d_o))
        for ranks, group in groups.items():
            buffers = [t.clone() for t in (q, k, v, d_o)] + [kept.clone(), cut.clone()]
            with tt.context_parallel(group, buffers=buffers, buffer_seq_dims=[2, 2, 2, 2, 1, 0],
                                     no_restore_buffers={buffers[5]}):
                leaves = [t.clone().requires_grad_() for t in buffers[:3]]
                for call in (functional.scaled_dot_product_attention, under_its_own_name):
                    o = call(*leaves, is_causal=causal)
                    got = (o.detach(), *torch.autograd.grad(o, leaves, buffers[3]))
                    for g, w in zip(got, want):
                        reference.expect_close(g, tt.shard_sequence(w, group, dim=2), 1e-6, f"{ranks} ranks")
                    assert torch.equal(got[0], tt.shard_sequence(want[0], group, dim=2))
                whole, = tt.context_parallel_unshard(group, [got[0]], [2])
                assert torch.equal(whole, want[0])
                raises(ValueError, ("attn_mask: expected None",),
                       lambda: functional.scaled_dot_product_attention(*leaves, torch.zeros(1, 1)))
            assert torch.equal(buffers[0], q) and torch.equal(buffers[4], kept)
            assert torch.equal(buffers[5], tt.sequence_positions(96, group))
            assert functional.scaled_dot_product_attention is under_its_own_name
    restore = tt.replace_context_parallel()
    from torch.distributed.tensor.experimental import context_parallel
    assert context_parallel is tt.context_parallel
    restore()
    from torch.distributed.tensor.experimental import context_parallel
    assert context_parallel is not tt.context_parallel


@case
def buffers_that_share_memory(groups):
    """context_parallel() cuts views of one tensor, and leaves that tensor as it is."""
    for group in groups.values():
        text = torch.arange(194).view(2, 97)
        ids, labels = text[:, :-1], text[:, 1:]
        want, before = [tt.shard_sequence(t, group) for t in (ids, labels)], text.clone()
        with tt.context_parallel(group, buffers=[ids, labels], buffer_seq_dims=[1, 1]):
            assert torch.equal(ids, want[0]) and torch.equal(labels, want[1]) and torch.equal(text, before)
            ids.zero_()
        assert torch.equal(text, before) and torch.equal(ids, before[:, :-1]) and torch.equal(labels, before[:, 1:])
        assert ids.data_ptr() == text.data_ptr() and ids.stride() == (97, 1)

    def enter(buffer):
        with tt.context_parallel(groups[1], buffers=[buffer], buffer_seq_dims=[1]):
            pass
    raises(ValueError, ("buffers: expected tensors without requires_grad",),
           lambda: enter(torch.zeros(2, 96, requires_grad=True)))
    raises(ValueError, ("buffers[0]: expected a torch.Tensor",), lambda: enter(3))


@case
def masks_of_transformers(groups):
    """A layer has the window that its mask means, to both sides without causality; other masks are refused."""
    if importlib.util.find_spec("transformers") is None:
        return
    from transformers import masking_utils as masks
    from tessera._context_parallel_layer import Layer, no_mask

    class Module:
        is_causal = False
    q, k, v, _ = inputs(heads_kv=4)
    wide, narrow = masks.sliding_window_bidirectional_mask_function(5), masks.sliding_window_causal_mask_function(6)
    assert no_mask(mask_function=masks.causal_mask_function) is None
    assert no_mask(mask_function=masks.bidirectional_mask_function) is None
    for mask, causal, window in ((wide, None, (5, 5)), (narrow, "bottom-right", (5, 0))):
        Module.is_causal = causal is not None
        want = tt.attention(q, k, v, causal=causal, window=window)
        for group in groups.values():
            own = [tt.shard_sequence(t, group).transpose(1, 2) for t in (q, k, v)]
            got, _ = Layer(group, "zigzag")(Module(), *own, no_mask(mask_function=mask), sliding_window=6)
            assert torch.equal(got, tt.shard_sequence(want, group))
    Module.is_causal = False
    raises(ValueError, ("sliding_window: expected the mask",), lambda: Layer(groups[1], "zigzag")(
        Module(), *(t.transpose(1, 2) for t in (q, k, v)), None, sliding_window=6))
    for function in (masks.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)),
                     masks.or_masks(narrow, wide)):
        raises(ValueError, ("mask_function: expected",), lambda: no_mask(mask_function=function))


@case
def names_of_ring_flash_attn(groups):
    """Each family of functions on the rows that it expects, beside one process; packed variants have the same bits."""
    whole = inputs(batch=2, heads_kv=4)
    for ranks, group in groups.items():
        for order, name in (("contiguous", "ring_flash_attn"), ("zigzag", "zigzag_ring_flash_attn")):
            want = rows_of(one_process(*whole, {"causal": True, "scale": 0.2}), group, order)
            own = [tt.shard_sequence(t, group, order=order) for t in whole]
            more = dict(softmax_scale=0.2, causal=True, deterministic=True, return_attn_probs=True, group=group)
            function = getattr(ring, name + "_func")
            got = both_passes(lambda *t: function(*t, **more)[:2], *own)
            expect(got, want, ("o", "lse"), 1e-6, f"{name}, {ranks} ranks")
            kv, qkv = torch.stack(own[1:3], 2), torch.stack(own[:3], 2)
            assert torch.equal(getattr(ring, name + "_kvpacked_func")(own[0], kv, **more)[0], got[0])
            assert torch.equal(getattr(ring, name + "_qkvpacked_func")(qkv, **more)[0], got[0])
    raises(ValueError, ("dropout_p: expected 0",),
           lambda: ring.ring_flash_attn_func(*whole[:3], dropout_p=0.1, group=groups[1]))
    for name, value in (("softmax_scale", float("nan")), ("softmax_scale", "a"), ("window_size", 3), ("window_size", "ab")):
        raises(ValueError, (name + ": expected",),
               lambda: ring.ring_flash_attn_func(*whole[:3], **{name: value}, group=groups[1]))


@case
def varlen_names_of_ring_flash_attn(groups):
    offsets = [0, 24, 72, 96]
    q, k, v, d_o = whole = inputs(heads_kv=4)
    want = one_process(*whole, {"causal": True, "cu_seqlens": offsets})
    for ranks, group in groups.items():
        rank = dist.get_rank(group)
        local = torch.tensor(offsets, dtype=torch.int32) // ranks
        for name, each in (("ring_flash_attn_varlen", ranks), ("zigzag_ring_flash_attn_varlen", 2 * ranks)):
            rows = []
            for a, b in zip(offsets, offsets[1:]):  # as the tests of ring_flash_attn cut a document
                parts = torch.arange(a, b).chunk(each)
                rows += [parts[rank]] if each == ranks else [parts[rank], parts[each - 1 - rank]]
            rows = torch.cat(rows)
            function = getattr(ring, name + "_func")
            got = both_passes(lambda *t: function(*t, local, 48 // ranks, causal=True, return_attn_probs=True,
                                                  group=group)[:2], *(t[0, rows] for t in whole))
            expect(got, [want[0][0, rows], want[1][0, :, rows], *(t[0, rows] for t in want[2:])], ("o", "lse"), 1e-6,
                   f"{name}, {ranks} ranks")
        packed = torch.tensor([0, 13, 50, 61, 96], dtype=torch.int32)
        for causal in (True, False):
            of_packed = one_process(*whole, {"causal": causal, "cu_seqlens": packed.tolist()})
            *lengths, keys = ring.llama3_flash_attn_prepare_cu_seqlens(packed, causal, rank, ranks)
            rows = torch.arange(96 // ranks) + rank * (96 // ranks)
            got = both_passes(lambda *t: ring.llama3_flash_attn_varlen_func(
                *t, *lengths, 1, keys, causal=causal, return_attn_probs=True, group=group)[:2],
                *(t[0, rows] for t in whole))
            expect(got, [of_packed[0][0, rows], of_packed[1][0, :, rows], *(t[0, rows] for t in of_packed[2:])],
                   ("o", "lse"), 1e-6, f"llama3, {ranks} ranks, causal {causal}")
            slices = [[ring.llama3_flash_attn_prepare_cu_seqlens(packed, c, r, ranks)[4] for c in (True, False)]
                      for r in range(ranks)]
            if any(first != second for first, second in slices):  # on some ranks; all of them refuse
                raises(ValueError, ("local_k_slice: expected",), lambda: ring.llama3_flash_attn_varlen_func(
                    *(t[0, rows] for t in (q, k, v)), *lengths, 1, keys, causal=not causal, group=group))
        raises(ValueError, ("cu_seqlens_q: expected the result of tessera's llama3_flash_attn_prepare_cu_seqlens",),
               lambda: ring.llama3_flash_attn_varlen_func(q[0], k[0], v[0], torch.tensor([0, 5]), torch.tensor([0, 5]), 5,
                                                          5, 1, slice(0, 5), group=group))
    for name, local in (("ring_flash_attn_varlen_func", [0, 8, 16]), ("zigzag_ring_flash_attn_varlen_func", [0, 3, 96])):
        raises(ValueError, ("cu_seqlens: expected", "this rank's" if local[-1] == 16 else "an even number"),
               lambda: getattr(ring, name)(q[0], k[0], v[0], torch.tensor(local), 8, group=groups[1]))


@case
def sequences_prepared_ahead(groups):
    """Offsets from llama3_flash_attn_prepare_cu_seqlens() remember the documents of the whole sequence. Two sequences may
    have equal offsets on this rank and different documents. A copy of the offsets does not remember them."""
    if 2 not in groups:
        return
    q, k, v, _ = (t[0] for t in inputs(heads_kv=4))
    rank = dist.get_rank(groups[2])
    own = [t[48 * rank:48 * (rank + 1)] for t in (q, k, v)]
    prepared = {cut: ring.llama3_flash_attn_prepare_cu_seqlens(torch.tensor(cut, dtype=torch.int32), True, rank, 2)
                for cut in ((0, 48, 96), (0, 48, 60, 96), (0, 20, 48, 96))}

    def call(*lengths):
        *lengths, keys = lengths
        return ring.llama3_flash_attn_varlen_func(*own, *lengths, 1, keys, causal=True, group=groups[2])
    for cut, given in prepared.items():
        offsets = torch.tensor(cut, dtype=torch.int32)
        want = tt.varlen_attention(q, k, v, offsets, offsets, causal="bottom-right")
        assert torch.equal(call(*given), want[48 * rank:48 * (rank + 1)]), cut
    first = prepared[0, 48, 96]
    raises(ValueError, ("cu_seqlens_q: expected the tensor itself",), lambda: call(first[0].clone(), *first[1:]))


def _llama(attention):
    import transformers
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=TOKENS, attn_implementation=attention))


def _trained(attention, group, checkpointing=False, **more):
    """The losses of STEPS steps. group: each rank has its rows of the sequence; None: one process."""
    model = _llama(attention)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    if group is not None and attention == "sdpa":
        # Accelerate does this too: positions in zig-zag look like packed documents to transformers, which makes a mask.
        for name, module in model.named_modules():
            if name.endswith("self_attn"):
                module.register_forward_pre_hook(
                    lambda _, args, options: (args, {**options, "attention_mask": None, "is_causal": True}),
                    with_kwargs=True)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    text = torch.randint(VOCABULARY, (1, TOKENS + 1), generator=torch.Generator().manual_seed(3))
    ids, labels, positions = text[:, :-1], text[:, 1:], torch.arange(TOKENS)[None]
    if group is not None:
        ids, labels, positions = (tt.shard_sequence(t, group) for t in (ids, labels, positions))
    losses = []
    for _ in range(STEPS):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False, **more).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / TOKENS
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        if group is not None:
            dist.all_reduce(total, group=group)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        losses.append(total)
    return torch.stack(losses)


@case
def a_llama_in_training(groups):
    """On 2 and 3 processes a Llama has the losses of one, by transformers' interface and inside of PyTorch's context."""
    if importlib.util.find_spec("transformers") is None:
        return
    import tessera.transformers
    want = _trained("sdpa", None)
    assert want[-1] < want[0] - 0.2, want  # it learns, so a gradient that is lost would show
    documents = torch.tensor([0, 20, 48])
    tessera.transformers.register()
    of_documents = _trained("tessera", None, cu_seq_lens_q=documents, cu_seq_lens_k=documents)
    assert (of_documents - want).abs().max() > 1e-3
    for ranks, group in groups.items():
        if ranks in (2, 3):
            tessera.transformers.register_context_parallel(group)
            for checkpointing in (False, True):
                got = _trained("tessera_context_parallel", group, checkpointing)
                torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
            got = _trained("tessera_context_parallel", group, cu_seq_lens_q=documents, cu_seq_lens_k=documents)
            torch.testing.assert_close(got, of_documents, rtol=2e-5, atol=2e-5)
            with tt.context_parallel(group):
                got = _trained("sdpa", group)
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@case
def the_example(groups):
    """examples/context_parallel.py has the losses of one rank on 2 to 4."""
    path = pathlib.Path(__file__).parents[2] / "examples" / "context_parallel.py"
    spec = importlib.util.spec_from_file_location("example_of_context_parallel", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    want = example.train(groups[1], steps=4)
    assert want[-1] < want[0] - 0.1
    for ranks, group in groups.items():
        got = example.train(group, steps=4)
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=1e-5, msg=f"{ranks} ranks")
