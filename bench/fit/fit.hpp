// SPDX-License-Identifier: Apache-2.0
//
// Fits constants of a model to Records. Coordinate descent with shrinking steps runs as long as the mean square of
// log(predicted / measured) falls. A constant that is 0 stays so: it is not in the table.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "measure/accuracy.hpp"
#include "measure/descent.hpp"

namespace tessera::fit {

/// A measured row and the machine to predict it on.
struct Row {
    measure::Comparison measured;
    Problem problem;
    model::Machine machine;
};

/// A constant by its name.
template <class Constants>
struct Named {
    const char* name;
    double Constants::*member;
};

/// log(predicted / measured) of a row with these constants.
template <class Constants>
using LogError = std::function<double(const Row&, const Constants&)>;

template <class Constants>
double loss(std::span<const Row* const> rows, const Constants& constants, const LogError<Constants>& log_error) {
    double sum = 0;
    for (const Row* row : rows) {
        const double error = log_error(*row, constants);
        sum += error * error;
    }
    return sum / static_cast<double>(rows.size());
}

/// The constants of least loss, found by steps of 20, 5, 1 and 0.2 percent.
template <class Constants>
Constants fitted(Constants constants, std::span<const Named<Constants>> names, std::span<const Row* const> rows,
                 const LogError<Constants>& log_error) {
    std::vector<double Constants::*> free;
    for (const Named<Constants>& constant : names) free.push_back(constant.member);
    return measure::descend<Constants>(constants, free,
                                       [&](const Constants& moved) { return loss(rows, moved, log_error); });
}

inline std::string errors_text(std::vector<double> errors) {
    if (errors.empty()) return "no rows";
    const auto good = std::count_if(errors.begin(), errors.end(), [](double error) { return error <= 0.15; });
    std::sort(errors.begin(), errors.end());
    return fmt::format("{:4} rows, median {:5.1f} %, worst {:5.1f} %, {:3.0f} % of them within 15 %", errors.size(),
                       100 * errors[errors.size() / 2], 100 * errors.back(),
                       100 * static_cast<double>(good) / static_cast<double>(errors.size()));
}

template <class Constants>
std::string errors_text(std::span<const Row* const> rows, const Constants& constants,
                        const LogError<Constants>& log_error) {
    std::vector<double> errors;
    for (const Row* row : rows) errors.push_back(std::abs(std::expm1(log_error(*row, constants))));
    return errors_text(std::move(errors));
}

/// Fits the rows that are not held out. Prints the constants and the errors of both sets, with the current and the new
/// constants.
template <class Constants>
void report(const std::string& title, const Constants& now, std::span<const Named<Constants>> names,
            const std::vector<const Row*>& all, const LogError<Constants>& log_error) {
    std::vector<const Row*> own;
    std::map<std::string, std::vector<const Row*>> held_out;
    for (const Row* row : all) {
        if (row->measured.held_out) held_out[row->measured.kind].push_back(row);
        else own.push_back(row);
    }
    if (own.empty()) return;
    const Constants result = fitted<Constants>(now, names, own, log_error);
    fmt::print("\n{}\n", title);
    for (const Named<Constants>& constant : names) {
        if (now.*constant.member == 0) continue;
        fmt::print("    .{} = {:.4g}  (now {:.4g})\n", constant.name, result.*constant.member, now.*constant.member);
    }
    const auto print = [&](const std::string& what, std::span<const Row* const> rows) {
        fmt::print("  {:<24} now   {}\n  {:<24} refit {}\n", what, errors_text<Constants>(rows, now, log_error), "",
                   errors_text<Constants>(rows, result, log_error));
    };
    print("fitted:", own);
    for (const auto& [kind, rows] : held_out) print("held out, " + kind, rows);
}

}  // namespace tessera::fit
