// SPDX-License-Identifier: Apache-2.0
#include "llama/block.hpp"

#include <fmt/format.h>

#include <cstring>

#include "llama/bf16.hpp"

namespace llama {

using tessera::DType, tessera::TensorView;

namespace {

std::size_t bytes_of(const Matrix& m) { return static_cast<std::size_t>(m.outputs * m.inputs * size_of(m.dtype)); }

/// The rows of these matrices, one after another.
std::vector<std::byte> stacked(std::initializer_list<const Matrix*> matrices) {
    std::vector<std::byte> all;
    for (const Matrix* m : matrices) {
        const auto* const from = static_cast<const std::byte*>(m->data);
        all.insert(all.end(), from, from + bytes_of(*m));
    }
    return all;
}

void expect_one_dtype(const LayerWeights& w, DType expected) {
    for (const auto& [name, m] : {std::pair("q_proj", &w.q), {"k_proj", &w.k}, {"v_proj", &w.v}, {"o_proj", &w.o}}) {
        if (m->dtype == expected) continue;
        throw tessera::Error(tessera::ErrorCode::unsupported, name,
                             fmt::format("--block takes matrices of one dtype: expected {}, got {}", name_of(expected),
                                         name_of(m->dtype)));
    }
}

}  // namespace

Block::Block(const Config& config, const Weights& weights, DType dtype, std::int64_t positions, Memory& memory)
    : config_(config), memory_(memory), positions_(positions) {
    problem_.dtype = dtype;
    if (!weights.layers.empty()) problem_.weights_dtype = weights.layers.front().q.dtype;
    problem_.hidden = config.hidden_size;
    problem_.heads_q = config.heads_q, problem_.heads_kv = config.heads_kv;
    problem_.head_dim = problem_.rotary_dim = config.head_dim;
    problem_.qk_norm = config.qk_norm;
    problem_.norm_eps = config.rms_norm_eps;
    const auto numbers = [&](const std::vector<float>& from) {
        return upload(from.data(), from.size() * sizeof(float));
    };
    for (const LayerWeights& w : weights.layers) {
        expect_one_dtype(w, problem_.weights_dtype);
        const std::vector<std::byte> qkv = stacked({&w.q, &w.k, &w.v});
        Layer layer{numbers(w.input_norm), upload(qkv.data(), qkv.size()), upload(w.o.data, bytes_of(w.o)), {}, {}};
        if (config.qk_norm) layer.q_norm = numbers(w.q_norm), layer.k_norm = numbers(w.k_norm);
        layers_.push_back(std::move(layer));
    }
    const RotaryTables tables = Rotary(config).tables(positions);
    cos_ = numbers(tables.cos);
    sin_ = numbers(tables.sin);
}

bool Block::begin(const Batch& batch, std::int64_t page_size, Threads& threads) {
    plan_.reset();
    if (batch.rows() != batch.sequences()) return false;
    problem_.batch = batch.rows();
    problem_.page_size = page_size;
    problem_.capacity = batch.pages_each * page_size;
    plan_ = tessera::decode_block_plan(problem_, {.device = memory_.device(), .threads = threads.count()});
    const std::vector<std::byte> zeros(plan_->counter_bytes);
    memory_.copy_in(workspace_.reserve(memory_, plan_->workspace_bytes), zeros.data(), zeros.size());
    x_.reserve(memory_, static_cast<std::size_t>(batch.rows() * config_.hidden_size * size_of(problem_.dtype)));
    std::vector<std::int32_t> before = batch.lengths;
    for (std::int32_t& length : before) --length;
    upload(lengths_, before);
    upload(page_table_, batch.page_table);
    return true;
}

void Block::run(std::int64_t layer, const Attention& attention, std::vector<float>& x, Threads& threads) {
    const Layer& w = layers_[static_cast<std::size_t>(layer)];
    const tessera::DecodeBlockProblem& p = plan_->problem;
    const bool narrow = p.dtype == DType::bf16;
    if (narrow) {
        narrow_.resize(x.size());
        for (std::size_t i = 0; i < x.size(); ++i) narrow_[i] = to_bf16(x[i]);
    }
    const std::size_t bytes = x.size() * static_cast<std::size_t>(size_of(p.dtype));
    memory_.copy_in(x_.data.get(), narrow ? static_cast<const void*>(narrow_.data()) : x.data(), bytes);

    const TensorView rows = view(x_.data, p.dtype, {p.batch, p.hidden});
    tessera::DecodeBlockArgs args{
        .x = rows,
        .norm = view(w.norm, DType::fp32, {p.hidden}),
        .w_qkv = view(w.w_qkv, p.weights_dtype, {p.qkv_rows(), p.hidden}),
        .rotary_cos = view(cos_, DType::fp32, {positions_, p.rotary_dim / 2}),
        .rotary_sin = view(sin_, DType::fp32, {positions_, p.rotary_dim / 2}),
        .k_cache = attention.pages(layer, 0),
        .v_cache = attention.pages(layer, 1),
        .kv_lengths = view(lengths_.data, DType::int32, {p.batch}),
        .page_table = view(page_table_.data, DType::int32, {p.batch, p.capacity / p.page_size}),
        .w_o = view(w.w_o, p.weights_dtype, {p.hidden, p.heads_q * p.head_dim}),
        .out = rows};
    if (p.qk_norm) {
        args.q_norm = view(w.q_norm, DType::fp32, {p.head_dim});
        args.k_norm = view(w.k_norm, DType::fp32, {p.head_dim});
    }
    tessera::decode_block(*plan_, args, {workspace_.data.get(), plan_->workspace_bytes},
                          {.parallel_for = [&](std::int64_t tasks, int workers, const tessera::TaskBody& body) {
                              threads.run(tasks, workers, body);
                          }});

    if (!narrow) return memory_.copy_out(x.data(), x_.data.get(), bytes);
    memory_.copy_out(narrow_.data(), x_.data.get(), bytes);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = from_bf16(narrow_[i]);
}

Block::Bytes Block::upload(const void* from, std::size_t bytes) {
    Bytes there = memory_.allocate(bytes, "--block");
    memory_.copy_in(there.get(), from, bytes);
    return there;
}

void Block::upload(Buffer& buffer, const std::vector<std::int32_t>& from) {
    const std::size_t bytes = from.size() * sizeof(std::int32_t);
    memory_.copy_in(buffer.reserve(memory_, bytes), from.data(), bytes);
}

TensorView Block::view(const Bytes& data, DType dtype, std::initializer_list<std::int64_t> shape) const {
    return tessera::dense_view(data.get(), dtype, shape, memory_.device());
}

}  // namespace llama
