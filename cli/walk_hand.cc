// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <sstream>

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

/// The last position at which a line may break: between terms and values, not within a vector's parentheses.
std::size_t last_break(std::string_view line, std::size_t from, std::size_t width) {
    std::size_t found = std::string_view::npos;
    int depth = 0;
    for (std::size_t i = 0; i <= std::min(width, line.size() - 1); ++i) {
        depth += line[i] == '(' ? 1 : line[i] == ')' ? -1 : 0;
        if (i <= from || line[i] != ' ') continue;
        const std::string_view rest = line.substr(i);
        const bool outside = rest.starts_with(" = ") || rest.starts_with("  ") || line[i - 1] == ',';
        if (rest.starts_with(" + ") || (outside && depth == 0)) found = i;
    }
    return found;
}

/// Wraps lines that are too long below their first "=".
std::string fitted(const std::string& text, std::size_t width) {
    std::string result;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        const std::size_t indent = std::min<std::size_t>(line.find('='), 12);
        while (line.size() > width) {
            const std::size_t end = last_break(line, indent + 2, width);
            if (end == std::string::npos) break;
            result += line.substr(0, line.find_last_not_of(' ', end) + 1) + "\n";
            line = std::string(indent, ' ') + line.substr(line.find_first_not_of(' ', end));
        }
        result += line + "\n";
    }
    return result;
}

std::string matrices_text(const walk::HandExample& e, bool backward) {
    std::string text = fmt::format("{:>12}{:>12}{:>12}{}\n", "Q", "K", "V", backward ? "          dO" : "");
    for (std::size_t i = 0; i < std::max(e.q.size(), e.k.size()); ++i) {
        const auto row = [&](const HandMatrix& m) {
            return fmt::format("{:>12}", i < m.size() ? fmt::format("{} {}", m[i][0], m[i][1]) : "");
        };
        std::string line = row(e.q) + row(e.k) + row(e.v) + (backward ? row(e.d_o) : "");
        line.erase(line.find_last_not_of(' ') + 1);
        text += line + "\n";
    }
    return text;
}

/// Formats "1/2 * (4, 2) + (6, 0) = (8, 1)"; the first step has no earlier sum, so it omits the first term.
std::string sum_text(const Fraction& factor, const std::string& before, const std::string& added,
                     const std::string& result, bool first) {
    if (first) return added == result ? result : fmt::format("{} = {}", added, result);
    return fmt::format("{} * {} + {} = {}", factor.text(), before, added, result);
}

/// Formats O after the step. fa1 keeps it divided by l: FlashAttention paper, Algorithm 1, line 12.
std::string new_o_text(const walk::HandExample& example, const HandStep& step, bool divided) {
    std::string sum;
    if (step.old_m) {
        sum = step.rescale.text();
        if (divided) sum.append(" * ").append(step.old_l.text());
        sum.append(" * ").append(text_of(step.old_o));
    }
    for (std::size_t i = 0; i < step.p.size(); ++i) {
        if (!step.s[i]) continue;
        const auto& v = example.v[static_cast<std::size_t>(step.keys.begin) + i];
        if (!sum.empty()) sum += " + ";
        sum += fmt::format("{} * ({}, {})", step.p[i].text(), v[0], v[1]);
    }
    return divided ? fmt::format("({}) / ({})", sum, step.l.text()) : sum;
}

std::string step_text(const walk::HandExample& example, const HandStep& step, bool divided) {
    const bool first = !step.old_m;
    std::string added;  // added to l
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
    text += fmt::format("          O = {} = {}\n", new_o_text(example, step, divided), text_of(step.o));
    return text;
}

/// Formats "queries 0 and 1", "query 4", "queries 0..3".
std::string indices_text(const char* one, const char* many, const Range& r) {
    if (r.size() == 1) return fmt::format("{} {}", one, r.begin);
    if (r.size() == 2) return fmt::format("{} {} and {}", many, r.begin, r.begin + 1);
    return fmt::format("{} {}..{}", many, r.begin, r.end - 1);
}
std::string queries_text(const Range& r) { return indices_text("query", "queries", r); }
std::string keys_text(const Range& r) { return indices_text("key", "keys", r); }

/// Calls visit(queries, keys) for every tile in the order of the forward.
template <class Visit>
void for_each_tile(const Hand& hand, const Visit& visit) {
    const walk::HandExample& e = hand.example;
    const bool whole_rows = hand.schedule == Schedule::standard;
    const std::int64_t block_q = e.tile.block_q, block_kv = whole_rows ? e.len_kv() : e.tile.block_kv;
    const std::int64_t rows = (e.len_q() + block_q - 1) / block_q, columns = (e.len_kv() + block_kv - 1) / block_kv;
    const bool keys_outer = hand.schedule == Schedule::fa1;
    for (std::int64_t n = 0; n < rows * columns; ++n) {
        const std::int64_t i = keys_outer ? n % rows : n / columns, j = keys_outer ? n / rows : n % columns;
        visit(Range{i * block_q, std::min((i + 1) * block_q, e.len_q())},
              Range{j * block_kv, std::min((j + 1) * block_kv, e.len_kv())});
    }
}

