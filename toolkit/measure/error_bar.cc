// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "measure/accuracy.hpp"

namespace tessera::measure {

std::string error_bar_text(const Problem& problem, const model::Prediction& prediction, const model::Machine& machine) {
    const Pass pass = prediction.pass;
    if (prediction.measured)
        return "error of blind predictions on calibrated hosts: 6 % in the median on two cores (86 % of the rows "
               "within 15 %), 8 % on sixteen shared cores (79 %; 10 to 12 % after the half minute of tessera "
               "calibrate, while a single run is 3 to 12 % off its own median), 78 % at worst";
    if (machine.kind == model::MachineKind::cpu) {
        if (machine.name == "xeon-16" && measured_kernels(machine).empty())
            return "error on its Records that no constant was fitted to: 20 % in the median, 69 % at worst";
        return fmt::format(
            "{} not measured (tessera calibrate measures them): the median error on three hosts without measured "
            "kernels was 13, 18 and 58 %, 159 % at worst",
            measured_kernels(machine).empty() ? "its kernels were" : "such kernels were");
    }
    if (model::on_cache_by_fa3(problem, prediction))
        return fmt::format("+-{:.0f} %, for calls on a cache by fa3, of which there are no held-out rows",
                           100 * prediction.error);
    const auto [kind, is_short] = model::bar_cell_of(problem, prediction);
    const std::string of = fmt::format("such calls ({}, {}{})", kind == "few queries" ? "2 to 16 queries" : kind,
                                       name_of(pass), is_short ? ", short" : "");
    const double percent = 100 * prediction.error;
    switch (model::rows_of(machine)) {
        case model::Rows::many:
            return fmt::format("+-{:.0f} %, which nine of ten held-out rows of {} on an H200 stay within", percent, of);
        case model::Rows::some:
            return fmt::format("+-{:.0f} %, an H200's for {} and a quarter more, as rows of {} confirm", percent, of,
                               machine.name);
        case model::Rows::published:
            if (!model::in_tables(kind)) break;
            return fmt::format("+-{:.0f} %, for {}, by published tables of {} or of its chip", percent, of,
                               machine.name);
        case model::Rows::none: break;
    }
    if (!model::in_tables(kind))
        return fmt::format(
            "+-{:.0f} %, for {}: a bar of all cards but an H200 and an H100, as published tables have few of them",
            percent, of);
    return fmt::format("+-{:.0f} %, for {}, by published tables of other cards: no Records of {} itself exist", percent,
                       of, machine.name);
}

}  // namespace tessera::measure
