// SPDX-License-Identifier: Apache-2.0
//
// A row has the same bits whatever the call around it looks like, for every kernel.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/support.hpp"

namespace tessera::check::properties_test {
namespace {

std::size_t bytes_of_row(const Tensor& t, int leading) {
    std::int64_t elements = 1;
    for (int d = leading; d < t.view.rank; ++d) elements *= t.view.shape[static_cast<std::size_t>(d)];
    return static_cast<std::size_t>(elements * size_of(t.view.dtype));
}

/// Are the slices [a0] of `a` and [b0] of `b` along the first dimension the same bits?
bool same_slice(const Tensor& a, std::int64_t a0, const Tensor& b, std::int64_t b0) {
    const std::size_t bytes = bytes_of_row(a, 1);
    if (bytes != bytes_of_row(b, 1)) return false;
    const auto at = [&](const Tensor& t, std::int64_t i) {
        return t.memory.begin() + static_cast<std::ptrdiff_t>(bytes) * i;
    };
    return std::equal(at(a, a0), at(a, a0 + 1), at(b, b0));
}

void copy_slice(const Tensor& from, std::int64_t from0, Tensor& to, std::int64_t to0) {
    const std::size_t bytes = bytes_of_row(from, 1);
    std::copy_n(from.memory.begin() + static_cast<std::ptrdiff_t>(bytes) * from0, bytes,
                to.memory.begin() + static_cast<std::ptrdiff_t>(bytes) * to0);
}

bool same_outputs(const Attention& a, const Attention& b, Pass pass) {
    if (pass == Pass::forward) return a.o.same_bits(b.o) && a.lse.same_bits(b.lse);
    return a.dq.same_bits(b.dq) && a.dk.same_bits(b.dk) && a.dv.same_bits(b.dv) && a.dbias.same_bits(b.dbias);
}

bool run(Attention& setup, const KernelInfo& kernel, const Run& how = {}) {
    return kernel.pass == Pass::forward ? setup.forward(kernel, how) : setup.backward(kernel, how);
}

/// Fails the property, so that rapidcheck shrinks the Problem.
void require(bool holds, const KernelInfo& kernel, const Problem& problem) {
    if (!holds) RC_FAIL(kernel.name + ": " + problem.describe());
}

/// Expects the same bits of both setups, on every kernel of both passes.
void expect_same_bits(Attention a, Attention b, const Run& how_a = {}, const Run& how_b = {}) {
    a.prepare_backward();
    b.prepare_backward();
    for (const KernelInfo& kernel : kernels()) {
        Attention left = a;
        Attention right = b;
        if (!run(left, kernel, how_a) || !run(right, kernel, how_b)) continue;
        require(same_outputs(left, right, kernel.pass), kernel, a.problem);
    }
}

DType draw_dtype() { return *rc::gen::element(DType::fp32, DType::bf16, DType::fp16); }

/// Draws any head_dim, or a compiled one: fa3 takes those only.
std::int64_t draw_head_dim() {
    if (*rc::gen::arbitrary<bool>()) return *rc::gen::inRange<std::int64_t>(1, 80);
    return *rc::gen::element<std::int64_t>(64, 72, 96, 128, 192, 256);
}

/// A small Problem: a few tiles at most, and every remainder.
Problem draw_problem(DType dtype) {
    const auto heads_kv = *rc::gen::inRange<std::int64_t>(1, 3);
    return make_problem(*rc::gen::inRange<std::int64_t>(1, 3), *rc::gen::inRange<std::int64_t>(1, 150),
                        *rc::gen::inRange<std::int64_t>(1, 150), heads_kv * *rc::gen::inRange<std::int64_t>(1, 3),
                        heads_kv, draw_head_dim(), dtype);
}

RC_GTEST_PROP(Properties, causal_is_a_window, ()) {
    Problem causal = draw_problem(draw_dtype());
    Problem unbounded_left = causal;
    Problem whole_left = causal;
    causal.mask.causal = Causal::bottom_right;
    unbounded_left.mask.window_right = 0;
    whole_left.mask = {.window_left = causal.len_kv, .window_right = 0};
    expect_same_bits(Attention(causal), Attention(unbounded_left));
    expect_same_bits(Attention(causal), Attention(whole_left));
}

RC_GTEST_PROP(Properties, alignments_agree_on_squares, ()) {
    Problem a = draw_problem(draw_dtype());
    a.len_kv = a.len_q;
    Problem b = a;
    a.mask.causal = Causal::bottom_right;
    b.mask.causal = Causal::top_left;
    expect_same_bits(Attention(a), Attention(b));
}

RC_GTEST_PROP(Properties, power_of_two_moves_between_q_and_scale, ()) {
    Problem p = draw_problem(*rc::gen::element(DType::fp32, DType::bf16));
    p.scale = 0.125;
    const int k = *rc::gen::element(-7, -1, 1, 4);
    Problem scaled = p;
    scaled.scale = std::ldexp(*p.scale, -k);
    Attention a(p);
    Attention b(scaled);
    b.q.scale_by(std::ldexp(1.0, k));
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (!a.forward(kernel) || !b.forward(kernel)) return;
        require(same_outputs(a, b, Pass::forward), kernel, p);
    });
}

