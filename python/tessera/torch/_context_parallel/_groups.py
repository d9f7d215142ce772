# SPDX-License-Identifier: Apache-2.0
"""Process groups: their names in graphs, and the check that all ranks make the same call, with a limit of time.

The check is a small message from each rank to each other one over gloo, so the host waits and no GPU does. A rank that
does not come, or whose process has ended, is named."""
from __future__ import annotations

import contextlib
import datetime
import json
import math
import time
import zlib

import torch
import torch.distributed as dist

_BYTES = 4096  # of a message
_TAG = 20743  # so that messages of the caller on the same group are others
_groups: dict = {}  # name -> ProcessGroup
_controls: dict = {}  # name -> the group of gloo that messages go over
_agreed: dict = {}  # name -> the messages that all ranks have had
_forgets: list = []  # functions that drop other modules' cached objects of a group


def resolved(group):
    """The ProcessGroup of an argument: None is the default group, a DeviceMesh of one dimension its own. Raises
    ValueError."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group: expected an initialized torch.distributed (init_process_group), got none")
    if group is None:
        return dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group: expected a DeviceMesh of one dimension, got one of {group.ndim}")
        return group.get_group()
    raise ValueError(f"group: expected a ProcessGroup, a DeviceMesh or None, got a {type(group).__name__}")


@torch.compiler.assume_constant_result
def name_of(group):
    """The name under which by_name() finds the group. A graph holds the name."""
    group = resolved(getattr(group, "real_obj", group))  # PyTorch 2.15 traces graphs with a fake object
    if dist.get_rank(group) < 0:
        raise ValueError("group: expected a group that this process belongs to, got another one")
    if _groups.get(group.group_name) is not group:  # an older group of this name may have been destroyed
        forget(group)
    _groups[group.group_name] = group
    return group.group_name


def by_name(name):
    return _groups[name]


def _control(name, limit, function):
    """The group of gloo for messages: the group itself, or one of the same ranks that is made once. Raises RuntimeError
    if they don't all come to make it."""
    if name not in _controls:
        group = _groups[name]
        if str(dist.get_backend(group)) == "gloo":
            _controls[name] = group
        else:
            try:
                _controls[name] = dist.new_group(dist.get_process_group_ranks(group), backend="gloo",
                                                 timeout=datetime.timedelta(seconds=limit),
                                                 use_local_synchronization=True)
            except RuntimeError as error:
                raise _lost(function, None, limit, error) from None
    return _controls[name]


def on_forget(function):
    """Registers `function`; forget() calls it with the name of the group, or None for all."""
    _forgets.append(function)


def forget(group=None):
    """Drops the cached objects of a group, or of all groups, for a process that destroys its groups and makes others."""
    for function in _forgets:
        function(None if group is None else group.group_name)
    for kept in (_groups, _controls, _agreed):
        if group is None:
            kept.clear()
        else:
            kept.pop(group.group_name, None)


def _packed(message):
    text = json.dumps(message).encode()
    if len(text) > _BYTES:
        text = json.dumps({key: str(value)[:200] for key, value in message.items()}).encode()[:_BYTES]
    return torch.frombuffer(bytearray(text.ljust(_BYTES)), dtype=torch.uint8)


def _unpacked(tensor):
    return json.loads(bytes(tensor.tolist()).decode())


def _ranks(ranks):
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _lost(function, rank, limit, error):
    which = "another rank" if rank is None else _ranks([rank])
    return RuntimeError(f"{function}: {which} did not come to this call within {limit:g} s, or its process has "
                        f"ended; the other ranks cannot go on without it ({str(error).splitlines()[0][:200]})")


def _exchanged(name, message, limit, function):
    """The messages of all ranks. Raises RuntimeError that names a rank which sends none."""
    control = _control(name, limit, function)
    rank, ranks = dist.get_rank(control), dist.get_world_size(control)
    others = [r for r in range(ranks) if r != rank]
    of_world = {r: dist.get_global_rank(control, r) for r in others}
    mine, theirs = _packed(message), {r: torch.empty(_BYTES, dtype=torch.uint8) for r in others}
    end = time.monotonic() + limit
    works, r = [], rank
    try:
        for r in others:
            works.append((r, dist.irecv(theirs[r], of_world[r], group=control, tag=_TAG)))
        sent = []
        for r in others:
            sent.append((r, dist.isend(mine, of_world[r], group=control, tag=_TAG)))
        for r, work in works + sent:
            work.wait(datetime.timedelta(seconds=max(end - time.monotonic(), 0.001)))
    except RuntimeError as error:
        raise _lost(function, r, limit, error) from None
    return [message if r == rank else _unpacked(theirs[r]) for r in range(ranks)]


def checked(group, limit, function, check):
    """check(), which checks arguments before ranks exchange anything. Its error is raised on the other ranks too, as a
    ValueError with this one's rank, when they come to agree(): they do not wait for this rank until `limit`."""
    if torch.compiler.is_compiling():
        return check()
    try:
        return check()
    except (ValueError, TypeError) as error:
        tell(group, limit, function, error)
        raise


def tell(group, limit, function, error):
    """Sends the text of an error to the other ranks of the group, if this process belongs to it."""
    if torch.compiler.is_compiling():
        return
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < math.inf:
        limit = 300.0  # `limit` may be what the error is about
    with contextlib.suppress(ValueError):  # the caller raises the error itself
        agree(name_of(group), {"error": str(error)}, limit, function, True)


def agree(name, message, limit, function, always):
    """Returns when all ranks of the group have sent the same message; all raise if not.

    message: key -> value of JSON; the key "error" has the text of an error that this rank found, or None. always:
    whether to ask for a message that all ranks have agreed on once. Raises ValueError that names the ranks and the key,
    RuntimeError if a rank does not come within `limit` seconds."""
    if dist.get_world_size(_groups[name]) == 1:
        if message["error"]:
            raise ValueError(message["error"])
        return
    summary = zlib.crc32(json.dumps(message, sort_keys=True).encode())
    known = _agreed.setdefault(name, set())
    if not always and summary in known:
        return
    try:
        messages = _exchanged(name, message, limit, function)
    except RuntimeError:
        if not message["error"]:
            raise
    if message["error"]:
        raise ValueError(message["error"])
    refusing = [other for other, found in enumerate(messages) if found.get("error")]
    if refusing:
        raise ValueError(f"{function}: {_ranks(refusing)} refused the call, which this rank "
                         f"({dist.get_rank(_groups[name])}) could make: {messages[refusing[0]]['error']}")
    for key in message:
        by_value: dict = {}
        for other, found in enumerate(messages):
            by_value.setdefault(json.dumps(found.get(key)), []).append(other)
        if len(by_value) > 1:
            raise ValueError(f"{key}: expected the same on all ranks, got "
                             + ", ".join(f"{json.loads(value)} on {_ranks(ranks)}" for value, ranks in by_value.items()))
    known.add(summary)
