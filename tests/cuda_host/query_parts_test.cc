// SPDX-License-Identifier: Apache-2.0
//
// The parts in which the backward on CUDA goes through the queries of a long sequence.
#include "cuda/host/query_parts.hpp"

#include <gtest/gtest.h>

#include <string>

namespace tessera::check::query_parts_test {
namespace {

using cuda::QueryParts;

TEST(QueryParts, cover_a_sequence_in_order_and_keep_to_the_most_terms) {
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
        const int most = QueryParts::max_terms(dtype);
        for (const int heads : {0, 1, 3, 8, 100, 200'000}) {
            for (const int len_q : {0, 1, 700, 1024, 1025, 32'768, 32'769, 65'536, 65'537, 1'000'003}) {
                SCOPED_TRACE(std::to_string(heads) + " heads of " + std::to_string(len_q));
                const QueryParts parts(len_q, QueryParts::fitting(heads, most));
                EXPECT_EQ(parts.is_one(), parts.count() == 1);
                EXPECT_EQ(parts.begin(0), 0);
                EXPECT_EQ(parts.begin(parts.count()), len_q);
                EXPECT_EQ(parts.begin(parts.count() + 3), len_q);
                for (int part = 0; part < parts.count(); ++part) {
                    const int queries = parts.begin(part + 1) - parts.begin(part);
                    EXPECT_EQ(parts.begin(part) % QueryParts::kMultiple, 0);
                    EXPECT_TRUE(queries > 0 || len_q == 0);
                    const bool fits = std::int64_t{queries} * heads <= most;
                    EXPECT_TRUE(fits || queries <= QueryParts::kMultiple) << "the shortest part has 1,024 queries";
                }
            }
        }
    }
}

}  // namespace
}  // namespace tessera::check::query_parts_test
