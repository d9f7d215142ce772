// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cmath>

#include "table.hpp"
#include "walk_text.hpp"

namespace tessera::cli {
namespace {

using walk::Fraction;
using walk::Hand;
using walk::HandMatrix;
using walk::HandRow;
using walk::HandStep;
using walk::HandVector;

std::string text_of(const HandVector& v) { return fmt::format("({}, {})", v[0].text(), v[1].text()); }

template <class T>
std::string list(const std::vector<T>& values, const auto& text) {
    std::string result;
    for (const T& value : values) {
        if (!result.empty()) result += ", ";
        result += text(value);
    }
    return result;
}
std::string list(const std::vector<Fraction>& values) {
    return list(values, [](const Fraction& f) { return f.text(); });
}

std::string score_text(const std::optional<std::int64_t>& s) { return s ? std::to_string(*s) : "hidden"; }

void add_lines(std::string& text, const std::string& paragraph, int width) {
    for (const std::string& line : wrapped(paragraph, static_cast<std::size_t>(width))) text += line + "\n";
}

std::string matrices_text(bool backward) {
    std::string text = fmt::format("{:>12}{:>12}{:>12}{}\n", "Q", "K", "V", backward ? "          dO" : "");
    for (std::size_t i = 0; i < walk::kHandLen; ++i) {
        const auto row = [&](const HandMatrix& m) {
            return fmt::format("{:>12}", fmt::format("{} {}", m[i][0], m[i][1]));
        };
        text += fmt::format("{}{}{}{}\n", row(walk::kHandQ), row(walk::kHandK), row(walk::kHandV),
                            backward ? row(walk::kHandDo) : "");
    }
    return text;
}

/// "1/2 * (4, 2) + (6, 0) = (8, 1)"; without the first part where nothing was summed before.
std::string sum_text(const Fraction& factor, const std::string& before, const std::string& added,
                     const std::string& result, bool first) {
    if (first) return added == result ? result : fmt::format("{} = {}", added, result);
    return fmt::format("{} * {} + {} = {}", factor.text(), before, added, result);
}

/// What O is after the step. fa1 keeps it divided by l: FlashAttention paper, Algorithm 1, line 12.
std::string new_o_text(const HandStep& step, bool divided) {
    std::string sum;
    if (step.old_m) {
        sum = step.rescale.text();
        if (divided) sum.append(" * ").append(step.old_l.text());
        sum.append(" * ").append(text_of(step.old_o));
    }
    for (std::size_t i = 0; i < step.p.size(); ++i) {
        if (!step.s[i]) continue;
        const auto& v = walk::kHandV[static_cast<std::size_t>(step.keys.begin) + i];
        if (!sum.empty()) sum += " + ";
        sum += fmt::format("{} * ({}, {})", step.p[i].text(), v[0], v[1]);
    }
    return divided ? fmt::format("({}) / ({})", sum, step.l.text()) : sum;
}

std::string step_text(const HandStep& step, bool divided) {
    const bool first = !step.old_m;
    std::string added;  // to l
    for (std::size_t i = 0; i < step.p.size(); ++i) {
        if (!step.s[i]) continue;
        if (!added.empty()) added += " + ";
        added += step.p[i].text();
    }
    std::string text = fmt::format("  row {}   s = {}", step.row, list(step.s, score_text));
    if (first) text += fmt::format("   m = {}\n", *step.m);
    else if (*step.old_m == *step.m) text += fmt::format("   m stays {}, rescale 1\n", *step.m);
    else
        text += fmt::format("   m rises {} -> {}, rescale 2^({} - {}) = {}\n", *step.old_m, *step.m, *step.old_m,
                            *step.m, step.rescale.text());
    text += fmt::format("          p = 2^(s - {}) = {}\n", *step.m, list(step.p));
    text += fmt::format("          l = {}\n", sum_text(step.rescale, step.old_l.text(), added, step.l.text(), first));
    text += fmt::format("          O = {} = {}\n", new_o_text(step, divided), text_of(step.o));
    return text;
}

std::string steps_text(const Hand& hand) {
    const bool divided = hand.schedule == Schedule::fa1;
    std::string text;
    const HandStep* last = nullptr;
    for (const HandStep& step : hand.steps) {
        const std::int64_t tile = step.row / walk::kHandBlock;
        if (last == nullptr || !(last->keys == step.keys) || last->row / walk::kHandBlock != tile) {
            text += fmt::format("\nqueries {} and {}, keys {}..{}\n", tile * walk::kHandBlock,
                                tile * walk::kHandBlock + 1, step.keys.begin, step.keys.end - 1);
        }
        text += step_text(step, divided);
        last = &step;
    }
    return text;
}

std::string results_text(const Hand& hand) {
    const bool divided = hand.schedule == Schedule::fa1;
    std::string text =
        divided ? "\nO is divided by l already. LSE = (m + log2 l) ln 2\n" : "\nO / l, and LSE = (m + log2 l) ln 2\n";
    for (std::size_t i = 0; i < hand.rows.size(); ++i) {
        const HandRow& row = hand.rows[i];
        text += fmt::format("  row {}   O = {:<18} = ({:.6f}, {:.6f})   l = {:<6} LSE = {:.6f}\n", i, text_of(row.o),
                            row.o[0].value(), row.o[1].value(), row.l.text(),
                            (static_cast<double>(*row.m) + std::log2(row.l.value())) * std::log(2.0));
    }
    return text;
}

std::string backward_text(const Hand& hand) {
    std::string text = "\nBackward, row by row: D = dO . O, P = 2^(s - m) / l, dP = dO . v, dS = P (dP - D)\n";
    for (std::size_t i = 0; i < hand.rows.size(); ++i) {
        const HandRow& row = hand.rows[i];
        text += fmt::format("  row {}   D = {}\n", i, row.delta.text());
        text += fmt::format("          P  = {}\n          dP = {}\n          dS = {}\n", list(row.p), list(row.dp),
                            list(row.ds));
        text += fmt::format("          dQ = ln 2 * sum of dS k = ln 2 * {}\n", text_of(row.dq));
    }
    text += "\nColumn by column: dK = ln 2 * sum of dS q, dV = sum of P dO\n";
    for (std::size_t j = 0; j < hand.dk.size(); ++j)
        text +=
            fmt::format("  key {}   dK = ln 2 * {}\n          dV = {}\n", j, text_of(hand.dk[j]), text_of(hand.dv[j]));
    return text;
}

}  // namespace

std::string hand_text(const Hand& hand, bool backward, int width) {
    std::string text;
    add_lines(
        text,
        fmt::format(
            "Attention by hand, schedule {}: 4 queries, 4 keys, head_dim 2, tiles of 2 x 2. The scale is ln 2, so "
            "that exp(scale * q . k) is 2^(q . k): with whole numbers all weights are powers of two and all "
            "results fractions. s = q . k; m, the largest s so far, is in units of ln 2 too.",
            name_of(hand.schedule)),
        width);
    text += '\n';
    text += matrices_text(backward);
    text += steps_text(hand);
    text += results_text(hand);
    if (backward) text += backward_text(hand);
    text += "\n";
    add_lines(
        text,
        "Check: put all four s of a row beside each other, weigh the rows of V with 2^s and divide by the sum of the "
        "weights. The fractions must be the same, whatever the order of the tiles.",
        width);
    return text;
}

}  // namespace tessera::cli
