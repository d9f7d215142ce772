# SPDX-License-Identifier: Apache-2.0
"""The backend that the installed PyTorch takes for a call of its scaled_dot_product_attention on a GPU, and why it
refuses the others."""
import os
import sys
import tempfile
import warnings

FUNCTIONS = {"flash": "can_use_flash_attention", "memory-efficient": "can_use_efficient_attention",
             "cuDNN": "can_use_cudnn_attention"}
CHOICES = {0: "math", 1: "flash", 2: "memory-efficient", 3: "cuDNN"}


def answer_of(torch, function, params):
    """(whether this backend can run, its warnings). PyTorch 2.15 writes warnings to stderr, not to Python's
    warnings."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+") as written, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        os.dup2(written.fileno(), 2)
        try:
            runs = getattr(torch.backends.cuda, function)(params, debug=True)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        written.seek(0)
        texts = [line.split("Warning: ", 1)[1].strip() for line in written if "Warning: " in line]
    return runs, [str(w.message).split(" (Triggered internally")[0] for w in caught] + texts


def variant_of(attn_mask):
    """"upper-left" or "lower-right" for a CausalBias of torch.nn.attention.bias; None for anything else."""
    bias = sys.modules.get("torch.nn.attention.bias")  # whoever made one has imported it
    if bias is None or not isinstance(attn_mask, bias.CausalBias):
        return None
    return "lower-right" if attn_mask.variant == bias.CausalVariant.LOWER_RIGHT else "upper-left"


def _ask_for_bias(torch, q, k, v, bias, dropout_p, enable_gqa):
    """The answers of ask() for causal_lower_right with lengths that differ. Its class asks flash and the memory-efficient
    kernels without a mask before it calls scaled_dot_product_attention with a bool tensor."""
    answers, masked = ask(torch, q, k, v, bias._materialize(q.device), dropout_p, False, enable_gqa)
    params = torch.backends.cuda.SDPAParams(q, k, v, None, dropout_p, False, enable_gqa)
    direct = {name: answer_of(torch, FUNCTIONS[name], params) for name in ("flash", "memory-efficient")}
    answers["flash"] = direct["flash"]
    if direct["memory-efficient"][0] or not answers["memory-efficient"][0]:
        answers["memory-efficient"] = direct["memory-efficient"]
    return answers, next((name for name, (runs, _) in direct.items() if runs), masked)


def ask(torch, q, k, v, attn_mask, dropout_p, is_causal, enable_gqa):
    """({backend: (whether it can run, its warnings)}, the backend that PyTorch takes or "none" where it would
    abort)."""
    variant = variant_of(attn_mask)
    if variant == "lower-right" and q.shape[-2] != k.shape[-2]:
        return _ask_for_bias(torch, q, k, v, attn_mask, dropout_p, enable_gqa)
    if variant is not None:
        attn_mask, is_causal = None, True
    params = torch.backends.cuda.SDPAParams(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa)
    answers = {name: answer_of(torch, function, params) for name, function in FUNCTIONS.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            choice = torch._fused_sdp_choice(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa)
        except RuntimeError:
            return answers, "none"
    return answers, CHOICES.get(choice, f"backend {choice}")


def taken(table, flash_first):
    """The backend that PyTorch takes by tessera's table, "none" where it aborts. flash_first: PyTorch asks flash before
    all others, and not in the order of the table."""
    flash = next(row for row in table["backends"] if row["backend"] == "flash")
    if flash_first and flash["verdict"] in ("taken", "could run"):
        return "flash"
    return "none" if table["aborts"] else table["taken"]


def differences(answers, chosen, table, flash_first=False):
    """Lines about disagreements between PyTorch (the results of ask()) and tessera's table (`tessera which --json`)."""
    expected = taken(table, flash_first)
    rows = {row["backend"]: row for row in table["backends"]}
    for name, (runs, texts) in answers.items():
        row = rows[name]
        if runs != (row["verdict"] in ("taken", "could run")):
            yield f"{name}: PyTorch says {'it runs' if runs else texts[:1]}, tessera {row['verdict']}"
        # One of the texts begins with cuDNN's version, so a rule's text may stand anywhere in it.
        elif texts and not any(rule["text"] and rule["text"] in texts[0] for rule in row["refusals"]):
            yield f"{name}: PyTorch's text is in no rule: {texts[0]}"
    if chosen != expected:
        yield f"PyTorch takes {chosen}, tessera says {expected}"
