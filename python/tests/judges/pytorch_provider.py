# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: PyTorch's scaled_dot_product_attention runs on tessera wherever it would choose its flash kernel."""
import sample


def pytest_configure(config):
    import tessera.torch
    from tessera.torch import sdpa
    from torch.nn.attention import activate_flash_attention_impl
    sdpa._forward = sample.counted(sdpa._forward)
    tessera.torch.register_provider()
    activate_flash_attention_impl("tessera")
