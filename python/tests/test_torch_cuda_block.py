# SPDX-License-Identifier: Apache-2.0
"""decode_block on CUDA: every phase against float64, equal bits of both ways, of rows, in graphs and on two streams."""
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from conftest import NO_CUDA  # noqa: E402

if NO_CUDA:
    pytest.skip(NO_CUDA, allow_module_level=True)
if torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("decode_block needs compute capability 9.0 on CUDA", allow_module_level=True)
import tessera  # noqa: E402

#         hidden, heads_q, heads_kv, head_dim
LLAMA_1B, LLAMA_8B, QWEN3 = (2048, 32, 8, 64), (4096, 32, 8, 128), (1024, 16, 8, 128)


def draw(*shape, scale=1.0, dtype=torch.bfloat16):
    return (scale * torch.randn(shape, device="cuda", dtype=torch.float32)).to(dtype)


def make(shape, lengths, page=16, seed=0, capacity=None, **features):
    """The arguments of a call. Rows of the cache that are no keys are NaN, unused entries of the table are junk."""
    torch.manual_seed(seed)
    hidden, heads, heads_kv, dim = shape
    batch, rows = len(lengths), (heads + 2 * heads_kv) * dim
    capacity = capacity or max(max(lengths) + 1, 1)
    call = dict(x=draw(batch, hidden), norm=1 + draw(hidden, scale=0.1), w_qkv=draw(rows, hidden, scale=hidden ** -0.5),
                w_o=draw(hidden, heads * dim, scale=(heads * dim) ** -0.5),
                kv_lengths=torch.tensor(lengths, dtype=torch.int32, device="cuda"))
    width = -(-capacity // page) if page else 1
    caches = torch.full((2, batch * width + 1, page or capacity, heads_kv, dim), float("nan"), device="cuda",
                        dtype=torch.bfloat16)
    order = torch.randperm(batch * width + 1)[:batch * width].view(batch, width)
    keys = draw(2, batch, max(max(lengths), 1), heads_kv, dim)
    for b, length in enumerate(lengths):
        row = torch.arange(max(length, 0))
        place = (order[b][row // page], row % page) if page else (order[b].expand(len(row)), row)
        caches[0][place], caches[1][place] = keys[0, b, :max(length, 0)], keys[1, b, :max(length, 0)]
    call.update(k_cache=caches[0], v_cache=caches[1])
    if page:
        used = torch.arange(width)[None] * page <= torch.tensor(lengths)[:, None]
        call["page_table"] = torch.where(used, order, 2**31 - 7).to(torch.int32).cuda()
    else:
        call["cache_batch_index"] = order[:, 0].to(torch.int32).cuda()
    if features.pop("rotary", True):
        angles = torch.arange(capacity)[:, None] * 1e4 ** (-torch.arange(dim // 2) / (dim // 2))
        call.update(rotary_cos=angles.cos().cuda(), rotary_sin=angles.sin().cuda())
    if features.pop("qk_norm", False):
        call.update(q_norm=1 + draw(dim, scale=0.1), k_norm=1 + draw(dim, scale=0.1, dtype=torch.float32))
    if features.pop("biases", False):
        call.update(b_qkv=draw(rows), b_o=draw(hidden))
    if features.pop("sinks", False):
        call["sinks"] = draw(heads, dtype=torch.float32)
    return {**call, **features}


def copied(call):
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in call.items()}


def run(call, **options):
    """(out, o, lse, k_cache, v_cache) of a copy of the call."""
    call = copied(call)
    results = tessera.decode_block(**call, return_attention=True, **options)
    return (*results, call["k_cache"], call["v_cache"])


def same(one, other):
    """Equal bits, NaN included."""
    return all(torch.equal(a.view(torch.int16 if a.dtype == torch.bfloat16 else torch.int32),
                           b.view(torch.int16 if b.dtype == torch.bfloat16 else torch.int32))
               for a, b in zip(one, other))


def key_of(call, cache, b, row):
    if "page_table" in call:
        page = cache.shape[1]
        return cache[call["page_table"][b, row // page].long(), row % page]
    return cache[call["cache_batch_index"][b].long(), row]


def expect_right(call, results):
    """Each phase in float64 by what the call itself gave to it."""
    out, o, lse, k_cache, v_cache = results
    heads, dim, heads_kv = o.shape[1], o.shape[2], k_cache.shape[2]
    double = {name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
              for name, value in call.items()}
    x, eps = double["x"], 1e-6

    def normed(t, weights):
        return t * (t.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weights

    qkv = (normed(x, double["norm"]).bfloat16().double() @ double["w_qkv"].T + double.get("b_qkv", 0)).bfloat16().double()
    q, k, v = qkv.view(len(x), -1, dim).split((heads, heads_kv, heads_kv), 1)
    if "q_norm" in call:
        q, k = normed(q, double["q_norm"]), normed(k, double["k_norm"])
    if "rotary_cos" in call:
        at = call["kv_lengths"].long().clamp(0, len(call["rotary_cos"]) - 1)
        cos, sin = (double[name][at][:, None] for name in ("rotary_cos", "rotary_sin"))
        q, k = (torch.cat((t[..., :dim // 2] * cos - t[..., dim // 2:] * sin,
                           t[..., dim // 2:] * cos + t[..., :dim // 2] * sin), -1) for t in (q, k))
    q = q.bfloat16().double()
    for b, length in enumerate(call["kv_lengths"].tolist()):
        if length < 0:
            assert (o[b] == 0).all()
            continue
        for cache, new in ((k_cache, k), (v_cache, v)):
            torch.testing.assert_close(key_of(call, cache, b, length).double(), new[b], rtol=1.2e-2, atol=2e-2)
        first = max(0, length - call.get("window_left", length))
        keys, values = (torch.stack([key_of(call, cache, b, row) for row in range(first, length + 1)]).double()
                        .repeat_interleave(heads // heads_kv, 1) for cache in (k_cache, v_cache))
        scores = torch.einsum("hd,khd->hk", q[b], keys) * dim ** -0.5
        if call.get("softcap"):
            scores = call["softcap"] * (scores / call["softcap"]).tanh()
        sinks = double["sinks"][:, None] if "sinks" in call else scores.new_full((heads, 1), float("-inf"))
        right = torch.cat((scores, sinks), 1).logsumexp(1)
        torch.testing.assert_close(lse[b].double(), right, rtol=0, atol=4e-3)
        weights = (scores - right[:, None]).exp()
        error = (o[b].double() - torch.einsum("hk,khd->hd", weights, values)).abs()
        assert (error <= 2e-2 * torch.einsum("hk,khd->hd", weights, values.abs()) + 1e-6).all()
    exact = o.double().flatten(1) @ double["w_o"].T + double.get("b_o", 0) + double.get("residual", x)
    unavoidable = (exact.bfloat16().double() - exact).norm()
    assert (out.double() - exact).norm() <= 1.1 * unavoidable


def run_or_skip(call, way):
    """run(), or the reason why this way does not run."""
    try:
        return run(call, way=way)
    except tessera.Unsupported as refused:
        pytest.skip(str(refused))


CASES = [(LLAMA_1B, [1023], 16, {}), (LLAMA_8B, [1023], 16, {}), (QWEN3, [300], 16, dict(qk_norm=True)),
         (LLAMA_1B, [0, 1, 63, 64, 65, 1023, 1024, 500], 16, {}), (LLAMA_8B, [900, 2047, 0], 0, {}),
         (LLAMA_1B, [5000], 1, dict(sinks=True)), (QWEN3, [700, 40], 784, dict(qk_norm=True, biases=True)),
         (LLAMA_8B, [1300, 12], 3, dict(window_left=100, softcap=20.0)), (LLAMA_1B, [40, -1, 7], 16, dict(biases=True)),
         ((512, 5, 1, 64), [200], 16, dict(rotary=False)), ((8192, 16, 1, 128), [64], 16, {}),
         ((256, 33, 33, 64), [80, 3], 16, {}),
         # A split has 16 query heads: these have several splits of the same keys.
         ((512, 34, 2, 64), [80, 3], 16, {}), ((512, 40, 1, 128), [300], 16, {}),
         ((512, 32, 1, 64), [1500, 20, 0, 7], 16, {}), ((8192, 64, 8, 128), [64, 0, 7, 100, 3, 90], 16, {})]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_both_ways_are_right_and_equal(case):
    shape, lengths, page, features = CASES[case]
    call = make(shape, lengths, page, case, **features)
    chain = run(call, way="chain")
    expect_right(call, chain)
    assert same(run_or_skip(call, "one launch"), chain)
    assert same(run(call, early_weights=True), chain)


def test_the_widest_rows_of_many_sequences_take_the_chain():
    """With 227 KiB of shared memory, 64 heads of 128 at hidden 8,192 leave six stages beside 6 rows (the last of CASES)."""
    if torch.cuda.get_device_properties(0).shared_memory_per_block_optin != 227 * 1024:
        pytest.skip("needs 227 KiB of shared memory for a thread block")
    for batch in (7, 8):
        call = make((8192, 64, 8, 128), [64, 0, 7, 100, 3, 90, 16, 15][:batch])
        with pytest.raises(tessera.Unsupported, match=f"{batch} rows leave too little"):
            run(call, way="one launch")
        chain = run(call, way="chain")
        expect_right(call, chain)
        assert same(run(call), chain)


@pytest.mark.parametrize("shape", [LLAMA_1B, LLAMA_8B])
def test_a_row_has_the_same_bits_beside_any_rows(shape):
    call = make(shape, [17, 900, 64, 1024, 0, 333, 1023, 128])
    whole = run(call)
    for b in (1, 3, 7):
        alone = {**call, "x": call["x"][b:b + 1], "kv_lengths": call["kv_lengths"][b:b + 1],
                 "page_table": call["page_table"][b:b + 1]}
        assert same(run(alone)[:3], [result[b:b + 1] for result in whole[:3]])


def test_out_may_be_x():
    call = make(LLAMA_1B, [77, 5])
    want = run(call)[0]
    call = copied(call)
    assert tessera.decode_block(**call, out=call["x"]) is call["x"] and same([call["x"]], [want])


@pytest.mark.parametrize("way", ["one launch", "chain"])
def test_in_a_graph(way):
    """Steps of a graph whose lengths, x and table change between replays have the bits of single calls."""
    call = make(LLAMA_1B, [100, 15], capacity=256)
    run_or_skip(call, way)
    call["page_table"] = torch.arange(32, dtype=torch.int32, device="cuda").view(2, 16)
    for cache in (call["k_cache"], call["v_cache"]):
        cache.copy_(torch.randn_like(cache))
    eager, workspace = copied(call), tessera.DecodeBlockWorkspace()
    with pytest.raises(ValueError, match="^way: "):
        tessera.decode_block(**call, way="graph")
    tessera.decode_block(**copied(call), way=way, workspace=workspace)
    out, graph = torch.empty_like(call["x"]), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tessera.decode_block(**call, out=out, way=way, workspace=workspace)
    for step in range(40):
        graph.replay()
        want = tessera.decode_block(**eager, way="chain")
        assert same([out, call["k_cache"], call["v_cache"]], [want, eager["k_cache"], eager["v_cache"]]), step
        for c in (call, eager):
            c["x"].copy_(want)
            c["kv_lengths"].add_(1)


def test_a_graph_needs_a_workspace_with_memory():
    call, graph = make(LLAMA_1B, [10]), torch.cuda.CUDAGraph()
    run_or_skip(call, "one launch")
    with pytest.raises(ValueError, match="^workspace: expected a DecodeBlockWorkspace that a call of this shape"):
        with torch.cuda.graph(graph):
            tessera.decode_block(**call, way="one launch", workspace=tessera.DecodeBlockWorkspace())
    with pytest.raises(ValueError, match="^workspace: expected a DecodeBlockWorkspace in a CUDA graph"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            tessera.decode_block(**call, way="one launch")


def test_a_graph_without_a_workspace_has_the_chain():
    call, graph = make(LLAMA_1B, [10]), torch.cuda.CUDAGraph()
    want, out = run(call, way="chain")[0], torch.empty_like(call["x"])
    call = copied(call)
    with torch.cuda.graph(graph):
        tessera.decode_block(**call, out=out)
    graph.replay()
    assert same([out], [want])


def test_on_two_streams_at_once():
    calls = [make(LLAMA_1B, [1000], seed=1), make(LLAMA_8B, [500, 40], seed=2)]
    wants = [run(call) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    results = [[], []]
    torch.cuda.synchronize()
    for _ in range(100):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[n].append(tessera.decode_block(**calls[n]))
    torch.cuda.synchronize()
    for n, want in enumerate(wants):
        assert all(same([got], [want[0]]) for got in results[n])


def test_torch_compile():
    call = make(LLAMA_1B, [33, 64])
    want = run(call)
    compiled = torch.compile(lambda **c: tessera.decode_block(**c), backend="aot_eager", fullgraph=True)
    call = copied(call)
    assert same([compiled(**call), call["k_cache"]], [want[0], want[3]])


def test_host_memory_is_refused():
    call = make(LLAMA_1B, [33])
    with pytest.raises(ValueError, match="^w_o: expected a tensor on CUDA device 0"):
        tessera.decode_block(**{**call, "w_o": call["w_o"].cpu()})
