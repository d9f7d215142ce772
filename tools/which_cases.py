# SPDX-License-Identifier: Apache-2.0
"""Cases of which_traces.py: PyTorch's attention, called by each of its backends, by hand, in CUDA graphs and compiled."""
import math
from contextlib import nullcontext

FAMILIES = {"FLASH_ATTENTION": "fa2", "EFFICIENT_ATTENTION": "mem-efficient", "CUDNN_ATTENTION": "cudnn", "MATH": "math"}
SHORT = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH"}


class Case:
    def __init__(self, name, families, step, shapes=True, stack=False):
        self.name, self.families, self.step, self.shapes, self.stack = name, families, step, shapes, stack


def tensors(*shapes, dtype="bfloat16", grad=False):
    import torch

    return [torch.randn(shape, device="cuda", dtype=getattr(torch, dtype), requires_grad=grad) for shape in shapes]


def with_backward(forward, inputs):
    """A training step: forward, and backward with a gradient of noise."""
    import torch

    def step():
        out = forward(*inputs)
        out.backward(torch.ones_like(out))
        for tensor in inputs:
            tensor.grad = None

    return step


def raising(error):
    """A step of a case that this release cannot build: it raises when it runs."""
    def step():
        raise error

    return step


def language_step(model, ids, train):
    """A step of a language model of transformers: loss on its own input and backward, or logits alone."""
    import torch

    def step():
        if train:
            return model(input_ids=ids, labels=ids).loss.backward()
        with torch.no_grad():
            return model(input_ids=ids)

    return step


def sdpa(name, backend, q, kv=None, v=None, dtype="bfloat16", mask=None, train=False, **options):
    """One call of scaled_dot_product_attention by the backend, or by PyTorch's own choice (None)."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kv = kv or q
    inputs = tensors(q, kv, v or kv, dtype=dtype, grad=train)
    if mask == "bool":
        options["attn_mask"] = torch.ones(q[0], 1, q[2], kv[2], device="cuda", dtype=torch.bool).tril()
    elif mask == "float":
        options["attn_mask"] = torch.zeros(q[2], kv[2], device="cuda", dtype=inputs[0].dtype)

    def forward(*qkv):
        with sdpa_kernel(getattr(SDPBackend, SHORT[backend])) if backend else nullcontext():
            return torch.nn.functional.scaled_dot_product_attention(*qkv, **options)

    family = FAMILIES[SHORT[backend]] if backend else "?"
    return Case(name, family, with_backward(forward, inputs) if train else lambda: forward(*inputs))


def sdpa_cases():
    d64, d128, long = (4, 16, 1024, 64), (4, 16, 1024, 128), (1, 32, 4096, 128)
    yield sdpa("default_causal", None, long, is_causal=True)
    yield sdpa("default_mask", None, d128, mask="bool")
    yield sdpa("default_train", None, d64, is_causal=True, train=True)
    yield sdpa("default_fp32", None, d64, dtype="float32")
    yield sdpa("default_gqa", None, d128, kv=(4, 4, 1024, 128), enable_gqa=True)
    yield sdpa("default_decode", None, (8, 16, 1, 128), kv=(8, 16, 2048, 128))
    for backend in ("flash", "cudnn", "efficient", "math"):
        yield sdpa(f"{backend}_causal", backend, long, is_causal=True)
        yield sdpa(f"{backend}_train", backend, d64, is_causal=True, train=True)
        yield sdpa(f"{backend}_fp16", backend, d128, dtype="float16")
    yield sdpa("flash_train_128", "flash", d128, train=True)
    yield sdpa("flash_decode", "flash", (2, 16, 1, 128), kv=(2, 16, 4096, 128))
    yield sdpa("flash_dropout", "flash", d64, dropout_p=0.1, train=True)
    yield sdpa("flash_gqa", "flash", d128, kv=(4, 4, 1024, 128), enable_gqa=True, train=True)
    yield sdpa("flash_256", "flash", (2, 8, 1024, 256), is_causal=True)
    yield sdpa("flash_odd_dim", "flash", (2, 8, 1000, 72))
    yield sdpa("cudnn_mask", "cudnn", d128, mask="bool")
    yield sdpa("cudnn_train_128", "cudnn", d128, is_causal=True, train=True)
    yield sdpa("cudnn_decode", "cudnn", (2, 16, 1, 128), kv=(2, 16, 4096, 128))
    yield sdpa("cudnn_256", "cudnn", (2, 8, 1024, 256))
    yield sdpa("efficient_mask_train", "efficient", d64, mask="float", train=True)
    yield sdpa("efficient_fp32_train", "efficient", d64, dtype="float32", train=True)
    yield sdpa("efficient_dropout", "efficient", d64, dropout_p=0.2, train=True)
    yield sdpa("math_mask", "math", d64, mask="bool")
    yield sdpa("math_fp32", "math", d64, dtype="float32")
    yield sdpa("math_dropout_train", "math", d64, dropout_p=0.1, train=True)
    no_shapes = sdpa("flash_no_shapes", "flash", d128, is_causal=True)
    no_shapes.shapes = False
    yield no_shapes
    stack = sdpa("efficient_stack", "efficient", d64)
    stack.stack = True
    yield stack
    yield from ragged_cases()


def ragged_cases():
    import torch
    from torch.nn.attention.varlen import varlen_attn

    def jagged():
        return torch.nested.nested_tensor(
            [torch.randn(n, 16, 64, device="cuda", dtype=torch.bfloat16) for n in (700, 300, 1000)], layout=torch.jagged
        ).transpose(1, 2)

    q, k, v = jagged(), jagged(), jagged()
    yield Case("nested", "?", lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    packed = tensors((2000, 16, 64), (2000, 16, 64), (2000, 16, 64))
    starts = torch.tensor([0, 700, 1000, 2000], device="cuda", dtype=torch.int32)
    yield Case("varlen", "fa2", lambda: varlen_attn(*packed, starts, starts, 1000, 1000))


def by_hand(q, k, v, mask=None, cap=None):
    """Attention as models write it: GEMM, scale, mask, softmax in fp32, GEMM."""
    import torch

    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v)


def eager_cases():
    import torch

    shape = (4, 16, 1024, 64)
    mask = torch.full((1024, 1024), float("-inf"), device="cuda", dtype=torch.bfloat16).triu(1)
    for name, grad, how in (
        ("eager", False, by_hand),
        ("eager_train", True, by_hand),
        ("eager_mask", False, lambda *qkv: by_hand(*qkv, mask=mask)),
        ("eager_mask_train", True, lambda *qkv: by_hand(*qkv, mask=mask)),
        ("eager_softcap", False, lambda *qkv: by_hand(*qkv, cap=50.0)),
        ("eager_einsum", False, einsum),
    ):
        inputs = tensors(shape, shape, shape, grad=grad)
        step = with_backward(how, inputs) if grad else (lambda how=how, inputs=inputs: how(*inputs))
        yield Case(name, "eager", step)
    layer = torch.nn.MultiheadAttention(512, 8, batch_first=True, device="cuda", dtype=torch.bfloat16)
    (x,) = tensors((8, 512, 512))
    yield Case("mha_weights", "eager", lambda: layer(x, x, x))
    yield Case("mha_train", "?", lambda: layer(x, x, x, need_weights=False)[0].sum().backward())
    encoder = torch.nn.TransformerEncoderLayer(512, 8, batch_first=True, device="cuda", dtype=torch.bfloat16).eval()

    def fast_path():
        with torch.no_grad():
            encoder(x)

    yield Case("encoder_fast_path", "?", fast_path)
    yield Case("no_attention", "-", lambda: torch.softmax(x @ x.transpose(1, 2), -1).argmax(-1))
    logits, target = tensors((4096, 8192), grad=True)[0], torch.randint(8192, (4096,), device="cuda")
    yield Case("cross_entropy", "-", lambda: torch.nn.functional.cross_entropy(logits, target).backward())


def einsum(q, k, v):
    import torch

    weights = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5, -1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def captured(step):
    """The step as a CUDA graph, whose kernels have no operator on the CPU."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def graph_cases():
    shape = (4, 16, 1024, 64)
    for backend in ("flash", "cudnn", "efficient", "math"):
        case = sdpa(f"graph_{backend}", backend, shape, is_causal=True)
        # A graph keeps only names, and those of the math path equal those of an attention by hand.
        yield Case(case.name, "eager" if backend == "math" else case.families, captured(case.step))
    inputs = tensors(shape, shape, shape)
    yield Case("graph_eager", "eager", captured(lambda: by_hand(*inputs)))


