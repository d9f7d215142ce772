// SPDX-License-Identifier: Apache-2.0
//
// fa2 forward on a matrix unit for few queries per kv head. No key is used twice, so packing is most of the work. K and
// V are read in memory order, a slice of keys at a time, and used as soon as they are packed. O = P V has queries as
// rows, so V need not be transposed. The bits are those of forward.cc.
#include "cpu/fa2/matrix/decode.hpp"

#include "cpu/fa2/matrix/decode_task.hpp"

namespace tessera::cpu::fa2::matrix_path {
namespace {

void run_whole(const ForwardRun& run) {
    run_unsplit(run.call, run.work_split, run.workspace.ends, [&](std::int64_t kv_head, Range, int worker) {
        DecodeTask task(run, kv_head, 0, worker);
        const Range queries{0, task.work().panel.queries};
        matrix::Session session(run.primitives);
        task.pack_queries();
        simd::PanelSums total = task.total();
        for (std::int64_t block = 0; block < run.work_split.chunks_of(task.work().head.sequence); ++block) {
            simd::PanelSums next = task.of_block();
            if (task.run_block(block, next)) task.merge(total, next, queries);
        }
        task.finish(total, queries);
    });
}

/// Merges one query per task: one panel for each kv head would leave threads idle.
void run_split(const ForwardRun& run) {
    const auto run_block = [&](std::int64_t kv_head, Range, std::int64_t block, int worker) {
        DecodeTask task(run, kv_head, 0, worker);
        matrix::Session session(run.primitives);
        task.pack_queries();
        simd::PanelSums sums = run.partial(kv_head, 0, block);
        task.run_block(block, sums);
    };
    const auto merge = [&](std::int64_t kv_head, std::int64_t index, int worker) {
        const Range query{index, index + 1};
        DecodeTask task(run, kv_head, 0, worker);
        matrix::Session session(run.primitives);
        simd::PanelSums total = task.total();
        for (std::int64_t block = 0; block < run.work_split.chunks_of(task.work().head.sequence); ++block) {
            if (keys_seen(run, task.work(), block).keys.empty()) continue;
            task.merge(total, run.partial(kv_head, 0, block), query);
        }
        task.finish(total, query);
    };
    run_split_keys(
        run.call, run.work_split, run.workspace.ends, [](const Sequence& m) { return m.len_q; }, run_block, merge);
}

}  // namespace

void decode(const ForwardRun& run) {
    if (run.work_split.split) run_split(run);
    else run_whole(run);
}

}  // namespace tessera::cpu::fa2::matrix_path
