// SPDX-License-Identifier: Apache-2.0
//
// The place of the elements in memory changes no bit of a result: any order of dimensions, backwards, with gaps,
// expanded.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "printed.hpp"
#include "reference/features.hpp"

namespace tessera::test::strides_test {
namespace {

constexpr Tensor Case::*kInputs[] = {
    &Case::q, &Case::k, &Case::v, &Case::bias, &Case::d_o, &Case::dlse, &Case::alibi_slopes, &Case::sinks};
constexpr Tensor Case::*kOutputs[] = {&Case::o,  &Case::lse,   &Case::dq,    &Case::dk,
                                      &Case::dv, &Case::dbias, &Case::dsinks};

Feature all_features(DType dtype, bool ragged) {
    Feature f = ragged ? ragged_features().back() : Feature{"everything", small_problem(), {}};
    use_everything(f.problem);
    f.problem.dtype = dtype;
    return f;
}

Layout random_layout(int rank, std::mt19937_64& random) {
    Layout layout{std::vector<int>(static_cast<std::size_t>(rank)), {}, static_cast<int>(random() % 3)};
    std::iota(layout.order.begin(), layout.order.end(), 0);
    std::shuffle(layout.order.begin(), layout.order.end(), random);
    for (int d = 0; d < rank; ++d) layout.reversed.push_back(random() % 2 == 0);
    return layout;
}

/// The memory of a tensor with its elements taken out: what lies between them.
std::vector<std::byte> between(Tensor tensor) {
    for_each_index(tensor, [&](const Index& i) { tensor.set(0, i); });
    return tensor.bytes();
}

class Strides : public ::testing::TestWithParam<std::tuple<DType, bool>> {};

TEST_P(Strides, every_tensor_has_its_own_bug_34) {
    const Feature f = all_features(std::get<0>(GetParam()), std::get<1>(GetParam()));
    Case packed(f.problem, f.options);
    packed.run_forward(), packed.run_backward();
    std::mt19937_64 random(3);
    for (int round = 0; round < 40; ++round) {
        Case c = packed;
        for (Tensor Case::*t : kInputs) c.*t = laid_out(packed.*t, random_layout((packed.*t).view().rank, random));
        for (Tensor Case::*t : kOutputs) c.*t = laid_out(packed.*t, random_layout((packed.*t).view().rank, random));
        std::vector<std::vector<std::byte>> before;
        for (Tensor Case::*t : kOutputs) before.push_back(between(c.*t));
        c.run_forward(), c.run_backward();
        for (std::size_t n = 0; n < std::size(kOutputs); ++n) {
            EXPECT_EQ(bits(c.*kOutputs[n]), bits(packed.*kOutputs[n])) << "output " << n << " round " << round;
            EXPECT_EQ(between(c.*kOutputs[n]), before[n]) << "output " << n << " written outside its elements";
        }
    }
}

INSTANTIATE_TEST_SUITE_P(
    Reference, Strides, ::testing::Combine(::testing::Values(DType::fp64, DType::fp32, DType::bf16), ::testing::Bool()),
    [](const auto& p) {
        return std::string(name_of(std::get<0>(p.param))) + (std::get<1>(p.param) ? "_ragged" : "_dense");
    });

TEST(StridesOf, batch_heads_len_dim_memory_through_transposed) {
    Case packed(small_problem());
    packed.run_forward(), packed.run_backward();
    Case c = packed;
    for (Tensor Case::*t : {&Case::q, &Case::k, &Case::v, &Case::o, &Case::d_o, &Case::dq, &Case::dk, &Case::dv}) {
        const TensorView& shape = (packed.*t).view();
        Tensor bhsd(shape.dtype, {shape.shape[0], shape.shape[2], shape.shape[1], shape.shape[3]});
        for_each_index(shape, [&](const Index& i) { bhsd.set((packed.*t).at(i), i[0], i[2], i[1], i[3]); });
        Tensor canonical(transposed(bhsd, 1, 2), static_cast<std::size_t>(bhsd.view().size()), 0);
        for_each_index(shape, [&](const Index& i) { canonical.set((packed.*t).at(i), i); });
        ASSERT_EQ(canonical.bytes(), bhsd.bytes());
        c.*t = canonical;
    }
    c.run_forward(), c.run_backward();
    for (Tensor Case::*t : kOutputs) EXPECT_EQ(bits(c.*t), bits(packed.*t));
}

TEST(StridesOf, inputs_may_be_expanded) {
    const Feature f = all_features(DType::fp32, false);
    for (Tensor Case::*t : kInputs) {
        const Case all(f.problem, f.options);
        for (std::size_t d = 0; d < static_cast<std::size_t>((all.*t).view().rank); ++d) {
            // Stride 0 along d against the same elements written out.
            Case written = all, read_again = all;
            for_each_index(all.*t, [&](const Index& i) {
                Index first = i;
                first[d] = 0;
                (written.*t).set((all.*t).at(first), i);
            });
            read_again.*t = expanded(all.*t, d);
            written.run_forward(), written.run_backward();
            read_again.run_forward(), read_again.run_backward();
            for (Tensor Case::*out : kOutputs)
                EXPECT_EQ(bits(read_again.*out), bits(written.*out)) << "dimension " << d;
        }
    }
}

TEST(StridesOf, cu_seqlens_of_any_stride) {
    const Feature f = ragged_features().front();
    Case packed(f.problem, f.options);
    packed.run_forward();
    std::vector<std::int64_t> backwards(packed.options.cu_q.rbegin(), packed.options.cu_q.rend());
    ForwardArgs args = packed.forward_args();
    args.cu_seqlens_q = strided_view(&backwards.back(), DType::int64, {f.problem.batch + 1}, {-1});
    Tensor o = packed.o;
    fill(o, kNan);
    args.o = o;
    const Plan how = plan(f.problem, {.kernel = "reference.forward", .threads = 1});
    forward(how, args, Workspace(how));
    EXPECT_EQ(bits(o), bits(packed.o));
}

TEST(StridesOf, packed_qkv_and_its_gradient) {
    Problem p = Problem::dense(2, 6, 2, 4);
    Case apart(p);
    apart.run_forward(), apart.run_backward();
    Case c = apart;
    Tensor qkv(DType::fp32, {2, 6, 6, 4}), dqkv(DType::fp32, {2, 6, 6, 4});
    const auto part = [](const Tensor& whole, std::int64_t n) {
        TensorView view = whole.view();
        view.data = view.at<float>(0, 0, 2 * n);
        view.shape[2] = 2;
        return view;
    };
    for_each_index(apart.q, [&](const Index& i) {
        qkv.set(apart.q.at(i), i);
        qkv.set(apart.k.at(i), i[0], i[1], i[2] + 2, i[3]);
        qkv.set(apart.v.at(i), i[0], i[1], i[2] + 4, i[3]);
    });
    BackwardArgs args = c.backward_args();
    args.q = part(qkv, 0), args.k = part(qkv, 1), args.v = part(qkv, 2);
    args.dq = part(dqkv, 0), args.dk = part(dqkv, 1), args.dv = part(dqkv, 2);
    const Plan how = plan(p, {.pass = Pass::backward, .kernel = "reference.backward", .threads = 1});
    backward(how, args, Workspace(how));
    for_each_index(apart.q, [&](const Index& i) {
        ASSERT_EQ(dqkv.at(i), apart.dq.at(i));
        ASSERT_EQ(dqkv.at(i[0], i[1], i[2] + 2, i[3]), apart.dk.at(i));
        ASSERT_EQ(dqkv.at(i[0], i[1], i[2] + 4, i[3]), apart.dv.at(i));
    });
}

}  // namespace
}  // namespace tessera::test::strides_test
