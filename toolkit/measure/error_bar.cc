// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "measure/accuracy.hpp"

namespace tessera::measure {

bool is_short(const model::Prediction& prediction) {
    constexpr double kFlop = 2e10;
    return static_cast<double>(prediction.cost.work.flop) <= kFlop;
}

double expected_error(const std::string& kind, Pass pass, bool is_short) {
    struct Bar {
        const char* kind;
        double forward, backward;  // decoding has no measured backward and takes the forward's value
        double short_forward, short_backward;
    };
    constexpr Bar kBars[] = {{"decode", 0.11, 0.11, 0.11, 0.11},        {"window", 0.20, 0.10, 0.14, 0.12},
                             {"cross lengths", 0.12, 0.24, 0.17, 0.25}, {"few heads", 0.12, 0.06, 0.32, 0.14},
                             {"head_dim", 0.13, 0.11, 0.18, 0.10},      {"grouped heads", 0.14, 0.10, 0.20, 0.13},
                             {"prefill", 0.12, 0.08, 0.23, 0.07},       {"ragged", 0.10, 0.05, 0.27, 0.12}};
    for (const Bar& bar : kBars) {
        if (kind != bar.kind) continue;
        if (pass == Pass::forward) return is_short ? bar.short_forward : bar.forward;
        return is_short ? bar.short_backward : bar.backward;
    }
    return 1;
}

double expected_error_of_standard_and_fa1(Schedule schedule, Pass pass, bool is_short) {
    const bool forward = pass == Pass::forward;
    if (schedule == Schedule::standard) return is_short ? (forward ? 0.31 : 0.23) : (forward ? 0.19 : 0.16);
    return is_short ? (forward ? 0.15 : 0.13) : (forward ? 0.13 : 0.12);
}

/// The Records that the constants of cuda.decode.forward were fitted to end so.
static constexpr std::string_view kOfDecode = "decode_fitted.jsonl";

std::string error_bar_text(const Problem& problem, const model::Prediction& prediction, const model::Machine& machine) {
    const std::string kind = kind_of(problem);
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
    const Schedule schedule = prediction.schedule;
    const bool decode = prediction.fitted_on.ends_with(kOfDecode);
    const bool standard_or_fa1 = schedule == Schedule::standard || schedule == Schedule::fa1;
    const bool small = is_short(prediction) && kind != "decode";
    const char* size = small ? ", short calls" : "";
    const std::string bar =
        decode ? "+-20 %, which nine of ten held-out rows of cuda.decode.forward on an H200 stay within"
        : standard_or_fa1
            ? fmt::format("+-{:.0f} %, which nine of ten held-out rows of {} ({}{}) on an H200 stay within",
                          100 * expected_error_of_standard_and_fa1(schedule, pass, small), name_of(schedule),
                          name_of(pass), size)
            : fmt::format(
                  "+-{:.0f} %, which nine of ten held-out rows of fa2 and fa3 of this kind ({}, {}{}) on an H200 "
                  "stay within",
                  100 * expected_error(kind, pass, small), kind, name_of(pass), size);
    constexpr const char* kMeasured[] = {"h200", "h100", "b200", "rtxa5000"};
    const bool measured = std::find(std::begin(kMeasured), std::end(kMeasured), machine.name) != std::end(kMeasured);
    const bool has_tcgen05 = machine.capability >= 10 && machine.capability < 12;
    return bar + (measured ? "" : fmt::format("; no Records of {} itself exist", machine.name)) +
           (has_tcgen05 ? "; kernels made for it (tcgen05) are not in the model" : "");
}

}  // namespace tessera::measure