def flex_cases():
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    shape = (2, 16, 1024, 64)
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1024, 1024, device="cuda")
    inputs = tensors(shape, shape, shape)
    yield Case("flex", "flex", lambda: compiled(*inputs))
    trained = tensors(shape, shape, shape, grad=True)
    yield Case("flex_train", "flex", with_backward(lambda *qkv: compiled(*qkv, block_mask=causal), trained))
    one = tensors((2, 16, 1, 64), shape, shape)
    yield Case("flex_decode", "flex", lambda: compiled(*one))
    yield Case("flex_uncompiled", "?", lambda: flex_attention(*inputs, block_mask=causal))


def compiled_cases():
    import torch

    shape = (4, 16, 1024, 64)
    inputs = tensors(shape, shape, shape)
    call = torch.nn.functional.scaled_dot_product_attention
    sdpa_compiled = torch.compile(lambda *qkv: call(*qkv, is_causal=True) * 2)
    yield Case("compiled_sdpa", "?", lambda: sdpa_compiled(*inputs))
    eager_compiled = torch.compile(by_hand)
    yield Case("compiled_eager", "?", lambda: eager_compiled(*inputs))
    capped = torch.compile(lambda *qkv: by_hand(*qkv, cap=50.0))
    yield Case("compiled_softcap", "?", lambda: capped(*inputs))
    trained = tensors(shape, shape, shape, grad=True)
    yield Case("compiled_softcap_train", "?", with_backward(capped, trained))
    graphed = torch.compile(lambda *qkv: call(*qkv, is_causal=True).relu(), mode="reduce-overhead")
    yield Case("compiled_graph", "?", lambda: graphed(*inputs))
