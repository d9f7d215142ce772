# SPDX-License-Identifier: Apache-2.0
"""Models of transformers that have no "sdpa": attention of their own, or layers that do not say whether they are causal.
With "tessera" they compute what they compute with "eager", in both passes."""
import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import tessera.transformers  # noqa: E402

BERT = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
BART = dict(vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
            decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, dropout=0.0)
GEMMA = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, pad_token_id=0)
# Class, configuration; whether the model has a decoder beside its encoder; whether its layers run tessera.
MODELS = {
    "BloomForCausalLM": (dict(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0), False, False),
    "XGLMForCausalLM": (dict(vocab_size=64, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, dropout=0.0,
                             attention_dropout=0.0, pad_token_id=0), False, False),
    "MptForCausalLM": (dict(vocab_size=64, d_model=32, n_heads=4, n_layers=2, max_seq_len=64), False, False),
    "MPNetModel": (BERT, False, False), "MegatronBertModel": (BERT, False, False), "SplinterModel": (BERT, False, True),
    "BigBirdPegasusForConditionalGeneration": (dict(BART, attention_type="original_full"), True, True),
    "NllbMoeForConditionalGeneration": (dict(BART, num_experts=2, encoder_sparse_step=0, decoder_sparse_step=0), True,
                                        True),
    "VaultGemmaForCausalLM": (dict(GEMMA, sliding_window=5, attn_logit_softcapping=2.0), False, True)}


def model(name, attention):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind._from_config(kind.config_class(**MODELS[name][0]), attn_implementation=attention).eval()


def results(name, attention, padding):
    """Hidden states or logits where tokens count, and the gradients of all parameters."""
    net = model(name, attention)
    ids = torch.randint(3, 64, (3, 14), generator=torch.Generator().manual_seed(1))
    given, counts = dict(input_ids=ids), torch.ones_like(ids, dtype=torch.bool)
    if padding:
        counts[1, 9:] = counts[2, 2:] = False
        given["attention_mask"] = counts.long()
    if MODELS[name][1]:
        given["decoder_input_ids"] = ids[:, :9].clone()
        counts = torch.ones(3, 9, dtype=torch.bool)
    o = net(**given)
    o = (o.logits if "logits" in o else o[0])[counts]
    loss = (o * torch.randn(o.shape, generator=torch.Generator().manual_seed(2))).sum()
    return [o, *torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)]


@pytest.mark.parametrize("padding", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_sdpa_is_as_eager(name, padding):
    if not hasattr(transformers, name):
        pytest.skip(f"this version of transformers has no {name}")
    tessera.transformers.register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, want = (results(name, attention, padding) for attention in ("tessera", "eager"))
    scale = want[0].detach().abs().max()
    torch.testing.assert_close(found[0], want[0], rtol=0, atol=float(1e-5 * scale))
    whole = torch.cat([g.flatten() for g in want[1:] if g is not None]).norm()
    for a, b in zip(found[1:], want[1:]):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a - b).norm() <= 1e-5 * whole


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_call_the_interface_run_tessera(name, monkeypatch):
    if not hasattr(transformers, name):
        pytest.skip(f"this version of transformers has no {name}")
    calls = []
    forward = tessera.transformers.attention_forward

    def counted(*args, **keywords):
        calls.append(1)
        return forward(*args, **keywords)

    monkeypatch.setattr(tessera.transformers, "attention_forward", counted)
    tessera.transformers.register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results(name, "tessera", False)
    monkeypatch.undo()
    tessera.transformers.register()
    assert bool(calls) == MODELS[name][2]


def test_it_is_said_once(monkeypatch):
    from tessera import _mask_functions
    monkeypatch.setattr(_mask_functions, "_warned", set())
    tessera.transformers.register()
    with pytest.warns(UserWarning, match='transformers has no "sdpa" for this model'):
        results("MPNetModel", "tessera", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results("MPNetModel", "tessera", True)
