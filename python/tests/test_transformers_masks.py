# SPDX-License-Identifier: Apache-2.0
"""Which arguments the layers of whole models get: causal, windows, chunks, padding and documents without a mask."""
import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import tessera.transformers  # noqa: E402
from seeds import LONG  # noqa: E402
from tessera import _layer_masks  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

BATCH, LENGTH = 3, 24
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=128)
DECODER = dict(num_key_value_heads=2, head_dim=8, pad_token_id=0)
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1)
# Class, configuration, the judge's attention ("eager" where transformers has no "sdpa"), and what is local or not causal.
MODELS = {
    "Llama": ("LlamaForCausalLM", DECODER, "sdpa", ""),
    "Qwen3": ("Qwen3ForCausalLM", DECODER, "sdpa", ""),
    "Mistral": ("MistralForCausalLM", dict(DECODER, sliding_window=5), "sdpa", "window"),
    "Gemma2": ("Gemma2ForCausalLM", dict(DECODER, sliding_window=5, attn_logit_softcapping=2.0), "eager", "window"),
    "GptOss": ("GptOssForCausalLM", dict(DECODER, **EXPERTS, sliding_window=5), "eager", "window"),
    "Llama4": ("Llama4ForCausalLM", dict(DECODER, **EXPERTS, attention_chunk_size=7, intermediate_size_mlp=48,
                                         no_rope_layers=[1, 0]), "sdpa", "chunk"),
    "Bert": ("BertForMaskedLM", {}, "sdpa", "bidirectional"),
    "ViT": ("ViTForImageClassification", dict(image_size=24, patch_size=4, num_labels=4), "sdpa", "bidirectional")}
FULL = {"Bert", "ViT"}


@pytest.fixture(scope="module", autouse=True)
def registered():
    tessera.transformers.register()


@pytest.fixture(autouse=True)
def without_earlier_warnings(monkeypatch):
    from tessera import _mask_functions
    monkeypatch.setattr(_mask_functions, "_warned", set())


def model(name, attention, device):
    kind, own, _, _ = MODELS[name]
    sizes = {key: value for key, value in SIZES.items() if name != "ViT" or key not in ("vocab_size",
                                                                                       "max_position_embeddings")}
    kind = getattr(transformers, kind)
    config = kind.config_class(**{**sizes, **own})
    for dropout in ("attention_probs_dropout_prob", "hidden_dropout_prob"):
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    config._attn_implementation = attention
    torch.manual_seed(0)
    return kind(config).train().to(device)


def arguments(name, batch, device):
    """The arguments of a training step on a batch of this kind."""
    generator = torch.Generator().manual_seed(1)
    if name == "ViT":
        return dict(pixel_values=torch.randn(BATCH, 3, 24, 24, generator=generator).to(device),
                    labels=torch.arange(BATCH).to(device))
    ids = torch.randint(1, 64, (BATCH, LENGTH), generator=generator)
    given = {} if name == "Bert" else dict(use_cache=False)
    if batch == "packed":
        positions = torch.stack([torch.cat([torch.arange(n) for n in lengths])
                                 for lengths in ((11, 13), (1, 2, 21), (24,))])
        given["position_ids"] = positions.to(device)
    elif batch != "plain":
        mask = torch.ones_like(ids)
        for row, absent in ((1, 9), (2, LENGTH if batch == "left, one empty" else 2)):
            mask[row, slice(0, absent) if batch.startswith("left") else slice(LENGTH - absent, None)] = 0
        given["attention_mask"] = mask.to(device)
        ids = ids * mask
        # The first token is not predicted: a query of padding would do it, which attends to anything with "eager".
        labels = torch.where((mask > 0) & (mask.cumsum(-1) > 1), ids, -100)
        return dict(given, input_ids=ids.to(device), labels=labels.to(device))
    return dict(given, input_ids=ids.to(device), labels=ids.to(device))


def form(schema, args, kwargs):
    """The mask that an operator's arguments describe, in words: causal, window, ragged, bias."""
    given = {a.name: a.default_value for a in schema.arguments}
    given.update(zip(given, args), **kwargs)
    return {word for word, there in (
        ("causal", given["causal"] == 1), ("window", given["window_left"] not in (None, -1)),
        ("ragged", given.get("cu_seqlens_q") is not None), ("bias", given.get("bias") is not None)) if there}


def is_forward(schema):
    return schema.name.startswith("tessera::") and "backward" not in schema.name


