# SPDX-License-Identifier: Apache-2.0
"""tessera.which: reports of traces, the guard in a context, and PyTorch's choice beside the table."""
import pathlib
import shutil

import pytest
import tessera.which as which
from tessera import _sdpa_choice

TRACES = pathlib.Path(__file__).parents[2] / "examples" / "traces"


class Profile:
    """In the place of torch.profiler.profile on a machine without a GPU: it saw an example trace."""

    def __init__(self, name):
        self.trace, self.ended = TRACES / name, False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.ended = True

    def export_chrome_trace(self, path):
        assert self.ended
        shutil.copy(self.trace, path)


def test_read_a_file():
    report = which.read(TRACES / "padding.json", torch="2.11.0+cu130")
    assert report.families == ["mem-efficient"] and report.kinds[0]["calls"] == 4
    assert "cuDNN attention" in report.paragraph and report.paragraph in str(report)
    assert "mem-efficient forward: 4 calls, 7.600 ms (certain)" in str(report)
    assert report.kinds[0]["why_not_faster"]["ran"] == "memory-efficient"


def test_read_says_what_is_wrong(tmp_path):
    (tmp_path / "--json").write_text("{}")
    for path, message in ((tmp_path / "none.json", "none.json"), (tmp_path / "--json", "expected a trace"),
                          (tmp_path, "regular file")):
        with pytest.raises(ValueError, match=message):
            which.read(path)


def test_expect_passes_and_keeps_the_report():
    profile = Profile("causal.json")
    with which.expect(["cudnn", "flash"], profiler=profile) as guard:
        assert guard.report is None
    assert profile.ended and guard.report.families == ["fa2"]


def test_expect_raises_when_another_kernel_ran():
    guard = which.expect("fa3", profiler=Profile("causal.json"))
    with pytest.raises(which.UnexpectedKernel, match=r"^expected fa3, but fa2 ran \(certain\)\n\nAttention is") as error:
        with guard:
            pass
    assert isinstance(error.value, AssertionError) and guard.report.families == ["fa2"]


def test_expect_lets_an_exception_through():
    with pytest.raises(KeyError):
        with which.expect("fa3", profiler=Profile("causal.json")) as guard:
            raise KeyError("mine")
    assert guard.report is None


def test_expect_knows_the_families():
    with pytest.raises(ValueError, match="expected some of flash, fa1, fa2.*got \"fa9\""):
        which.expect("fa9")


def test_expect_with_pytorchs_profiler_without_a_gpu():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, which runs other kernels than those of the CPU")
    q = torch.randn(1, 2, 16, 8)
    with pytest.raises(which.UnexpectedKernel, match="(?s)no attention kernel ran.*operators of attention on the CPU"):
        with which.expect("flash"):
            torch.nn.functional.scaled_dot_product_attention(q, q, q)


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


def calls_of(torch, *shapes, **options):
    return [torch.empty(shape, device="meta", dtype=torch.bfloat16, **options) for shape in shapes]


def test_explain_by_the_table(torch):
    q, k, v = calls_of(torch, (2, 8, 512, 64), (2, 2, 512, 64), (2, 2, 512, 64))
    options = dict(gpu="h200", torch_version="2.11")
    assert which.explain(q, q, q, is_causal=True, **options).taken == "cuDNN"
    ungrouped = which.explain(q, k, v, **options)
    assert ungrouped.taken == "math" and ungrouped.asked is None and ungrouped.differences == []
    assert "set enable_gqa=True" in str(ungrouped) and "only about tensors on a GPU" in str(ungrouped)
    assert which.explain(q, k, v, enable_gqa=True, **options).taken == "cuDNN"
    mask = torch.empty(8, 512, 512, device="meta", dtype=torch.bool)
    assert which.explain(q, q, q, attn_mask=mask, **options).taken == "memory-efficient"
    mixed = which.explain(q, q, q.float(), **options)
    assert mixed.taken == "math" and "flash-dtype" in str(mixed.table)


def first_operator(torch, call):
    """The backend of the first operator of attention that PyTorch calls, on tensors without memory."""
    from torch.utils._python_dispatch import TorchDispatchMode
    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    with Names():
        call()
    seen = " ".join(name for name in names if "attention" in name or "mm" in name)
    return next(backend for word, backend in (("_flash_attention", "flash"), ("_efficient_attention", "memory-efficient"),
                                              ("mm", "math")) if word in seen)


