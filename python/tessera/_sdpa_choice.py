# SPDX-License-Identifier: Apache-2.0
"""What the installed PyTorch says of a call of its scaled_dot_product_attention on a GPU: which backend it takes, and why it
refuses the others."""
import os
import sys
import tempfile
import warnings

FUNCTIONS = {"flash": "can_use_flash_attention", "memory-efficient": "can_use_efficient_attention",
             "cuDNN": "can_use_cudnn_attention"}
CHOICES = {0: "math", 1: "flash", 2: "memory-efficient", 3: "cuDNN"}


def answer_of(torch, function, params):
    """(may this backend run, its warnings). PyTorch 2.15 writes them to stderr and not to Python's warnings."""
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


def ask(torch, q, k, v, attn_mask, dropout_p, is_causal, enable_gqa):
    """({backend: (may it run, its warnings)}, the backend that PyTorch takes: "none" where it would abort)."""
    params = torch.backends.cuda.SDPAParams(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa)
    answers = {name: answer_of(torch, function, params) for name, function in FUNCTIONS.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            choice = torch._fused_sdp_choice(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa)
        except RuntimeError:
            return answers, "none"
    return answers, CHOICES.get(choice, f"backend {choice}")


def differences(answers, chosen, table):
    """Lines for what PyTorch (what ask() gives) and tessera's table (`tessera which --json`) say otherwise."""
    rows = {row["backend"]: row for row in table["backends"]}
    for name, (runs, texts) in answers.items():
        row = rows[name]
        if runs != (row["verdict"] in ("taken", "could run")):
            yield f"{name}: PyTorch says {'it runs' if runs else texts[:1]}, tessera {row['verdict']}"
        # The version of cuDNN stands before one of the texts, so the rule's is looked for anywhere.
        elif texts and not any(rule["text"] and rule["text"] in texts[0] for rule in row["refusals"]):
            yield f"{name}: PyTorch's text is in no rule: {texts[0]}"
    taken = "none" if table["aborts"] else table["taken"]
    if chosen != taken:
        yield f"PyTorch takes {chosen}, tessera says {taken}"