class Forms(TorchDispatchMode):
    """The form of each forward call of tessera's operators."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_forward(func._schema):
            self.found.append(form(func._schema, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class Graphs:
    """A backend of torch.compile that keeps the forms of the calls in its graphs."""

    def __init__(self):
        self.found, self.graphs = [], 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        for node in graph.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            if schema is not None and is_forward(schema):
                self.found.append(form(schema, node.args, node.kwargs))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def results(network, given):
    """(loss, gradients of all parameters)."""
    network.zero_grad()
    loss = network(**given).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def expected_forms(name, batch):
    local = MODELS[name][3]
    causal = set() if name in FULL else {"causal"}
    ragged = {"ragged"} if batch != "plain" else set()
    of_full = causal | ragged
    if local == "window":
        return [of_full | {"window"}] * 2 if name == "Mistral" else [of_full | {"window"}, of_full]
    return [of_full | {"ragged"}, of_full] if local == "chunk" else [of_full] * 2


def expect_equal(got, want, tolerance=1e-4):
    torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=tolerance)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")


CASES = [(name, batch) for name in MODELS for batch in ("plain", "left", "right", "left, one empty", "packed")
         if not (name == "ViT" and batch != "plain" or batch == "packed" and name in ("Bert", "GptOss", "Llama4"))]
COMPILED = [(name, batch) for name, batch in CASES if batch in ("plain", "left", "packed") or name == "Bert"]
LENGTHS = [(name, batch) for name in ("Llama", "Mistral", "Llama4") for batch in ("plain", "left", "packed")
           if (name, batch) != ("Llama4", "packed")]  # chunks inside of documents have a mask
if not LONG:  # tracing a model takes seconds: each kind of mask and of batch, but not all pairs of them
    COMPILED = [("Llama", "plain"), ("Qwen3", "packed"), ("Mistral", "left"), ("Gemma2", "packed"), ("GptOss", "left"),
                ("Llama4", "left"), ("Bert", "right"), ("Bert", "left, one empty"), ("ViT", "plain")]
    LENGTHS = [("Llama", "left"), ("Mistral", "packed"), ("Llama4", "plain")]


@pytest.mark.parametrize("name,batch", CASES)
def test_losses_gradients_and_forms_of_eager_models(name, batch, device):
    given = arguments(name, batch, device)
    with Forms() as forms:
        got = results(model(name, "tessera", device), given)
    assert forms.found == expected_forms(name, batch)
    expect_equal(got, results(model(name, MODELS[name][2], device), given))


@pytest.mark.parametrize("name,batch", COMPILED)
def test_losses_gradients_and_forms_of_compiled_models(name, batch, device):
    torch._dynamo.reset()
    given, backend, network = arguments(name, batch, device), Graphs(), model(name, "tessera", device)
    got = results(torch.compile(network, fullgraph=True, backend=backend), given)
    got = got[0], {n.removeprefix("_orig_mod."): g for n, g in got[1].items()}
    assert backend.graphs == 1 and backend.found == expected_forms(name, batch)
    expect_equal(got, results(model(name, MODELS[name][2], device), given))


@pytest.mark.parametrize("name,batch", LENGTHS)
def test_lengths_compile_one_graph_again_and_no_more(name, batch, device):
    """The first length is static, the second makes it a symbol, and the others find the graph of the second."""
    torch._dynamo.reset()
    backend = Graphs()
    compiled = torch.compile(model(name, "tessera", device).eval(), fullgraph=True, backend=backend)
    with torch.no_grad():
        for length in (24, 21, 17, 23, 19):
            given = {key: value[:, :length] if isinstance(value, torch.Tensor) else value
                     for key, value in arguments(name, batch, device).items()}
            compiled(**given)
    assert backend.graphs == 2 and backend.found == 2 * expected_forms(name, batch)


def test_padding_of_other_lengths_runs_in_the_same_graph(device):
    torch._dynamo.reset()
    backend, network, judge = Graphs(), model("Llama", "tessera", device).eval(), model("Llama", "sdpa", device).eval()
    compiled = torch.compile(network, fullgraph=True, backend=backend)
    given = arguments("Llama", "plain", device)
    with torch.no_grad():
        for lengths in ((24, 24, 24), (1, 7, 24), (20, 3, 11)):
            for left in (True, False):
                index, length = torch.arange(LENGTH), torch.tensor(lengths)[:, None]
                mask = ((index >= LENGTH - length) if left else (index < length)).long().to(device)
                got, want = (run(**dict(given, attention_mask=mask)).logits for run in (compiled, judge))
                torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-4)
    assert backend.graphs == 1


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_gives_the_tokens_of_the_judge(cache, device):
    """Padded on the left: with padding on the right the first token would be that of a query of padding."""
    for name in ("Llama", "Gemma2", "Mistral"):
        given = arguments(name, "left", device)
        given = {key: given[key] for key in ("input_ids", "attention_mask")}
        given["attention_mask"][2, :LENGTH - 3] = 0  # padding in the window of the first tokens that come
        options = dict(max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True)
        if cache == "static":
            options.update(cache_implementation="static", disable_compile=True)
        got, want = (model(name, attention, device).eval().generate(**given, **options)
                     for attention in ("tessera", MODELS[name][2]))
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-5, atol=1e-5)


def test_offsets_beside_position_ids_are_taken(device):
    """DataCollatorWithFlattening(return_flash_attn_kwargs=True) gives both: the offsets run, and bound the lengths."""
    ids = arguments("Llama", "plain", device)["input_ids"][:1]
    positions = torch.cat([torch.arange(11), torch.arange(13)])[None].to(device)
    offsets = torch.tensor([0, 11, 24], dtype=torch.int32, device=device)
    given = dict(input_ids=ids, labels=ids, position_ids=positions, use_cache=False)
    with Forms() as forms:
        got = results(model("Llama", "tessera", device), dict(given, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets,
                                                              max_length_q=13, max_length_k=13))
    assert forms.found == [{"causal", "ragged"}] * 2
    expect_equal(got, results(model("Llama", "sdpa", device), given))


HOLES = "zeros between ones"


def test_a_mask_with_holes_stays_a_mask_and_says_so_once():
    given = arguments("Llama", "left", "cpu")
    given["attention_mask"][0, 5] = 0
    given["labels"][0, 5] = -100
    with Forms() as forms, pytest.warns(UserWarning, match=HOLES) as warned:
        got = results(model("Llama", "tessera", "cpu"), given)
        results(model("Llama", "tessera", "cpu"), given)
    assert len(forms.found) == 4 and all("bias" in form for form in forms.found)
    assert [HOLES in str(w.message) for w in warned].count(True) == 1
    expect_equal(got, results(model("Llama", "sdpa", "cpu"), given))


def test_a_compiled_model_stops_at_a_mask_with_holes():
    """It does not read the mask when it is traced, and another result than "sdpa" has would be wrong without a word."""
    torch._dynamo.reset()
    given = arguments("Llama", "left", "cpu")
    compiled = torch.compile(model("Llama", "tessera", "cpu"), fullgraph=True, backend="aot_eager")
    compiled(**given)
    given["attention_mask"][0, 5] = 0
    with pytest.raises(RuntimeError, match="attention_mask: expected one run of ones"):
        compiled(**given)


@pytest.mark.parametrize("compiled", [False, True])
def test_mask_functions_that_are_not_known_stay_masks_and_say_so_once(compiled):
    from tessera._mask_functions import layer_mask
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    def every_other(batch, head, query, key):
        return ((query - key) % 2 == 0) & causal_mask_function(batch, head, query, key)
    call = dict(batch_size=1, q_length=8, kv_length=8, mask_function=every_other, allow_is_causal_skip=False)
    torch._dynamo.reset()

    def run(scale):
        return layer_mask(**call) * scale
    run = torch.compile(run, fullgraph=True, backend="eager") if compiled else run
    with pytest.warns(UserWarning, match="not known") as warned:
        got = run(torch.ones(()))
        run(torch.ones(()))
    assert torch.equal(got.bool(), sdpa_mask(**call)) and len(warned) == 1


@pytest.mark.parametrize("as_methods", [False, True])
def test_comparisons_of_a_graph_may_be_methods(as_methods):
    """Dynamo of PyTorch 2.11 leaves == as a call of __eq__, later ones as one of operator.eq."""
    import operator

    from tessera._mask_functions import Pattern, _Graph
    graph = torch.fx.Graph()
    batch, head, query, key, table = (graph.placeholder(name) for name in ("batch", "head", "query", "key", "table"))
    table.meta["example_value"] = POSITIONS

    def call(name, *arguments):
        if as_methods:
            return graph.call_method(f"__{name.strip('_')}__", arguments)
        return graph.call_function(getattr(operator, name), arguments)
    causal = call("le", key, query)
    same = call("eq", *(graph.call_function(operator.getitem, (table, (batch, side))) for side in (query, key)))
    window = call("gt", key, call("sub", query, 3))
    seen = call("and_", call("and_", causal, window), same)
    assert _Graph(batch, head, query, key).pattern(seen, 3) == Pattern(True, "window", 3, "given")


def structured(**call):
    from tessera._mask_functions import layer_mask
    return layer_mask(**{**dict(batch_size=2, q_length=9, kv_length=9), **call})


@pytest.mark.parametrize("compiled", [False, True])
def test_masks_of_padding_are_0_or_1(compiled):
    """A mask that is added to scores has 0 where a key counts. A graph does not read it, so that the device checks it."""
    def made(mask, mask_function=mask_function("causal", None)):
        return structured(attention_mask=mask, mask_function=mask_function)[6:10:3]  # keys, offsets
    torch._dynamo.reset()
    call = torch.compile(made, fullgraph=True, backend="eager") if compiled else made
    for dtype in (torch.float32, torch.int64, torch.bool):
        assert torch.equal(call(PADDING.to(dtype))[0], PADDING)
    for hidden in (float("-inf"), torch.finfo(torch.float32).min):
        with pytest.raises(RuntimeError if compiled else ValueError, match="attention_mask: expected bool, or numbers"):
            call(torch.zeros(2, 9).masked_fill(~PADDING, hidden))


PADDING = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0, 0]], dtype=torch.bool)
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8]])


def mask_function(kind, keys):
    from transformers import masking_utils as masks
    functions = {"causal": lambda: masks.causal_mask_function, "full": lambda: masks.bidirectional_mask_function,
                 "window": lambda: masks.sliding_window_causal_mask_function(3),
                 "both sides": lambda: masks.sliding_window_bidirectional_mask_function(2)}
    if kind in functions:
        return functions[kind]()
    if kind == "chunk":
        begin = torch.zeros(2, dtype=int) if keys is None else (keys.cumsum(-1) == 0).sum(-1)
        return masks.chunked_causal_mask_function(4, begin)
    inner = functions[kind.removeprefix("packed ")]()
    documents = masks.find_packed_sequence_indices(POSITIONS)
    return masks.and_masks(inner, masks.packed_sequence_mask_function(documents))


KINDS = ("causal", "window", "chunk", "full", "both sides", "packed causal", "packed window")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_mask_says_what_the_mask_of_pairs_says(kind, padded):
    """LayerMask.dense() and attention by its offsets, beside sdpa_mask."""
    from transformers.masking_utils import sdpa_mask
    if kind.startswith("packed") and padded:
        pytest.skip("transformers infers documents without an attention_mask alone")
    keys = PADDING if padded else None
    local = {"window": 3, "both sides": 2, "chunk": 4}.get(kind.removeprefix("packed "))
    call = dict(batch_size=2, q_length=9, kv_length=9, mask_function=mask_function(kind, keys), attention_mask=keys,
                local_size=local, allow_is_causal_skip=kind not in ("full", "both sides") and "packed" not in kind)
    if kind in ("full", "both sides"):
        call["allow_is_bidirectional_skip"] = True
    got = structured(**call)
    want = sdpa_mask(**{**call, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    layer = torch.nn.Identity()
    layer.is_causal = kind not in ("full", "both sides")
    q, k, v = (torch.randn(2, heads, 9, 8, generator=torch.Generator().manual_seed(heads + i))
               for i, heads in enumerate((4, 2, 2)))
    o, _ = tessera.transformers.attention_forward(layer, q, k, v, got)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, want, enable_gqa=True).transpose(1, 2)
    rows = keys if padded else torch.ones(2, 9, dtype=torch.bool)
    torch.testing.assert_close(o[rows], expected[rows], rtol=1e-5, atol=1e-5)
    assert o.isfinite().all()
    if got is None:
        assert kind in ("causal", "full") and not padded
        return
    assert isinstance(got, _layer_masks.LayerMask)
    assert torch.equal(got.dense("cpu").expand(2, 1, 9, 9)[rows[:, None]], want[rows[:, None]])
    with pytest.raises(ValueError, match="^attention_mask: expected query and key"):
        tessera.transformers.attention_forward(layer, q[:, :, :8], k, v, got)


def test_a_position_bias_beside_padding_is_added(device):
    """A bias has no ragged batch, so the LayerMask becomes a mask there."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
    layer = torch.nn.Identity()
    layer.is_causal = False
    q, k, v, bias = (torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(device)
                     for i, shape in enumerate(((2, 4, 9, 8),) * 3 + ((1, 4, 9, 9),)))
    keys = PADDING.to(device)
    call = dict(batch_size=2, q_length=9, kv_length=9, mask_function=mask_function("full", keys), attention_mask=keys,
                allow_is_bidirectional_skip=True, device=device)
    got, _ = tessera.transformers.attention_forward(layer, q, k, v, structured(**call), position_bias=bias)
    want, _ = sdpa_attention_forward(layer, q, k, v, sdpa_mask(**call), position_bias=bias)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_padding_that_no_row_has_is_no_ragged_batch_on_the_cpu():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ones = torch.ones(2, 9, dtype=torch.bool)
        assert structured(mask_function=mask_function("causal", None), attention_mask=ones) is None


def test_rows_of_padding_are_members_without_work():
    """Its queries have no keys and its keys no queries, so it takes no tile."""
    offsets = _layer_masks.of_padded_rows(_layer_masks.run_of(PADDING), 9)
    lengths = torch.stack([offsets.cu_seqlens_q.diff(), offsets.cu_seqlens_kv.diff()], 1).tolist()
    assert lengths == [[2, 0], [0, 2], [7, 7], [0, 0], [0, 0], [0, 0], [0, 0], [4, 4], [5, 0], [0, 5]]
    assert offsets.cu_seqlens_q.dtype == torch.int32
