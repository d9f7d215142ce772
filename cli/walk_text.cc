// SPDX-License-Identifier: Apache-2.0
#include "walk_text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "core/batch.hpp"
#include "measure/work.hpp"
#include "table.hpp"

namespace tessera::cli {
namespace {

using walk::Matrix;
using walk::Step;
using walk::Trace;

constexpr int kWide = 94;           // terminal width from which the table shows one more element of O
constexpr std::size_t kShown = 40;  // steps of a section; a longer one omits the middle

std::string number(double value) { return fmt::format("{:.4g}", value); }

/// A column of the table: the text of a step, empty if the step has no such value.
struct StepColumn {
    std::string title;
    std::function<std::string(const Step&)> text;
};

/// The steps of one pass over the keys, with the columns that they fill.
struct Section {
    std::string heading;
    std::vector<const Step*> steps;
    std::vector<StepColumn> columns;
};

std::string tile_text(const Step& step) {
    switch (step.step) {
        case TileStep::softmax: return "all";
        case TileStep::merge: return "merge";
        case TileStep::finish: return "finish";
        default: break;
    }
    switch (step.coverage) {
        case Coverage::empty: return "skipped";
        case Coverage::partial: return "partial";
        case Coverage::full: break;
    }
    return "full";
}

/// A column with one value of the followed query.
StepColumn at_row(const char* title, std::vector<float> Step::*values, std::size_t lane) {
    return {title, [values, lane](const Step& s) {
                return (s.*values).empty() ? "" : number(static_cast<double>((s.*values)[lane]));
            }};
}

StepColumn element(const std::string& title, Matrix Step::*matrix, std::size_t lane, std::int64_t column) {
    return {title, [=](const Step& s) {
                return (s.*matrix).empty() ? "" : number((s.*matrix).at(static_cast<std::int64_t>(lane), column));
            }};
}

/// A column that reduces the values of all queries of the tile, or of one matrix row.
template <class Reduce>
StepColumn reduced(const char* title, std::vector<float> Step::*values, const Reduce& reduce) {
    return {title, [=](const Step& s) { return (s.*values).empty() ? "" : number(reduce((s.*values))); }};
}

template <class Reduce>
StepColumn reduced(const char* title, Matrix Step::*matrix, std::optional<std::size_t> lane, const Reduce& reduce) {
    return {title, [=](const Step& s) {
                const Matrix& m = s.*matrix;
                if (m.empty()) return std::string();
                if (!lane) return number(reduce(m.values));
                const auto begin = m.values.begin() + static_cast<std::ptrdiff_t>(*lane) * m.columns;
                return number(reduce(std::vector<float>(begin, begin + m.columns)));
            }};
}

double least(const std::vector<float>& values) {
    double result = INFINITY;
    for (const float value : values) {
        if (value != -INFINITY) result = std::min(result, static_cast<double>(value));  // -inf: hidden, or no key yet
    }
    return std::isinf(result) ? -INFINITY : result;
}
double most(const std::vector<float>& values) {
    return static_cast<double>(*std::max_element(values.begin(), values.end()));
}
double sum(const std::vector<float>& values) {
    double result = 0;
    for (const float value : values) result += static_cast<double>(value);
    return result;
}
double largest(const std::vector<float>& values) {
    double result = 0;
    for (const float value : values) result = std::max(result, std::abs(static_cast<double>(value)));
    return result;
}
double root_mean_square(const std::vector<float>& values) {
    double result = 0;
    for (const float value : values) result += static_cast<double>(value) * static_cast<double>(value);
    return std::sqrt(result / static_cast<double>(std::max<std::size_t>(1, values.size())));
}

void add_elements(std::vector<StepColumn>& columns, const char* name, Matrix Step::*matrix, std::size_t lane,
                  const WalkView& view, std::int64_t dim) {
    const std::int64_t count = std::min<std::int64_t>(dim, view.width >= kWide ? 2 : 1);
    for (std::int64_t c = 0; c < count; ++c)
        columns.push_back(element(fmt::format("{}[{}]", name, c), matrix, lane, c));
}

std::vector<StepColumn> columns_of(TileStep step, const Trace& trace, const WalkView& view) {
    const Problem& p = trace.plan.problem;
    std::optional<std::size_t> lane;
    if (view.row) lane = static_cast<std::size_t>(*view.row - trace.queries.begin);
    const bool online = trace.plan.kernel->schedule != Schedule::standard;
    std::vector<StepColumn> c;
    if (step == TileStep::scores) {
        c = {reduced("least S", &Step::s, lane, least), reduced("most S", &Step::s, lane, most)};
    } else if (step == TileStep::values || step == TileStep::softmax) {
        if (lane) {
            c.push_back(at_row("m", &Step::m, *lane));
            if (online) c.push_back(at_row("rescale", &Step::rescale, *lane));
            c.push_back(at_row("l", &Step::l, *lane));
            if (step == TileStep::values) add_elements(c, "O", &Step::o, *lane, view, p.head_dim_v);
        } else {
            c = {reduced("least m", &Step::m, least), reduced("most m", &Step::m, most)};
            if (online) c.push_back(reduced("rescale", &Step::rescale, least));
            c.push_back(reduced("most l", &Step::l, most));
            if (step == TileStep::values) c.push_back(reduced("rms O", &Step::o, {}, root_mean_square));
        }
    } else {
        if (step != TileStep::dk_and_dv) {
            c = {reduced("sum P", &Step::p, lane, sum), reduced("most |dS|", &Step::ds, lane, largest)};
        }
        if (step == TileStep::gradients || step == TileStep::dq) {
            if (lane) add_elements(c, "dQ", &Step::dq, *lane, view, p.head_dim);
            else c.push_back(reduced("rms dQ", &Step::dq, {}, root_mean_square));
        }
        if (step == TileStep::gradients || step == TileStep::dk_and_dv) {
            c.push_back(reduced("rms dK", &Step::dk, {}, root_mean_square));
            c.push_back(reduced("rms dV", &Step::dv, {}, root_mean_square));
        }
    }
    c.push_back({"moved", [](const Step& s) { return bytes_text(s.moved.schedule); }});
    c.push_back({"standard", [](const Step& s) { return bytes_text(s.moved.standard); }});
    return c;
}

const char* heading_of(TileStep step) {
    switch (step) {
        case TileStep::scores: return "S = scale * Q K^T goes to memory";
        case TileStep::softmax: return "P = softmax(S), row by row";
        case TileStep::values: return "O = P V";
        case TileStep::weights: return "P = exp(S - LSE) and dS = P * (dO V^T - D) go to memory";
        case TileStep::dq: return "dQ = scale * dS K";
        case TileStep::dk_and_dv: return "dV = P^T dO, dK = scale * dS^T Q";
        default: return "";
    }
}

/// Splits the steps into sections: standard runs over the keys once per GEMM, fa1 and fa2 once in all.
std::vector<Section> sections_of(const Trace& trace, const WalkView& view) {
    const auto kind = [](TileStep step) {
        return step == TileStep::merge || step == TileStep::finish ? TileStep::values : step;
    };
    std::vector<Section> sections;
    std::optional<TileStep> last;
    for (const Step& step : trace.steps) {
        if (!last || kind(step.step) != *last) {
            last = kind(step.step);
            const bool one = trace.plan.kernel->schedule != Schedule::standard;
            sections.push_back({one ? "" : heading_of(*last), {}, columns_of(*last, trace, view)});
        }
        sections.back().steps.push_back(&step);
    }
    return sections;
}

/// A line of the table: one step, or a run of skipped tiles.
struct Line {
    const Step* step;
    Range keys;
    std::int64_t tiles = 1;
};

std::vector<Line> lines_of(const Section& section) {
    std::vector<Line> lines;
    for (const Step* step : section.steps) {
        const bool skipped = step->coverage == Coverage::empty;
        if (skipped && !lines.empty() && lines.back().step->coverage == Coverage::empty) {
            lines.back().keys.end = step->keys.end;
            ++lines.back().tiles;
        } else {
            lines.push_back({step, step->keys});
        }
    }
    return lines;
}

std::vector<std::string> cells_of(const Line& line, const Section& section) {
    std::vector<std::string> cells = {
        line.keys.empty() ? "none" : fmt::format("{}..{}", line.keys.begin, line.keys.end - 1), tile_text(*line.step)};
    const bool skipped = line.step->coverage == Coverage::empty;
    if (line.tiles > 1) cells[1] = fmt::format("{} skipped", line.tiles);
    for (const StepColumn& column : section.columns) cells.push_back(skipped ? "" : column.text(*line.step));
    return cells;
}

std::string section_text(const Section& section, const WalkView& view) {
    std::vector<Column> columns = {{"keys"}, {"tile"}};
    for (const StepColumn& column : section.columns) columns.push_back({column.title, Align::right});
    Table table(columns);
    const std::vector<Line> lines = lines_of(section);
    const bool cut = !view.all && lines.size() > kShown;
    for (std::size_t i = 0; i < lines.size(); ++i) {
        if (cut && i == kShown / 2) {
            std::vector<std::string> cells(columns.size());
            cells[0] = fmt::format("... {} more", lines.size() - kShown);
            table.add(cells);
            i = lines.size() - kShown / 2;
        }
        table.add(cells_of(lines[i], section));
    }
    std::string text = section.heading.empty() ? "" : section.heading + "\n";
    text += table.text(view.width);
    if (cut) text += "(--all shows every tile)\n";
    return text;
}

std::string forward_legend(const Trace& trace) {
    const bool splits =
        std::any_of(trace.steps.begin(), trace.steps.end(), [](const Step& s) { return s.step == TileStep::merge; });
    std::string text;
    switch (trace.plan.kernel->schedule) {
        case Schedule::standard:
            return "Three passes over the keys, with S and P in slow memory between them. m: largest score of the row; "
                   "l: sum of exp(S - m); P = exp(S - m) / l.";
        case Schedule::fa1:
            text =
                "fa1: K/V tiles are the outer loop. For each of them O, m and l of these queries come from slow memory "
                "and go back. m: largest score so far; l: sum of exp(score - m); O is divided by l at every step, so "
                "rescale is exp(m before - m) * l before / l, by which O is multiplied before the tile is added.";
            break;
        default:
            text =
                "m, l and O of these queries stay in fast memory while the K/V tiles pass. m: largest score so far; "
                "rescale: exp(m before - m), by which l and O are multiplied before a tile is added; l: sum of "
                "exp(score - m); O: sum of exp(score - m) * v, divided by l at the finish.";
    }
    if (splits) {
        text +=
            " The sums start again every 512 keys; \"merge\" adds a chunk to those before it, so that the bits of a "
            "row "
            "do not depend on the number of threads.";
    }
    return text;
}

std::string backward_legend(const Trace& trace) {
    if (trace.plan.kernel->schedule == Schedule::standard) {
        return "P and dS of all pairs go to memory, and are read again for the GEMMs with K, Q and dO. D = "
               "rowsum(dO * O) - dLSE.";
    }
    return "Each tile recomputes P = exp(S - LSE) from Q, K and the LSE, and dS = P * (dO V^T - D), D = rowsum(dO * O) "
           "- dLSE; it adds dS K to dQ, dS^T Q to dK and P^T dO to dV. sum P: the sum of P over this tile. dQ, dK and "
           "dV are sums so far, before the scale; those of keys include other tiles of queries.";
}

}  // namespace

std::string walk_text(const Trace& trace, const WalkView& view) {
    std::string text;
    std::string legend = trace.plan.pass == Pass::forward ? forward_legend(trace) : backward_legend(trace);
    legend +=
        " moved: bytes between slow and fast memory for these queries so far; standard: the bytes that standard "
        "attention would have moved for the same tiles.";
    for (const std::string& line : wrapped(legend, static_cast<std::size_t>(view.width))) text += line + "\n";
    for (const Section& section : sections_of(trace, view)) text.append("\n").append(section_text(section, view));
    return text;
}

std::string long_run_text(const Plan& plan, std::int64_t pairs, bool has_file) {
    constexpr double kLong = 1e11;
    const Problem& p = plan.problem;
    const double flop = measure::flop(p, plan.pass, pairs);
    if (flop < kLong) return "";
    const std::string all = p.ragged ? fmt::format("all scores of {} sequences", p.batch)
                                     : fmt::format("all {} x {} scores", p.len_q, p.len_kv);
    const std::string instead =
        has_file ? "" : fmt::format("; with --len-q {} only those of a tile", plan.tile.block_q);
    return fmt::format("{} are computed, {:.2g} TFLOP, once by all threads and once, observed, by one{}", all,
                       flop * 1e-12, instead);
}

std::string cache_text(const walk::Trace& trace, const ForwardArgs& args) {
    const Problem& p = trace.plan.problem;
    std::string text = fmt::format("{} keys of a capacity of {}", trace.len_kv, p.len_kv);
    const Sequence sequence = sequence_of(p, args, trace.selection.batch);
    if (sequence.first_kv > 0) text += fmt::format(", after {} rows of left padding", sequence.first_kv);
    if (p.page_size == 0) return text + fmt::format(", in slot {}", sequence.slot);
    constexpr std::int64_t kMost = 8;
    const std::int64_t first = sequence.first_kv / p.page_size;
    const std::int64_t end = (sequence.first_kv + trace.len_kv + p.page_size - 1) / p.page_size;
    std::string numbers;
    for (std::int64_t n = first; n < std::min(end, first + kMost); ++n)
        numbers += fmt::format("{}{}", numbers.empty() ? "" : ", ",
                               *args.page_table.at<const std::int32_t>(sequence.batch, n));
    return text + fmt::format(", in pages {}{} of {}", numbers, end - first > kMost ? ", ..." : "", p.page_size);
}

}  // namespace tessera::cli
