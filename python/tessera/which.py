# SPDX-License-Identifier: Apache-2.0
"""`tessera which` from Python: the attention kernel that ran, and why no faster one did.

    import tessera.which

    with tessera.which.expect("flash"):                           # in a test: raises when another kernel ran
        step()
    print(tessera.which.explain(q, k, v, attn_mask=mask))         # which backend PyTorch takes, and why no other
    print(tessera.which.read("trace.json.gz"))                    # the kernels in a profiler's trace

docs/which.md says how the answers are found.
"""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import typing

from . import _command, _sdpa_choice

if typing.TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, Literal

    from torch import Tensor

_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8"}
_CHECK_FAILED = 1  # exit status of the command when --expect was not met
_FAULT = 70  # exit status of the command when it failed itself


class UnexpectedKernel(AssertionError):
    """Another attention kernel ran than was expected, or none."""


class Report:
    """The attention of a trace. json: the whole report, as `tessera which --json` writes it for one file."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.json = document

    @property
    def paragraph(self) -> str:
        """The report in prose, for readers who do not know FlashAttention."""
        return self.json["paragraph"]

    @property
    def kinds(self) -> list[dict[str, Any]]:
        """Groups of equal calls, the longest first: dicts with family, pass, calls, us, evidence, ..."""
        return self.json["attention"]

    @property
    def families(self) -> list[str]:
        """The families whose kernels computed attention, each once: "fa2", "cudnn", ..."""
        return list(dict.fromkeys(kind["family"] for kind in self.kinds if kind["role"] == "attention"))

    def __str__(self) -> str:
        lines = [self.paragraph, ""]
        for kind in self.kinds:
            time = f", {kind['us'] / 1000:.3f} ms" if kind["us"] is not None else ""
            lines.append(f"{kind['family']} {kind['pass']}: {kind['calls']} calls{time} ({kind['confidence']})")
        return "\n".join(lines).rstrip()


class Explanation:
    """Which backend PyTorch's scaled_dot_product_attention takes for a call, and why no other.

    taken: "cuDNN", "flash", "memory-efficient", "math"; "none" where PyTorch aborts; None: not known.
    asked: {backend: (may it run, PyTorch's warnings)}, or None where PyTorch could not be asked.
    table: the answer of tessera's table of PyTorch's checks, as `tessera which --torch ... --json` writes it.
    differences: lines about disagreements of PyTorch and the table; empty when they agree or cannot be compared, which
        is when PyTorch was not asked or `unsaid` is not empty.
    unsaid: properties of the call that the table does not take: strides, offsets, a mask that requires a gradient.
    provider: whether tessera is active as PyTorch's flash backend (tessera.torch.register_provider). PyTorch then asks
        flash first, and flash is tessera.
    """

    def __init__(self, table: dict[str, Any], asked: dict[str, tuple[bool, list[str]]] | None, chosen: str | None,
                 unsaid: Iterable[str] = (), provider: bool = False) -> None:
        self.table, self.asked, self.unsaid, self.provider = table, asked, list(unsaid), provider
        self.taken = chosen or _sdpa_choice.taken(table, provider)
        comparable = asked is not None and not self.unsaid
        self.differences = list(_sdpa_choice.differences(asked, chosen, table, provider)) if comparable else []

    def __str__(self) -> str:
        lines = [self.table["sentence"], ""]
        if self.provider:
            lines[1:1] = ["tessera is active as PyTorch's flash backend, which is asked first: "
                          + ("flash is taken, so tessera runs." if self.taken == "flash"
                             else f"flash refuses this call, so {self.taken} is taken.")]
        for backend in self.table["backends"]:
            lines.append(f"{backend['backend']}: {backend['verdict']}")
            lines += [f"    {rule['meaning']}." for rule in backend["refusals"]]
            lines += [f"    To get it: {'; '.join(change['text'] for change in way['changes'])}."
                      for way in self.table.get("ways", []) if way["backend"] == backend["backend"] and way["changes"]]
            for text in (self.asked or {}).get(backend["backend"], (True, []))[1][:1]:
                lines.append(f"    PyTorch: {text}")
        if self.asked is None:
            lines += ["", "By the table of PyTorch's checks; PyTorch itself is asked only about tensors on a GPU."]
        lines += [f"The table does not know that {line}." for line in self.unsaid]
        return "\n".join(lines + [f"PyTorch and the table differ: {line}" for line in self.differences])


def _run(arguments) -> dict:
    """The JSON of `tessera which ARGUMENTS --json`. Raises ValueError with the command's message."""
    program = _command.program()
    try:
        said = subprocess.run([program, "which", "--json", *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ImportError(f"{program} can't be run: {error}; `python -m tessera doctor` says more") from error
    if said.returncode in (0, _CHECK_FAILED):
        return json.loads(said.stdout)
    message = (said.stderr.splitlines() or [f"exit status {said.returncode}"])[0].removeprefix("tessera: error: ")
    raise (RuntimeError if said.returncode >= _FAULT or said.returncode < 0 else ValueError)(message)


def _version_options(version) -> list:
    """--torch VERSION, since a profile does not state it."""
    number = re.match(r"\d+\.\d+(\.\d+)?", str(version)) if version else None
    return ["--torch", number[0]] if number else []


def read(trace: Any, torch: str | None = None) -> Report:
    """Reads a trace: the path of a file that `tessera which` takes, or a torch.profiler.profile that has ended.

    torch: the version of PyTorch that ran ("2.11"), which a trace does not state and "why not faster" needs; default
        for a profile: the installed one.
    Raises ValueError naming the file when it is no trace."""
    if not hasattr(trace, "export_chrome_trace"):
        path = os.fspath(trace)
        return Report(_run([*_version_options(torch), "--", path])["files"][0])
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        trace.export_chrome_trace(path)
        return Report(_run([*_version_options(torch or _installed_version()), "--", path])["files"][0])


def _installed_version():
    try:
        import torch
    except ImportError:
        return None
    return torch.__version__


class expect:
    """A context that allows only the kernels of these families to compute attention on the GPU:

        with tessera.which.expect("flash") as guard:
            step()
        print(guard.report)

    families: "flash" (all of FlashAttention), "fa2", "fa3", "cudnn", ..., or a list of them. The context profiles its
        body, which must not be profiled already.
    profiler: replaces torch.profiler.profile(record_shapes=True); it must record CUDA's kernels.
    Raises UnexpectedKernel at the end if another kernel ran, none did, or a name is ambiguous; ValueError for an
    unknown family. An exception of the body passes through."""

    def __init__(self, families: str | Iterable[str], profiler: Any = None) -> None:
        self.expected = families if isinstance(families, str) else ",".join(families)
        _run(["--family", "--expect", self.expected])  # raises ValueError for an unknown family
        self.report: Report | None = None
        self._profiler = profiler

    def __enter__(self) -> expect:
        if self._profiler is None:
            import torch
            self._profiler = torch.profiler.profile(record_shapes=True)
        self._profiler.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> Literal[False]:
        _finish_kernels()
        self._profiler.__exit__(kind, error, traceback)
        if kind is not None:
            return False
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            self._profiler.export_chrome_trace(path)
            said = _run([*_version_options(_installed_version()), "--expect", self.expected, "--", path])
        self.report = Report(said["files"][0])
        if not said["as_expected"]:
            raise UnexpectedKernel(f"expected {self.expected}, but {said['failures'][0]}\n\n{self.report}")
        return False


def _finish_kernels():
    """Waits for kernels that still run, which the profile would miss."""
    try:
        import torch
    except ImportError:
        return
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def explain(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
            is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, gpu: str | None = None,
            torch_version: str | None = None) -> Explanation:
    """Which backend scaled_dot_product_attention takes for this call, and why no other; its arguments, in its order.

    q: [batch, heads, len_q, head_dim]; k, v: [batch, heads_kv, len_kv, ..]: PyTorch's tensors. On a GPU the installed
        PyTorch is asked, with its current switches, and compared with tessera's table of its checks. Elsewhere (on the
        CPU, or "meta", which takes no memory) the table answers for the GPU `gpu`: "h200", "9.0".
    torch_version: the release whose checks the table applies, "2.11"; default: the installed one.
    attn_mask: a tensor, or a CausalBias of torch.nn.attention.bias.
    scale changes nothing.
    Raises ValueError that names the argument, also when the table does not have this release or GPU."""
    import torch
    del scale
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not torch.is_tensor(tensor) or tensor.dim() not in (3, 4):
            raise ValueError(f"{name}: expected a PyTorch tensor of 3 or 4 dimensions, got {_short(torch, tensor)}")
    if attn_mask is not None and not torch.is_tensor(attn_mask):
        raise ValueError(f"attn_mask: expected a PyTorch tensor or None, got {_short(torch, attn_mask)}")
    if torch.version.hip and gpu is None:
        raise ValueError("gpu: expected one of AMD's (\"gfx942\"): this PyTorch is ROCm's, and only the table is asked "
                         "there")
    on_gpu = q.device.type == "cuda"
    if gpu is None and not on_gpu:
        raise ValueError(f"gpu: expected a GPU (\"h200\", \"9.0\") for tensors on {q.device.type}, got none")
    options = _call_options(torch, q, k, v, attn_mask, dropout_p, is_causal, enable_gqa, torch_version)
    if gpu is not None:
        return Explanation(_run([*options, "--gpu", str(gpu)]), None, None, provider=_provider_is_active())
    table = _table_for_this_machine(torch, q, options)
    if torch_version is not None:
        return Explanation(table, None, None, provider=_provider_is_active())
    return Explanation(table, *_sdpa_choice.ask(torch, q, k, v, attn_mask, dropout_p, is_causal, enable_gqa),
                       _properties_without_an_option(q, k, v, attn_mask), _provider_is_active())


def _provider_is_active() -> bool:
    provider = sys.modules.get("tessera.torch._provider")  # a program that activated it has imported it
    return provider is not None and provider.is_active()


def _short(torch, value):
    return f"{value.dim()} dimensions" if torch.is_tensor(value) else type(value).__name__


def _properties_without_an_option(q, k, v, attn_mask) -> list:
    """Properties that PyTorch checks and the command has no option for."""
    lines = []
    if _sdpa_choice.variant_of(attn_mask) is not None:
        attn_mask = None  # it has no elements
    for name, tensor in (("q", q), ("k", k), ("v", v), ("attn_mask", attn_mask)):
        if tensor is None:
            continue
        if tensor.stride(-1) != 1:
            lines.append(f"the last dimension of {name} has the stride {tensor.stride(-1)}")
        if name != "attn_mask" and tensor.storage_offset() * tensor.element_size() % 16 != 0:
            lines.append(f"{name} begins at element {tensor.storage_offset()} of its storage")
    if attn_mask is not None and attn_mask.requires_grad:
        lines.append("attn_mask takes a gradient")
    return lines


def _name_of_dtype(name, tensor):
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ValueError(f"{name}: expected one of {', '.join(_DTYPES)}, got {dtype}")
    return _DTYPES[dtype]


def _expect_bias_of(q, k, bias, is_causal):
    if is_causal:
        raise ValueError("is_causal: expected False with a CausalBias as attn_mask, got True")
    if (bias.seq_len_q, bias.seq_len_kv) != (q.shape[-2], k.shape[-2]):
        raise ValueError(f"attn_mask: expected a CausalBias of {q.shape[-2]} queries and {k.shape[-2]} keys, got one of "
                         f"{bias.seq_len_q} and {bias.seq_len_kv}")


def _call_options(torch, q, k, v, attn_mask, dropout_p, is_causal, enable_gqa, version) -> list:
    """The call and PyTorch's current switches as options of the command."""
    named = (("q", q), ("k", k), ("v", v))
    options = ["--shape", "/".join(",".join(map(str, t.shape)) for _, t in named),
               "--dtype", "/".join(_name_of_dtype(name, t) for name, t in named), "--dropout", str(dropout_p)]
    variant = _sdpa_choice.variant_of(attn_mask)
    if variant is not None:
        _expect_bias_of(q, k, attn_mask, is_causal)
        options += ["--mask", "lower-right" if variant == "lower-right" else "causal"]
    elif attn_mask is not None:
        kind = "bool" if attn_mask.dtype == torch.bool else "float"
        options += ["--mask", f"{kind}:{','.join(map(str, attn_mask.shape))}"]
    else:
        options += ["--mask", "causal" if is_causal else "none"]
    if enable_gqa:
        options.append("--gqa")
    if torch.is_grad_enabled() and any(t.requires_grad for _, t in named):
        options.append("--grad")
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        options.append("--deterministic")
    switches = torch.backends.cuda
    off = [name for name, on in (("flash", switches.flash_sdp_enabled()), ("cudnn", switches.cudnn_sdp_enabled()),
                                 ("efficient", switches.mem_efficient_sdp_enabled()),
                                 ("math", switches.math_sdp_enabled())) if not on]
    if off:
        options += ["--off", ",".join(off)]
    return options + _version_options(version or torch.__version__)


def _table_for_this_machine(torch, q, options) -> dict:
    """The table's answer for this GPU, cuDNN and CUDA. A GPU whose name the model does not know is given by its compute
    capability: the verdicts are the same, and no times are predicted."""
    options = [*options, "--cuda", torch.version.cuda]
    cudnn = torch.backends.cudnn.version()
    if cudnn:
        options += ["--cudnn", f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"]
    try:
        return _run([*options, "--gpu", torch.cuda.get_device_name(q.device)])
    except ValueError as error:
        if not str(error).startswith("--gpu:"):
            raise
    major, minor = torch.cuda.get_device_capability(q.device)
    return _run([*options, "--gpu", f"{major}.{minor}"])
