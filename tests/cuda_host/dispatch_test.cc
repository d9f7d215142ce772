// SPDX-License-Identifier: Apache-2.0
//
// The compiled shape that runs a Problem, by the lists of src/cuda/*/host, which are plain C++ and in every build.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "cuda/fa1/host/dispatch.hpp"
#include "cuda/fa2/host/dispatch.hpp"
#include "cuda/fa3/host/backward_dispatch.hpp"
#include "cuda/fa3/host/forward_dispatch.hpp"
#include "registry.hpp"

namespace tessera::dispatch_test {
namespace {

Problem of_dims(std::int64_t head_dim, std::int64_t head_dim_v, std::int64_t len = 1536) {
    Problem p = Problem::dense(1, len, 2, head_dim, DType::bf16);
    p.head_dim_v = head_dim_v;
    return p;
}
/// A Problem with so many heads that makespan() does not decide its shape.
Problem many(Problem p) {
    p.batch = 100;
    return p;
}
Problem causal(Problem p) {
    p.mask.causal = Causal::bottom_right;
    return p;
}
/// A Problem whose query heads all share one kv head.
Problem grouped(Problem p) {
    p.heads_kv = 1;
    return p;
}
Problem capped(Problem p) {
    p.softcap = 30;
    return p;
}
Problem dropped(Problem p) {
    p.dropout.probability = 0.1;
    return p;
}
Problem with_alibi(Problem p) {
    p.alibi = true;
    return p;
}
Problem biased(Problem p) {
    p.bias = true;
    return p;
}
/// A Problem whose keys are in a cache: in slots, or in pages of so many keys.
Problem cached(Problem p, std::int64_t page) {
    p.kv_lengths = true;
    p.page_size = page;
    return p;
}
Problem scaled(Problem p, double scale) {
    p.scale = scale;
    return p;
}

std::string fa3_shape(const Problem& p) {
    const auto place = cuda::fa3::shape_of(p);
    return place ? cuda::fa3::Shapes::names()[*place] : "none";
}

TEST(Dispatch, fa3) {
    EXPECT_EQ(fa3_shape(many(of_dims(64, 64))), "HeadDim64");
    EXPECT_EQ(fa3_shape(many(of_dims(40, 64, 512))), "HeadDim64Short");
    EXPECT_EQ(fa3_shape(many(of_dims(40, 64, 576))), "HeadDim64") << "even tiles are short up to fewer keys";
    EXPECT_EQ(fa3_shape(causal(many(of_dims(64, 64, 1024)))), "HeadDim64Short");
    EXPECT_EQ(fa3_shape(causal(many(of_dims(64, 64, 1025)))), "HeadDim64");
    EXPECT_EQ(fa3_shape(of_dims(65, 64)), "HeadDim96");
    EXPECT_EQ(fa3_shape(of_dims(64, 128)), "HeadDim128");
    EXPECT_EQ(fa3_shape(of_dims(192, 128)), "HeadDim192V128");
    EXPECT_EQ(fa3_shape(of_dims(192, 136)), "HeadDim192");
    EXPECT_EQ(fa3_shape(of_dims(128, 192)), "HeadDim192");
    EXPECT_EQ(fa3_shape(of_dims(200, 64)), "HeadDim256");
    EXPECT_EQ(fa3_shape(causal(of_dims(200, 64))), "HeadDim256Masked");
    EXPECT_EQ(fa3_shape(capped(of_dims(64, 64))), "HeadDim64Capped");
    EXPECT_EQ(fa3_shape(capped(of_dims(72, 64))), "HeadDim128Capped");
    EXPECT_EQ(fa3_shape(capped(of_dims(192, 64))), "none");
    EXPECT_EQ(fa3_shape(capped(dropped(of_dims(64, 64)))), "HeadDim64General");
    EXPECT_EQ(fa3_shape(with_alibi(of_dims(64, 64))), "HeadDim64Alibi");
    EXPECT_EQ(fa3_shape(with_alibi(scaled(of_dims(128, 64), -1))), "HeadDim128Alibi") << "it scales before it adds";
    EXPECT_EQ(fa3_shape(with_alibi(capped(of_dims(64, 64)))), "HeadDim64General");
    EXPECT_EQ(fa3_shape(with_alibi(of_dims(192, 64))), "none");
    EXPECT_EQ(fa3_shape(biased(of_dims(32, 64))), "HeadDim64Bias");
    EXPECT_EQ(fa3_shape(biased(scaled(of_dims(72, 64), -1))), "HeadDim128Bias") << "it scales before it adds";
    EXPECT_EQ(fa3_shape(biased(dropped(of_dims(64, 64)))), "HeadDim64General");
    EXPECT_EQ(fa3_shape(biased(of_dims(192, 64))), "none");
    EXPECT_EQ(fa3_shape(dropped(of_dims(64, 64))), "HeadDim64Dropout");
    EXPECT_EQ(fa3_shape(dropped(of_dims(128, 64))), "HeadDim128Dropout");
    EXPECT_EQ(fa3_shape(dropped(scaled(of_dims(128, 64), -1))), "HeadDim128General");
    EXPECT_EQ(fa3_shape(dropped(with_alibi(of_dims(64, 64)))), "HeadDim64General");
    EXPECT_EQ(fa3_shape(scaled(of_dims(128, 64), -1)), "HeadDim128General");
    EXPECT_EQ(fa3_shape(scaled(of_dims(128, 64), 1e-40)), "HeadDim128General") << "subnormal in fp32";
    EXPECT_EQ(fa3_shape(dropped(of_dims(256, 64))), "none");
}

/// Keys in a cache have shapes of their own, whatever their number; TMA loads boxes that divide a page and a block.
TEST(Dispatch, fa3_of_a_cache) {
    EXPECT_EQ(fa3_shape(cached(many(of_dims(64, 64)), 0)), "HeadDim64Cached");
    EXPECT_EQ(fa3_shape(cached(causal(of_dims(40, 64, 512)), 16)), "HeadDim64Cached");
    EXPECT_EQ(fa3_shape(cached(of_dims(96, 64), 16)), "HeadDim128Cached");
    EXPECT_EQ(fa3_shape(cached(causal(of_dims(192, 128)), 16)), "HeadDim256Cached");
    EXPECT_EQ(fa3_shape(cached(of_dims(256, 256), 16)), "HeadDim256Cached");
    EXPECT_EQ(fa3_shape(cached(capped(of_dims(64, 64)), 16)), "none");
    for (const auto& [dim, page, rows] : {std::tuple{64, 16, 16},
                                          {64, 64, 64},
                                          {64, 128, 128},
                                          {64, 256, 128},
                                          {128, 24, 8},
                                          {128, 784, 16},
                                          {128, 1056, 32},
                                          {256, 256, 64}}) {
        const Problem p = cached(of_dims(dim, dim), page);
        EXPECT_EQ(cuda::fa3::page_rows(p, cuda::fa3::config_of(p)), rows) << dim << ", pages of " << page;
    }
}

/// Long rows of few heads have the tiles that fill the GPU better.
TEST(Dispatch, fa3_by_the_queue) {
    const auto rows = [](std::int64_t batch, std::int64_t heads, std::int64_t len) {
        return Problem::dense(batch, len, heads, 64, DType::bf16);
    };
    Problem with_sinks = causal(rows(8, 12, 8192));
    EXPECT_EQ(fa3_shape(with_sinks), "HeadDim64");
    with_sinks.sinks = true;
    EXPECT_EQ(fa3_shape(with_sinks), "HeadDim64Short");
    EXPECT_EQ(fa3_shape(causal(rows(1, 1, 32768))), "HeadDim64Short");
    EXPECT_EQ(fa3_shape(causal(rows(1, 3, 8192))), "HeadDim64Short");
    EXPECT_EQ(fa3_shape(causal(rows(3, 1, 8192))), "HeadDim64Short") << "sequences are heads, too";
    EXPECT_EQ(fa3_shape(causal(rows(1, 32, 16384))), "HeadDim64");
    EXPECT_EQ(fa3_shape(rows(1, 1, 16384)), "HeadDim64Short");
    EXPECT_EQ(fa3_shape(rows(1, 3, 8192)), "HeadDim64") << "129 tiles of 192 are one round, 192 of 128 are two";
    EXPECT_EQ(fa3_shape(rows(1, 4, 8192)), "HeadDim64Short") << "two rounds either way";
    EXPECT_EQ(fa3_shape(rows(32, 32, 300)), "HeadDim64") << "two tiles, not three";
    EXPECT_EQ(fa3_shape(rows(1, 12, 300)), "HeadDim64Short") << "one round either way";
    EXPECT_EQ(fa3_shape(rows(64, 12, 197)), "HeadDim64Short") << "two tiles either way";
    EXPECT_EQ(fa3_shape(causal(rows(64, 12, 192))), "HeadDim64") << "one tile, not two";
    EXPECT_EQ(fa3_shape(causal(rows(64, 12, 512))), "HeadDim64Short") << "three tiles cost as much as four";
    EXPECT_EQ(fa3_shape(capped(causal(rows(1, 1, 16384)))), "HeadDim64Capped");
    Problem ragged = causal(rows(1, 1, 32768));
    ragged.ragged = true;
    ragged.total_q = ragged.total_kv = 32768;
    EXPECT_EQ(fa3_shape(ragged), "HeadDim64") << "lengths are not known";
}

/// Few rows of a sequence, with the heads that PackGQA puts into a tile, have small tiles.
TEST(Dispatch, fa3_of_short_sequences) {
    const auto documents = [](std::int64_t count, std::int64_t mean, std::int64_t heads_kv, std::int64_t dim) {
        Problem p = causal(Problem::dense(count, 4096, 16, dim, DType::bf16));
        p.heads_kv = heads_kv;
        p.ragged = true;
        p.total_q = p.total_kv = count * mean;
        return p;
    };
    EXPECT_EQ(fa3_shape(documents(512, 64, 16, 64)), "HeadDim64Small");
    EXPECT_EQ(fa3_shape(documents(512, 320, 16, 64)), "HeadDim64Small");
    EXPECT_EQ(fa3_shape(documents(512, 321, 16, 64)), "HeadDim64Short");
    EXPECT_EQ(fa3_shape(documents(512, 80, 4, 64)), "HeadDim64Small");
    EXPECT_EQ(fa3_shape(documents(512, 81, 4, 64)), "HeadDim64Short") << "four heads are rows of a tile";
    EXPECT_EQ(fa3_shape(documents(512, 160, 16, 128)), "HeadDim128Small");
    EXPECT_EQ(fa3_shape(documents(512, 161, 16, 128)), "HeadDim128");
    EXPECT_EQ(fa3_shape(documents(512, 64, 4, 128)), "HeadDim128");
    EXPECT_EQ(fa3_shape(documents(512, 64, 16, 96)), "HeadDim96");
    EXPECT_EQ(fa3_shape(capped(documents(512, 64, 16, 64))), "HeadDim64Capped");
    const auto rows = [](std::int64_t len_q, std::int64_t len_kv) {
        Problem p = Problem::dense(64, len_q, 16, 64, DType::bf16);
        p.len_kv = len_kv;
        return p;
    };
    EXPECT_EQ(fa3_shape(rows(64, 128)), "HeadDim64Small");
    EXPECT_EQ(fa3_shape(rows(65, 65)), "HeadDim64Short");
    EXPECT_EQ(fa3_shape(rows(64, 129)), "HeadDim64Short");
}

TEST(Dispatch, fa3_backward) {
    const auto shape = [](const Problem& p) {
        const auto place = cuda::fa3::backward::shape_of(p);
        return place ? cuda::fa3::backward::Shapes::names()[*place] : "none";
    };
    EXPECT_EQ(shape(of_dims(64, 8)), "HeadDim64");
    EXPECT_EQ(shape(of_dims(64, 72)), "HeadDim128");
    EXPECT_EQ(shape(of_dims(136, 128)), "HeadDim192V128");
    EXPECT_EQ(shape(of_dims(128, 136)), "HeadDim192");
    EXPECT_EQ(shape(of_dims(200, 64)), "HeadDim256");
    EXPECT_EQ(shape(capped(of_dims(64, 64))), "HeadDim64Capped");
    EXPECT_EQ(shape(capped(of_dims(72, 64))), "HeadDim128Capped");
    EXPECT_EQ(shape(with_alibi(of_dims(64, 64))), "HeadDim64Alibi");
    EXPECT_EQ(shape(with_alibi(scaled(of_dims(64, 64), -1))), "HeadDim64General") << "it scales in the exponential";
    EXPECT_EQ(shape(dropped(of_dims(128, 64))), "HeadDim128Dropout");
    EXPECT_EQ(shape(dropped(with_alibi(of_dims(128, 64)))), "HeadDim128General");
    EXPECT_EQ(shape(biased(scaled(of_dims(64, 64), 0))), "HeadDim64Bias");
    EXPECT_EQ(shape(biased(of_dims(128, 64))), "HeadDim128Bias");
    EXPECT_EQ(shape(biased(with_alibi(of_dims(128, 64)))), "HeadDim128General");
    EXPECT_EQ(shape(scaled(of_dims(64, 64), -1)), "HeadDim64General");
    Problem large = capped(of_dims(64, 64));
    large.softcap = 1000;
    EXPECT_EQ(shape(large), "HeadDim64General") << "rows may have a large LSE";
    Problem sunk = capped(of_dims(64, 64));
    sunk.sinks = true;
    EXPECT_EQ(shape(sunk), "HeadDim64General") << "a sink may be large";
    EXPECT_EQ(shape(capped(of_dims(192, 64))), "none");
}

TEST(Dispatch, fa1_and_fa2) {
    const auto fa1 = [](const Problem& p) { return cuda::fa1::Shapes::names()[cuda::fa1::shape_of(p)]; };
    const auto fa2 = [](const Problem& p) { return cuda::fa2::Shapes::names()[cuda::fa2::shape_of(p)]; };
    EXPECT_EQ(fa1(of_dims(64, 8)), "HeadDim64");
    EXPECT_EQ(fa1(biased(of_dims(8, 65))), "HeadDim128General");
    EXPECT_EQ(fa1(scaled(of_dims(64, 64), -1)), "HeadDim64") << "it scales before it exponentiates";
    EXPECT_EQ(fa2(of_dims(129, 64)), "HeadDim256");
    EXPECT_EQ(fa2(capped(of_dims(256, 64))), "HeadDim256General");
    EXPECT_EQ(fa2(scaled(of_dims(64, 64), -1)), "HeadDim64General");
}

Problem decoding(Problem p) {
    p.len_q = 1;
    return p;
}

/// Has the kernel no shape for this? fa3 has none for some; every other kernel has one for each Problem.
bool has_no_shape(const Kernel& kernel, const Problem& p) {
    if (kernel.info.backend != Backend::cuda || kernel.info.schedule != Schedule::fa3) return false;
    return kernel.info.pass == Pass::forward ? !cuda::fa3::shape_of(p) : !cuda::fa3::backward::shape_of(p);
}

/// In builds with CUDA, all names differ, and each shape runs some Problem.
TEST(Dispatch, every_one_runs_something) {
    for (const Kernel& kernel : registry()) {
        std::set<std::string> met;
        for (const DType dtype : kernel.info.dtypes) {
            for (const std::int64_t dim : {64, 96, 128, 192, 256}) {
                for (const std::int64_t dim_v : {64, 128, 192, 256}) {
                    for (Problem p :
                         {of_dims(dim, dim_v), of_dims(dim, dim_v, 48), many(of_dims(dim, dim_v, 4096)),
                          causal(of_dims(dim, dim_v, 512)), grouped(causal(of_dims(dim, dim_v, 8192))),
                          capped(of_dims(dim, dim_v)), with_alibi(of_dims(dim, dim_v)), biased(of_dims(dim, dim_v)),
                          dropped(of_dims(dim, dim_v)), dropped(capped(of_dims(dim, dim_v))),
                          decoding(of_dims(dim, dim_v, 4096)), cached(of_dims(dim, dim_v), 16)}) {
                        p.dtype = dtype;
                        if (!has_no_shape(kernel, p)) met.insert(kernel.shape_name(p));
                    }
                }
            }
        }
        EXPECT_EQ(met, std::set(kernel.shapes.begin(), kernel.shapes.end())) << kernel.info.name;
        EXPECT_EQ(met.size(), kernel.shapes.size()) << kernel.info.name;
    }
}

}  // namespace
}  // namespace tessera::dispatch_test
