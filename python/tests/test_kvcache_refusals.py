# SPDX-License-Identifier: Apache-2.0
"""Calls on a cache that are refused: nothing is written, and no gradient is lost."""
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from test_kvcache import NAN, Drawn  # noqa: E402
from tessera import flash_attn, flash_attn_3  # noqa: E402


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3])
def test_nothing_is_written_by_a_call_that_is_refused(module):
    """Arguments of attention alone are checked before the new rows are appended."""
    drawn = Drawn(5, pages=True)
    before = drawn.k_cache.clone(), drawn.v_cache.clone()
    for wrong in (dict(s_aux=torch.zeros(drawn.heads + 1)), dict(softmax_scale=NAN), dict(q=drawn.q.double()),
                  dict(q=drawn.q[..., :8]), dict(softcap=NAN)):
        call = {**dict(q=drawn.q, k_cache=drawn.k_cache, v_cache=drawn.v_cache, k=drawn.k, v=drawn.v),
                **drawn.keywords(module), **wrong}
        with pytest.raises(RuntimeError, match=f"^{'q|k_cache' if 'q' in wrong else next(iter(wrong))}: "):
            module.flash_attn_with_kvcache(**call)
        for cache, was in zip((drawn.k_cache, drawn.v_cache), before):
            assert torch.equal(cache.nan_to_num(7.0), was.nan_to_num(7.0)), wrong


def test_gradients_are_refused_and_not_lost():
    drawn = Drawn(6, pages=False)
    for module in (flash_attn, flash_attn_3):
        for name in ("q", "k_cache", "v_cache", "k", "v", "s_aux"):
            call = dict(q=drawn.q, k_cache=drawn.k_cache, v_cache=drawn.v_cache, k=drawn.k, v=drawn.v,
                        s_aux=torch.zeros(drawn.heads), **drawn.keywords(module))
            call[name] = call[name].detach().clone().requires_grad_()
            with pytest.raises(RuntimeError, match=f"^{name}: expected a tensor without requires_grad"):
                module.flash_attn_with_kvcache(**call)
            with torch.no_grad():
                module.flash_attn_with_kvcache(**call)
    pages, table = torch.randn(3, 4, 2, 8), torch.tensor([[2, 0]], dtype=torch.int32)
    offsets, q = torch.tensor([0, 5], dtype=torch.int32), torch.randn(5, 2, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="^q: expected a tensor without requires_grad"):
        flash_attn.flash_attn_varlen_func(q, pages, pages, offsets, offsets, 5, 5, block_table=table)
