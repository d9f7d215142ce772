# SPDX-License-Identifier: Apache-2.0
"""Some steps of server_loop.py; run as a program, it does 10,000."""
import collections

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import server_loop  # noqa: E402

STEPS = 300


@pytest.mark.parametrize("page", sorted(server_loop.PAGES))
def test_every_result_has_the_bits_of_the_contiguous_call(page, device):
    kinds = [kind for kind in server_loop.kinds(device) if kind[0] == page]
    seen = collections.Counter()
    for number, kind in enumerate(kinds):
        server = server_loop.Server(100 * page + number, *kind)
        for _ in range(STEPS // len(server_loop.PAGES) // len(kinds)):
            server.step()
        assert server.seen["results"] > server.seen["steps"]
        seen.update(server.seen)
    happened = ["joins", "leaves", "forks", "taken back", "calls of 2.8", "calls of 3", "results beside fp64"]
    happened += ["shared pages", "evictions"] if page < 100 else []
    assert not [name for name in happened if not seen[name]], seen
