# SPDX-License-Identifier: Apache-2.0
"""The milliseconds that `tessera roofline --gpus` predicts for a call, without a GPU."""
from __future__ import annotations

import functools
import json
import subprocess
import typing

import torch

from . import _order

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def milliseconds(total, ranks, batch, heads, head_dims, dtype, order, causal, window, cu_seqlens, copies,
                 device) -> typing.List[typing.Optional[float]]:
    """[forward, backward] on GPUs of this name, or of the name of the current one; None where nothing is predicted.
    heads: of q and of k; window: -1 for no limit. Raises ValueError for a name that the command does not know."""
    name = _name_of_the_current_gpu() if device is None else device
    if name is None or dtype not in _DTYPES:
        return [None, None]
    lengths = None
    if cu_seqlens is not None:
        offsets = _order.offsets_of(cu_seqlens, total)
        lengths = [end - begin for begin, end in zip(offsets, offsets[1:]) if end > begin]
        if offsets[-1] != total or isinstance(order, str) or not torch.equal(
                _order.tensor_of(order), _order.balance_documents(cu_seqlens, ranks, causal=causal)):
            return [None, None]
    elif not isinstance(order, str):
        return [None, None]
    if causal and lengths is None and (window[0] < 0) != (order == "zigzag"):
        return [None, None]
    if not causal and order == "zigzag":
        return [None, None]
    options = ["--gpus", str(ranks), "--heads", "/".join(map(str, heads)), "--head-dim", "/".join(map(str, head_dims)),
               "--dtype", _DTYPES[dtype], "--pass", "both", "--causal", "bottom-right" if causal else "none"]
    options += ["--len", str(total), "--batch", str(batch)] if lengths is None else ["--ragged", ",".join(map(str, lengths))]
    if window[0] >= 0 or (window[1] >= 0 and not causal):
        options += ["--window", ",".join("unbounded" if side < 0 else str(side) for side in window)]
    found, error = _predicted_times((name, *options, *([] if copies else ["--nccl"])))
    if error and device is not None and "--device" in error:
        raise ValueError(f"device: {error.split(': ', 1)[1]}")
    return found


@functools.lru_cache(maxsize=64)
def _predicted_times(options):
    """([forward, backward], nothing), or no times and the reason."""
    from ... import _command
    try:
        done = subprocess.run([str(_command.program()), "roofline", "--json", "--device", *options], capture_output=True,
                              text=True, timeout=60)
        printed = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return [None, None], str(error)
    if "error" in printed:
        return [None, None], printed["error"]
    passes = {one["pass"]: one["ms"] for one in printed["rows"][0]["passes"]}
    return [passes.get("forward"), passes.get("backward")], None


@functools.lru_cache(maxsize=None)
def _name_of_the_current_gpu():
    """"NVIDIA H100 80GB HBM3" is "h100"; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    words = torch.cuda.get_device_name().replace("NVIDIA", "").split()
    return "-".join(words[:2] if words[1:2] == ["PCIe"] else words[:1]).lower() or None