std::string steps_text(const Hand& hand) {
    const bool divided = hand.schedule == Schedule::fa1;
    const Band band = hand.mask.bind(hand.example.len_q(), hand.example.len_kv());
    std::string text;
    auto step = hand.steps.begin();
    for_each_tile(hand, [&](const Range& queries, const Range& keys) {
        text += fmt::format("\n{}, {}", queries_text(queries), keys_text(keys));
        if (band.coverage(queries.begin, queries.end, keys.begin, keys.end) == Coverage::empty) {
            text += ": skipped, all of it is hidden\n";
            return;
        }
        text += "\n";
        for (; step != hand.steps.end() && step->keys == keys && step->row >= queries.begin && step->row < queries.end;
             ++step) {
            text += step_text(hand.example, *step, divided);
        }
    });
    return text;
}

std::string results_text(const Hand& hand) {
    const bool divided = hand.schedule == Schedule::fa1;
    std::string text =
        divided ? "\nO is divided by l already. LSE = (m + log2 l) ln 2\n" : "\nO / l, and LSE = (m + log2 l) ln 2\n";
    for (std::size_t i = 0; i < hand.rows.size(); ++i) {
        const HandRow& row = hand.rows[i];
        if (!row.m) {
            text += fmt::format("  row {}   sees no key: O = (0, 0), LSE = -inf\n", i);
            continue;
        }
        text += fmt::format("  row {}   O = {:<16} = ({:.5f}, {:.5f})  l = {:<5}  LSE = {:.5f}\n", i, text_of(row.o),
                            row.o[0].value(), row.o[1].value(), row.l.text(),
                            (static_cast<double>(*row.m) + std::log2(row.l.value())) * std::log(2.0));
    }
    return text;
}

template <class T>
std::string part(const std::vector<T>& values, const Range& r, const auto& text) {
    return list(std::vector<T>(values.begin() + r.begin, values.begin() + r.end), text);
}
std::string part(const std::vector<Fraction>& values, const Range& r) {
    return part(values, r, [](const Fraction& f) { return f.text(); });
}

std::string gradient_step_text(const Hand& hand, const walk::HandGradientStep& step) {
    std::string text = fmt::format("\n{}, {}\n", keys_text(step.keys), queries_text(step.queries));
    for (std::int64_t i = step.queries.begin; i < step.queries.end; ++i) {
        const HandRow& row = hand.rows[static_cast<std::size_t>(i)];
        text += fmt::format("  row {}   P  = {}   dP = {}\n          dS = P (dP - D) = {}\n", i, part(row.p, step.keys),
                            part(row.dp, step.keys), part(row.ds, step.keys));
        text += fmt::format("          dQ = ln 2 * {} so far\n",
                            text_of(step.dq[static_cast<std::size_t>(i - step.queries.begin)]));
    }
    for (std::int64_t j = step.keys.begin; j < step.keys.end; ++j) {
        const auto at = static_cast<std::size_t>(j - step.keys.begin);
        text += fmt::format("  key {}   dK = ln 2 * {} so far\n          dV = {} so far\n", j, text_of(step.dk[at]),
                            text_of(step.dv[at]));
    }
    return text;
}

std::string backward_text(const Hand& hand) {
    const bool whole = hand.schedule == Schedule::standard;
    std::string text = fmt::format("\nBackward, {}:\nP = 2^(s - m) / l, dP = dO . v, D = dO . O, dS = P (dP - D)\n",
                                   whole ? "all tiles at once; P and dS go to memory"
                                         : "tile by tile, a tile of keys outer. P is recomputed from s, m and l");
    for (std::size_t i = 0; i < hand.rows.size(); ++i)
        text += fmt::format("  row {}   D = {}\n", i, hand.rows[i].delta.text());
    for (const walk::HandGradientStep& step : hand.gradient_steps) text += gradient_step_text(hand, step);
    text += "\nSums: dQ = ln 2 * sum of dS k, dK = ln 2 * sum of dS q, dV = sum of P dO\n";
    for (std::size_t i = 0; i < hand.rows.size(); ++i)
        text += fmt::format("  row {}   dQ = ln 2 * {}\n", i, text_of(hand.rows[i].dq));
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
            "Attention by hand, schedule {}: {} queries, {} keys, head_dim 2, tiles of {} x {}. The scale is ln 2, so "
            "that exp(scale * q . k) is 2^(q . k): with whole numbers all weights are powers of two and all "
            "results fractions. s = q . k; m, the largest s so far, is in units of ln 2 too.",
            name_of(hand.schedule), hand.example.len_q(), hand.example.len_kv(), hand.example.tile.block_q,
            hand.example.tile.block_kv),
        width);
    text += '\n';
    text += matrices_text(hand.example, backward);
    text += fitted(steps_text(hand) + results_text(hand) + (backward ? backward_text(hand) : ""),
                   static_cast<std::size_t>(width));
    text += "\n";
    add_lines(text,
              "Check: put all s of a row beside each other, weigh the rows of V with 2^s and divide by the sum of the "
              "weights. The fractions must be the same, whatever the order of the tiles.",
              width);
    return text;
}

}  // namespace tessera::cli
