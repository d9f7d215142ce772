# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: what transformers calls for attn_implementation="sdpa" is tessera's, with sdpa's own masks."""
import sample


def pytest_configure(config):
    import tessera.transformers
    from transformers import AttentionInterface
    AttentionInterface.register("sdpa", sample.counted(tessera.transformers.attention_forward))
