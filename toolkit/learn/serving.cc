// SPDX-License-Identifier: Apache-2.0
#include "learn/serving.hpp"

#include <cmath>

#include "model/machine.hpp"
#include "tessera/error.hpp"

namespace tessera::learn {

walk::HandRow row_over(const std::vector<std::int64_t>& scores, const std::vector<std::int64_t>& values) {
    walk::HandExample example{.q = {{1, 0}}, .k = {}, .v = {}, .d_o = {{1, 0}}, .tile = {1, 2}};
    for (const std::int64_t score : scores) example.k.push_back({score, 0});
    for (const std::int64_t value : values) example.v.push_back({value, 0});
    return walk::work_by_hand(example, Schedule::fa2, {}).rows[0];
}

double nearest_e4m3(double x) {
    const double spacing = std::exp2(std::floor(std::log2(x)) - 3);  // 3 bits after the point
    return std::nearbyint(x / spacing) * spacing;                    // the default mode rounds ties to even
}

TileClocks tile_clocks(const char* machine, int head_dim) {
    constexpr double kQueries = 128, kKeys = 128;
    const model::Machine* m = model::find_machine(machine);
    if (m == nullptr) throw Error(ErrorCode::invalid_argument, "machine", "expected a machine of the model");
    return {.gemms = kQueries * kKeys * 4 * head_dim / m->matrix_flop, .exponentials = kQueries * kKeys / m->exp_rate};
}

}  // namespace tessera::learn