RC_GTEST_PROP(Properties, threads_and_task_order_change_nothing, ()) {
    Problem p = draw_problem(draw_dtype());
    p.len_kv += *rc::gen::element<std::int64_t>(0, 1500);
    p.mask.causal = *rc::gen::element(Causal::none, Causal::bottom_right, Causal::top_left);
    const ParallelFor reversed = [](std::int64_t tasks, int, const TaskBody& body) {
        for (std::int64_t task = tasks; task-- > 0;) body(task, 0);
    };
    const ParallelFor shuffled = [](std::int64_t tasks, int workers, const TaskBody& body) {
        std::vector<std::int64_t> order(static_cast<std::size_t>(tasks));
        for (std::int64_t i = 0; i < tasks; ++i) order[static_cast<std::size_t>(i)] = i;
        const Random random(7);
        for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.bits(i) % i]);
        for (std::size_t i = 0; i < order.size(); ++i)
            body(order[i], static_cast<int>(i % static_cast<std::size_t>(workers)));
    };
    const Attention setup(p);
    const int threads = *rc::gen::inRange(2, 9);
    expect_same_bits(setup, setup, {.threads = 1}, {.threads = threads});
    expect_same_bits(setup, setup, {.threads = 1}, {.threads = threads, .how = {.parallel_for = reversed}});
    expect_same_bits(setup, setup, {.threads = 1}, {.threads = threads, .how = {.parallel_for = shuffled}});
}

RC_GTEST_PROP(Properties, batch_position_and_neighbours_change_nothing, ()) {
    Problem one = draw_problem(draw_dtype());
    one.batch = 1;
    one.mask.causal = *rc::gen::element(Causal::none, Causal::bottom_right);
    Problem three = one;
    three.batch = 3;
    Attention alone(one, 5);
    Attention among(three, 9);
    alone.prepare_backward();
    among.prepare_backward();
    const std::int64_t at = *rc::gen::inRange(0, 3);
    for (auto sequence :
         {&Attention::q, &Attention::k, &Attention::v, &Attention::d_o, &Attention::o, &Attention::lse}) {
        copy_slice(alone.*sequence, 0, among.*sequence, at);
    }
    for (const KernelInfo& kernel : kernels()) {
        Attention a = alone;
        Attention b = among;
        if (!run(a, kernel) || !run(b, kernel, {.threads = 3})) continue;
        for (auto sequence : {&Attention::o, &Attention::lse, &Attention::dq, &Attention::dk, &Attention::dv}) {
            const bool of_forward = sequence == &Attention::o || sequence == &Attention::lse;
            if (of_forward != (kernel.pass == Pass::forward)) continue;
            require(same_slice(a.*sequence, 0, b.*sequence, at), kernel, one);
        }
    }
}

RC_GTEST_PROP(Properties, doubled_batch_gives_doubled_bits, ()) {
    Problem p = draw_problem(draw_dtype());
    Problem twice = p;
    twice.batch = 2 * p.batch;
    Attention a(p);
    Attention b(twice);
    a.prepare_backward();
    b.prepare_backward();
    for (auto sequence :
         {&Attention::q, &Attention::k, &Attention::v, &Attention::d_o, &Attention::o, &Attention::lse}) {
        for (std::int64_t i = 0; i < twice.batch; ++i) copy_slice(a.*sequence, i % p.batch, b.*sequence, i);
    }
    for (const KernelInfo& kernel : kernels()) {
        if (!run(a, kernel) || !run(b, kernel)) continue;
        const Tensor Attention::*out = kernel.pass == Pass::forward ? &Attention::o : &Attention::dk;
        for (std::int64_t i = 0; i < twice.batch; ++i) {
            require(same_slice(a.*out, i % p.batch, b.*out, i), kernel, p);
        }
    }
}

