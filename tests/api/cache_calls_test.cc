// SPDX-License-Identifier: Apache-2.0
//
// Calls on a cache of keys: which are refused, by what name, and that everything else is taken.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

#include "core/tensors.hpp"
#include "tessera/error.hpp"
#include "tessera/tessera.hpp"

namespace tessera::cache_calls_test {
namespace {

using test::Tensor;

/// Two sequences of 3 and 5 keys in pages of 4, of which K and V are the same memory.
struct Cached {
    Problem problem{.batch = 2, .len_q = 1, .len_kv = 8, .heads_q = 2, .heads_kv = 1, .head_dim = 8, .head_dim_v = 8};
    Tensor q{DType::fp32, {2, 1, 2, 8}}, o{DType::fp32, {2, 1, 2, 8}}, lse{DType::fp32, {2, 2, 1}};
    Tensor kv{DType::fp32, {3, 4, 1, 8}}, lengths{DType::int32, {2}}, table{DType::int32, {2, 2}};

    Cached() {
        problem.kv_lengths = true;
        problem.page_size = 4;
        set(lengths, {3, 5});
        set(table, {2, -1, 0, 1});
    }
    static void set(Tensor& t, const std::vector<std::int32_t>& values) {
        std::copy(values.begin(), values.end(), static_cast<std::int32_t*>(t.view().data));
    }
    ForwardArgs args() const {
        return {.q = q, .k = kv, .v = kv, .o = o, .lse = lse, .kv_lengths = lengths, .page_table = table};
    }
};

/// The argument that the error names; "" when the call runs.
std::string refused(const Cached& c, const ForwardArgs& args) {
    try {
        const Plan how = plan(c.problem, {.threads = 1});
        forward(how, args, Workspace(how));
    } catch (const Error& e) {
        EXPECT_EQ(e.code(), ErrorCode::invalid_argument) << e.what();
        return e.argument();
    }
    return "";
}

TEST(CacheCalls, k_and_v_may_be_one_memory) { EXPECT_EQ(refused(Cached(), Cached().args()), ""); }

TEST(CacheCalls, entries_behind_a_length_are_not_looked_at) {
    for (const std::int32_t junk : {-1, 3, std::numeric_limits<std::int32_t>::max()}) {
        Cached c;
        Cached::set(c.table, {2, junk, 0, 1});
        EXPECT_EQ(refused(c, c.args()), "");
        Cached::set(c.lengths, {-1, 0});
        Cached::set(c.table, {junk, junk, junk, junk});
        EXPECT_EQ(refused(c, c.args()), "");
        for (const double x : test::values(c.o)) EXPECT_EQ(x, 0);
        for (const double x : test::values(c.lse)) EXPECT_EQ(x, -test::kInfinity);
    }
}

TEST(CacheCalls, an_entry_that_names_no_page_is_named) {
    Cached c;
    Cached::set(c.table, {2, -1, 0, 3});
    EXPECT_EQ(refused(c, c.args()), "page_table");
    c.problem.mask.window_right = 0;
    c.problem.mask.window_left = 0;  // sees the last key alone, in the second page
    Cached::set(c.table, {2, -1, -7, 1});
    EXPECT_EQ(refused(c, c.args()), "");
}

TEST(CacheCalls, each_tensor_wrong_in_turn_is_named) {
    const Cached c;
    const Tensor int64s(DType::int64, {2}), three(DType::int32, {3}), narrow(DType::int32, {2, 1});
    const Tensor other_pages(DType::fp32, {2, 4, 1, 8}), longer(DType::fp32, {3, 5, 1, 8});
    const struct {
        const char* argument;
        std::function<void(ForwardArgs&)> spoil;
    } rows[] = {
        {"kv_lengths", [](ForwardArgs& a) { a.kv_lengths = {}; }},
        {"kv_lengths", [&](ForwardArgs& a) { a.kv_lengths = int64s; }},
        {"kv_lengths", [&](ForwardArgs& a) { a.kv_lengths = three; }},
        {"page_table", [](ForwardArgs& a) { a.page_table = {}; }},
        {"page_table", [&](ForwardArgs& a) { a.page_table = narrow; }},
        {"left_padding", [&](ForwardArgs& a) { a.left_padding = c.lengths; }},
        {"cache_batch_index", [&](ForwardArgs& a) { a.cache_batch_index = c.lengths; }},
        {"v", [&](ForwardArgs& a) { a.v = other_pages; }},
        {"k", [&](ForwardArgs& a) { a.k = longer; }},
        {"o", [&](ForwardArgs& a) { a.o.data = a.k.data; }},
    };
    for (const auto& row : rows) {
        ForwardArgs args = c.args();
        row.spoil(args);
        EXPECT_EQ(refused(c, args), row.argument);
    }
}

TEST(CacheCalls, a_slot_that_does_not_exist_is_named) {
    Cached c;
    c.problem.page_size = 0;
    c.problem.len_kv = 4;
    c.problem.cache_batch_index = true;
    ForwardArgs args = c.args();
    args.page_table = {};
    Tensor slots(DType::int32, {2});
    args.cache_batch_index = slots;
    for (const std::int32_t slot : {0, 2, 3, -1}) {
        Cached::set(slots, {1, slot});
        EXPECT_EQ(refused(c, args), slot == 0 || slot == 2 ? "" : "cache_batch_index");
    }
}

TEST(CacheCalls, there_is_no_backward) {
    const Cached c;
    try {
        plan(c.problem, {.pass = Pass::backward});
        ADD_FAILURE() << "expected an error";
    } catch (const Error& e) {
        EXPECT_EQ(e.code(), ErrorCode::unsupported);
        EXPECT_NE(std::string(e.what()).find("a cache of keys has no gradient"), std::string::npos) << e.what();
    }
}

}  // namespace
}  // namespace tessera::cache_calls_test
