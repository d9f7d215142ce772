# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: PyTorch's scaled_dot_product_attention runs on tessera wherever it would choose its flash kernel."""


def pytest_configure(config):
    import tessera.torch
    from torch.nn.attention import activate_flash_attention_impl
    tessera.torch.register_provider()
    activate_flash_attention_impl("tessera")