/// Sequences of equal lengths: a ragged call is the dense call, bit for bit.
RC_GTEST_PROP(Properties, ragged_is_dense, ()) {
    Problem dense = draw_problem(draw_dtype());
    dense.mask.causal = *rc::gen::element(Causal::none, Causal::bottom_right, Causal::top_left);
    const auto n = static_cast<std::size_t>(dense.batch);
    const std::vector<std::int64_t> of_q(n, dense.len_q);
    const std::vector<std::int64_t> of_kv(n, dense.len_kv);
    Problem ragged = make_ragged(of_q, of_kv, dense.heads_q, dense.heads_kv, dense.head_dim, dense.dtype);
    ragged.mask = dense.mask;
    Attention a(dense, 3);
    Attention b(ragged, 3, of_q, of_kv);
    a.prepare_backward();
    b.prepare_backward();
    // [batch, heads, len] against [heads, total]
    const auto lse_agrees = [&] {
        for (std::int64_t h = 0; h < dense.heads_q; ++h) {
            for (std::int64_t row = 0; row < dense.batch * dense.len_q; ++row) {
                const double of_dense = a.lse.get(row / dense.len_q, h, row % dense.len_q);
                if (of_dense != b.lse.get(h, row)) return false;
            }
        }
        return true;
    };
    for (const KernelInfo& kernel : kernels()) {
        if (!run(a, kernel) || !run(b, kernel)) continue;
        if (kernel.pass == Pass::forward) {
            require(a.o.same_bits(b.o) && lse_agrees(), kernel, dense);
        } else {
            require(same_outputs(a, b, Pass::backward), kernel, dense);
        }
    }
}

RC_GTEST_PROP(Properties, grouped_heads_are_repeated_heads, ()) {
    Problem grouped = draw_problem(draw_dtype());
    grouped.heads_q = grouped.heads_kv * 3;
    Problem repeated = grouped;
    repeated.heads_kv = grouped.heads_q;
    Attention a(grouped);
    Attention b(repeated);
    for (auto sequence : {&Attention::k, &Attention::v}) {
        const Tensor& from = a.*sequence;
        Tensor& to = b.*sequence;
        for (std::int64_t i = 0; i < to.view.size(); ++i) {
            const std::int64_t c = i % grouped.head_dim;
            const std::int64_t h = i / grouped.head_dim % repeated.heads_kv;
            const std::int64_t row = i / grouped.head_dim / repeated.heads_kv;
            to.set(from.get(row / grouped.len_kv, row % grouped.len_kv, h / 3, c), row / grouped.len_kv,
                   row % grouped.len_kv, h, c);
        }
    }
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (!a.forward(kernel) || !b.forward(kernel)) return;
        require(same_outputs(a, b, Pass::forward), kernel, grouped);
    });
    a.prepare_backward();
    b.prepare_backward();
    for_each_kernel(Pass::backward, [&](const KernelInfo& kernel) {
        if (!a.backward(kernel) || !b.backward(kernel)) return;
        require(a.dq.same_bits(b.dq), kernel, grouped);
        require(a.check_backward().pass(), kernel, grouped);  // dK, dV: the sums over the group
    });
}

/// A query alone (decode) gives the bits that its row has among all others (prefill).
RC_GTEST_PROP(Properties, decode_row_is_prefill_row, ()) {
    Problem prefill = draw_problem(draw_dtype());
    prefill.batch = 1;
    prefill.len_kv = prefill.len_q + *rc::gen::element<std::int64_t>(0, 3, 600);
    prefill.mask.causal = *rc::gen::element(Causal::none, Causal::bottom_right);
    const std::int64_t row = *rc::gen::inRange<std::int64_t>(0, prefill.len_q);
    Problem decode = prefill;
    decode.len_q = 1;
    const bool causal = prefill.mask.causal == Causal::bottom_right;
    if (causal) decode.len_kv = prefill.len_kv - prefill.len_q + row + 1;
    Attention whole(prefill);
    Attention one(decode);
    for (std::int64_t h = 0; h < prefill.heads_q; ++h) {
        for (std::int64_t c = 0; c < prefill.head_dim; ++c) one.q.set(whole.q.get(0, row, h, c), 0, 0, h, c);
    }
    std::copy_n(whole.k.memory.begin(), one.k.memory.size(), one.k.memory.begin());
    std::copy_n(whole.v.memory.begin(), one.v.memory.size(), one.v.memory.begin());
    for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
        if (!whole.forward(kernel) || !one.forward(kernel)) return;
        for (std::int64_t h = 0; h < prefill.heads_q; ++h) {
            bool same = whole.lse.get(0, h, row) == one.lse.get(0, h, 0);
            for (std::int64_t c = 0; c < prefill.head_dim; ++c)
                same = same && whole.o.get(0, row, h, c) == one.o.get(0, 0, h, c);
            require(same, kernel, prefill);
        }
    });
}