@pytest.mark.parametrize("q_shape, kv_shape, v_dim, taken", [
    ((2, 8, 256, 64), (2, 8, 1024, 64), 64, "flash"), ((2, 8, 256, 100), (2, 8, 1024, 100), 100, "flash"),
    ((2, 8, 256, 192), (2, 8, 1024, 192), 128, "memory-efficient"),
    ((2, 8, 256, 512), (2, 8, 1024, 512), 512, "memory-efficient"),
    ((2, 8, 256, 300), (2, 8, 1024, 300), 300, "math")])
def test_explain_follows_the_class_of_causal_lower_right(torch, monkeypatch, q_shape, kv_shape, v_dim, taken):
    """The installed class dispatches the call, its two questions about a GPU being answered by the table."""
    bias = pytest.importorskip("torch.nn.attention.bias")
    q, k, v = calls_of(torch, q_shape, kv_shape, (*kv_shape[:3], v_dim))
    mask = bias.causal_lower_right(q_shape[2], kv_shape[2])
    options = dict(gpu="8.0", torch_version="2.13")
    explanation = which.explain(q, k, v, attn_mask=mask, **options)
    assert explanation.taken == taken
    rows = {row["backend"]: row["verdict"] in ("taken", "could run") for row in explanation.table["backends"]}
    monkeypatch.setattr(bias, "can_use_flash_attention", lambda params: rows["flash"])
    monkeypatch.setattr(bias, "can_use_efficient_attention", lambda params: rows["memory-efficient"])
    called = first_operator(torch, lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    assert called == taken


def test_explain_reads_a_causal_bias(torch):
    bias = pytest.importorskip("torch.nn.attention.bias")
    q, k = calls_of(torch, (2, 8, 256, 64), (2, 8, 1024, 64))
    options = dict(gpu="h200", torch_version="2.11")
    square = bias.causal_lower_right(256, 256), bias.causal_upper_left(256, 256)
    assert {which.explain(q, q, q, attn_mask=mask, **options).taken for mask in square} == {"cuDNN"}
    assert which.explain(q, k, k, attn_mask=bias.causal_lower_right(256, 1024), **options).taken == "flash"
    assert which.explain(q, k, k, attn_mask=bias.causal_upper_left(256, 1024), **options).taken == "cuDNN"
    with pytest.raises(ValueError, match="^attn_mask: expected a CausalBias of 256 queries and 1024 keys, got one of"):
        which.explain(q, k, k, attn_mask=bias.causal_lower_right(128, 1024), **options)
    with pytest.raises(ValueError, match="^is_causal: expected False with a CausalBias"):
        which.explain(q, k, k, attn_mask=bias.causal_lower_right(256, 1024), is_causal=True, **options)


def test_explain_takes_pytorchs_switches(torch):
    q, = calls_of(torch, (2, 8, 512, 64), requires_grad=True)
    options = dict(gpu="9.0", torch_version="2.11")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert which.explain(q, q, q, **options).taken == "memory-efficient"
        with_mask = which.explain(q.double(), q.double(), q.double(), **options)
        assert with_mask.taken == "none"
    wide, = calls_of(torch, (2, 8, 512, 256), requires_grad=True)
    assert "flash-wide-training" in str(which.explain(wide, wide, wide, dropout_p=0.1, gpu="8.6",
                                                      torch_version="2.11").table)
    with torch.no_grad():
        there = which.explain(wide, wide, wide, dropout_p=0.1, gpu="8.6", torch_version="2.11").table
    assert "flash-wide-training" not in str(there)


def test_explain_names_what_is_wrong(torch):
    q, flat = calls_of(torch, (2, 8, 512, 64), (512, 64))
    for call, message in ((lambda: which.explain(q, [1], q, gpu="h200"), "k: expected a PyTorch tensor .*got list"),
                          (lambda: which.explain(flat, q, q, gpu="h200"), "q: expected .* got 2 dimensions"),
                          (lambda: which.explain(q, q, q), "gpu: expected a GPU .* for tensors on meta, got none"),
                          (lambda: which.explain(q, q, q, attn_mask=3, gpu="h200"), "attn_mask: expected"),
                          (lambda: which.explain(q, q, q.to(torch.int8), gpu="h200"), "v: expected one of float16"),
                          (lambda: which.explain(q, q, q, gpu="h2000"), "--gpu: expected a compute capability"),
                          (lambda: which.explain(q, q, q, gpu="h200", torch_version="2.3"), "2.4 to 2.15, got 2.3")):
        with pytest.raises(ValueError, match=message):
            call()


def test_answers_of_pytorch_are_compared_with_the_table(torch):
    q, = calls_of(torch, (2, 8, 512, 64))
    mask = torch.empty(512, 512, device="meta", dtype=torch.bool)
    table = which.explain(q, q, q, attn_mask=mask, gpu="8.0", torch_version="2.11").table
    text = "Flash Attention does not support non-null attn_mask. (function check_for_attn_mask)"
    answers = {"flash": (False, [text]), "memory-efficient": (True, []), "cuDNN": (True, [])}
    assert list(_sdpa_choice.differences(answers, "memory-efficient", table)) == []
    wrong = {"flash": (False, ["the moon is full"]), "memory-efficient": (False, ["no"]), "cuDNN": (True, [])}
    assert list(_sdpa_choice.differences(wrong, "math", table)) == [
        "flash: PyTorch's text is in no rule: the moon is full",
        "memory-efficient: PyTorch says ['no'], tessera taken",
        "PyTorch takes math, tessera says memory-efficient"]
    explanation = which.Explanation(table, wrong, "math")
    assert explanation.taken == "math" and "PyTorch: the moon is full" in str(explanation)
    assert "PyTorch and the table differ: PyTorch takes math" in str(explanation)


def test_explain_knows_that_the_provider_is_asked_first(torch):
    tt = pytest.importorskip("tessera.torch")
    from torch.nn import attention
    if not hasattr(attention, "register_flash_attention_impl"):
        pytest.skip(f"PyTorch {torch.__version__} has no register_flash_attention_impl")
    q, = calls_of(torch, (2, 8, 512, 64))
    mask = torch.empty(8, 512, 512, device="meta", dtype=torch.bool)
    options = dict(gpu="h200", torch_version="2.11")
    tt.register_provider()
    attention.activate_flash_attention_impl("tessera")
    try:
        plain, masked = which.explain(q, q, q, **options), which.explain(q, q, q, attn_mask=mask, **options)
    finally:
        attention.restore_flash_attention_impl()
    assert plain.provider and plain.taken == "flash" and "flash is taken, so tessera runs" in str(plain)
    assert masked.taken == "memory-efficient" and "flash refuses this call" in str(masked)
    answers = {name: (True, []) for name in ("flash", "memory-efficient", "cuDNN")}
    assert list(_sdpa_choice.differences(answers, "flash", plain.table, True)) == []
    assert list(_sdpa_choice.differences(answers, "flash", plain.table)) == ["PyTorch takes flash, tessera says cuDNN"]
    assert which.explain(q, q, q, **options).taken == "cuDNN"


def test_what_the_table_can_not_be_asked_is_said(torch):
    q = torch.zeros(2, 8, 512, 65, dtype=torch.bfloat16)
    mask = torch.zeros(512, 1, requires_grad=True).expand(512, 512)
    lines = which._properties_without_an_option(q[..., 1:], q.mT, q, mask)
    assert lines == ["q begins at element 1 of its storage", "the last dimension of k has the stride 65",
                     "the last dimension of attn_mask has the stride 0", "attn_mask takes a gradient"]
    table = which.explain(q, q, q, gpu="h200", torch_version="2.11").table
    answers = {name: (False, ["strided"]) for name in ("flash", "memory-efficient", "cuDNN")}
    explanation = which.Explanation(table, answers, "math", lines)
    assert explanation.differences == [] and "The table does not know that k" not in str(explanation)
    assert "The table does not know that the last dimension of k has the stride 65." in str(explanation)
    assert which._properties_without_an_option(q, q, q, None) == []


def test_pytorch_is_asked_where_there_is_a_gpu(torch):
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    q = torch.zeros(2, 8, 512, 64, device="cuda", dtype=torch.bfloat16)
    explanation = which.explain(q, q, q)
    assert explanation.asked["memory-efficient"] == (True, []) and explanation.differences == [], str(explanation)
