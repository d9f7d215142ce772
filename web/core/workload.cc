// SPDX-License-Identifier: Apache-2.0
#include "workload.hpp"

#include "options.hpp"
#include "schedule/grid.hpp"
#include "tessera/error.hpp"

namespace tessera::web {

schedule::Workload workload_of(const Json& q, Schedule schedule, Pass pass) {
    const auto size = [&](const char* name) { return q.at(name).get<std::int64_t>(); };
    schedule::Workload w{.problem = Problem::dense(1, size("len_kv"), 1, size("head_dim")), .schedule = schedule};
    w.pass = pass;
    w.problem.len_q = size("len_q");
    w.problem.dtype = cli::parse_dtype(q.value("dtype", "bf16"));
    cli::ScoreOptions scores;
    scores.causal = q.value("causal", "none");
    scores.window = q.value("window", "");
    scores.apply(w.problem);
    w.tile = {size("block_q"), size("block_kv")};
    constexpr std::int64_t kMost = std::int64_t{1} << 20;
    for (const char* name : {"len_q", "len_kv", "block_q", "block_kv", "head_dim"}) {
        if (size(name) < 1 || size(name) > kMost)
            throw Error(ErrorCode::invalid_argument, name, "expected 1..1048576, got " + std::to_string(size(name)));
    }
    w.problem.validate();
    return w;
}

void expect_playable(const schedule::Workload& w) {
    constexpr std::int64_t kMostTiles = 32 * 32;
    const schedule::Grid grid{w.problem.mask.bind(w.problem.len_q, w.problem.len_kv), w.tile};
    if (grid.rows() * grid.columns() > kMostTiles)
        throw Error(ErrorCode::invalid_argument, "len",
                    "expected at most 1024 tiles to play: larger tiles or a shorter length");
}

const model::Machine& machine_of(const Json& question) {
    const std::string name = question.value("device", "h200");
    if (const model::Machine* machine = model::find_machine(name)) return *machine;
    throw Error(ErrorCode::invalid_argument, "device", "expected a machine that is known by name, got " + name);
}

Json json_of(const schedule::Work& work) {
    return {{"dram", work.bytes.dram},
            {"l2", work.bytes.l2},
            {"shared", work.bytes.shared},
            {"flop", work.flop},
            {"exps", work.exps}};
}

const char* name_of(Coverage coverage) {
    return coverage == Coverage::empty ? "skipped" : coverage == Coverage::partial ? "partial" : "full";
}

}  // namespace tessera::web