/// Strides change no bit of a result.
RC_GTEST_PROP(Properties, layout_changes_nothing, ()) {
    Problem p = draw_problem(draw_dtype());
    p.batch = 1;
    const Attention packed(p);
    Attention strided = packed;
    // [len, heads, dim] to [heads, len, dim] with gaps of NaN between rows, seen through strides
    std::vector<std::vector<std::byte>> memory;
    for (auto sequence : {&Attention::q, &Attention::k, &Attention::v}) {
        TensorView& view = (strided.*sequence).view;
        const std::int64_t len = view.shape[1];
        const std::int64_t row = view.shape[3] + 3;
        memory.emplace_back(static_cast<std::size_t>(view.shape[2] * len * row * size_of(view.dtype)), std::byte{0xFF});
        const TensorView old = view;
        view.data = memory.back().data();
        view.strides = {view.shape[2] * len * row, row, len * row, 1};
        for_each_element(old, [&](std::int64_t flat, const std::byte* element) {
            const std::int64_t c = flat % view.shape[3];
            const std::int64_t h = flat / view.shape[3] % view.shape[2];
            const std::int64_t i = flat / view.shape[3] / view.shape[2];
            std::memcpy(static_cast<std::byte*>(view.data) +
                            (i * view.strides[1] + h * view.strides[2] + c) * size_of(view.dtype),
                        element, static_cast<std::size_t>(size_of(view.dtype)));
        });
    }
    Attention plain = packed;
    plain.prepare_backward();
    strided.prepare_backward();
    for (const KernelInfo& kernel : kernels()) {
        if (!run(plain, kernel) || !run(strided, kernel)) continue;
        require(same_outputs(plain, strided, kernel.pass), kernel, p);
    }
}

/// Tiles are so small that the squares of the fa2 backward's rounds have several of them.
TEST(Properties, squares_of_many_tiles_change_nothing) {
    const Mask masks[] = {{}, {.causal = Causal::bottom_right}, {.window_left = 200, .window_right = 100}};
    for (const auto& [len_q, len_kv] : {std::pair{1100, 1100}, std::pair{1100, 730}, std::pair{650, 1333}}) {
        for (const Mask& mask : masks) {
            Problem p = make_problem(1, len_q, len_kv, 2, 1, 8);
            p.mask = mask;
            Attention setup(p);
            setup.prepare_backward();
            for (const KernelInfo& kernel : kernels()) {
                if (kernel.pass != Pass::backward || kernel.backend != Backend::cpu) continue;
                Attention alone = setup;
                ASSERT_TRUE(run(alone, kernel, {.threads = 1, .tile = Tile{16, 16}}));
                for (const int threads : {2, 3, 8}) {
                    Attention together = setup;
                    ASSERT_TRUE(run(together, kernel, {.threads = threads, .tile = Tile{16, 16}}));
                    EXPECT_TRUE(same_outputs(alone, together, kernel.pass))
                        << kernel.name << " " << p.describe() << " on " << threads << " threads";
                }
            }
        }
    }
}

TEST(Properties, run_to_run) {
    Problem p = make_problem(2, 200, 1700, 4, 2, 40);
    p.mask.causal = Causal::bottom_right;
    Attention first(p);
    first.prepare_backward();
    for (const KernelInfo& kernel : kernels()) {
        if (!run(first, kernel, {.threads = 4})) continue;
        Attention again = first;
        ASSERT_TRUE(run(again, kernel, {.threads = 4}));
        EXPECT_TRUE(same_outputs(first, again, kernel.pass)) << kernel.name;
        first.prepare_backward();
    }
}

}  // namespace
}  // namespace tessera::check::properties_test
