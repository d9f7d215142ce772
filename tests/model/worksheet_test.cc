// SPDX-License-Identifier: Apache-2.0
//
// Worksheets add up: every line "... = value unit" is calculated again from the numbers that stand in it, and every
// part of the time is the value of a line.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cctype>
#include <cmath>
#include <string>

#include "model/predict.hpp"

namespace tessera::worksheet_test {
namespace {

/// + - * / ^ ( ) max( , ) min( , ) log2( ) over numbers; words are left out but for units that scale: in a line whose
/// result is in milliseconds, clk / GHz and B / (GB/s) are nanoseconds.
class Pencil {
 public:
    Pencil(std::string text, bool in_ms) : text_(std::move(text)), in_ms_(in_ms) {}

    double result() {
        const double value = sum();
        skip_words();
        EXPECT_EQ(at_, text_.size()) << "not understood from " << at_ << " on: " << text_;
        return value;
    }

 private:
    std::string word() {
        std::string found;
        while (at_ < text_.size()) {
            const char c = text_[at_];
            const bool inside = !found.empty() && c == '/' && at_ + 1 < text_.size() && std::isalpha(text_[at_ + 1]);
            if (!std::isalpha(static_cast<unsigned char>(c)) && !inside && !(found.size() > 0 && std::isdigit(c)))
                break;
            found += c;
            ++at_;
        }
        return found;
    }
    void skip_spaces() {
        while (at_ < text_.size() && text_[at_] == ' ') ++at_;
    }
    bool at_log2() const { return text_.compare(at_, 5, "log2(") == 0; }
    bool at_function() const {
        return at_log2() || text_.compare(at_, 4, "max(") == 0 || text_.compare(at_, 4, "min(") == 0;
    }
    void skip_words() {
        for (skip_spaces();
             at_ < text_.size() && std::isalpha(static_cast<unsigned char>(text_[at_])) && !at_function();
             skip_spaces())
            word();
    }
    bool take(char wanted) {
        skip_words();
        if (at_ >= text_.size() || text_[at_] != wanted) return false;
        ++at_;
        return true;
    }
    double scaled(double value) {
        skip_spaces();
        const std::size_t before = at_;
        const std::string unit = at_function() ? "" : word();
        if (!in_ms_) return value;
        if (unit == "GHz" || unit == "GB/s") return value * 1e6;
        if (unit == "us") return value * 1e-3;
        if (unit == "ns") return value * 1e-6;
        at_ = before;
        return value;
    }
    double number() {
        skip_words();
        if (at_log2()) {
            at_ += 5;
            const double value = std::log2(sum());
            EXPECT_TRUE(take(')')) << text_;
            return value;
        }
        if (at_function()) {
            const bool largest = text_[at_ + 1] == 'a';
            at_ += 4;
            const double a = sum();
            EXPECT_TRUE(take(',')) << text_;
            const double b = sum();
            EXPECT_TRUE(take(')')) << text_;
            return largest ? std::max(a, b) : std::min(a, b);
        }
        if (take('(')) {
            const double value = sum();
            EXPECT_TRUE(take(')')) << text_;
            return value;
        }
        std::size_t used = 0;
        double value = 0;
        try {
            value = std::stod(text_.substr(at_), &used);
        } catch (const std::exception&) {
            ADD_FAILURE() << "expected a number at " << at_ << ": " << text_;
            at_ = text_.size();
        }
        at_ += used;
        return scaled(value);
    }
    double power() {
        const double base = number();
        return take('^') ? std::pow(base, number()) : base;
    }
    double product() {
        double value = power();
        for (;;) {
            if (take('*')) value *= power();
            else if (take('/')) value /= power();
            else return value;
        }
    }
    double sum() {
        double value = product();
        for (;;) {
            if (take('+')) value += product();
            else if (take('-')) value -= product();
            else return value;
        }
    }

    std::string text_;
    bool in_ms_;
    std::size_t at_ = 0;
};

/// Numbers in a line have four or five digits; differences of such lose some.
void expect_close(double value, double expected, double size, const std::string& line) {
    EXPECT_NEAR(value, expected, 2e-3 * std::abs(expected) + 1e-4 * size) << line;
}

/// "words: a * b = c unit; words: d = e": each equation is calculated. Returns the last value.
double redo(const std::string& formula) {
    double last = 0;
    for (std::size_t begin = 0; begin < formula.size();) {
        const std::size_t end = std::min(formula.find("; ", begin), formula.size());
        std::string equation = formula.substr(begin, end - begin);
        begin = end + 2;
        if (const std::size_t colon = equation.rfind(": "); colon != std::string::npos) equation.erase(0, colon + 2);
        const std::size_t equals = equation.find(" = ");
        if (equals == std::string::npos) continue;
        const std::string right = equation.substr(equals + 3);
        last = std::stod(right);
        const bool in_ms = right.find(" ms") != std::string::npos;
        const double value = Pencil(equation.substr(0, equals), in_ms).result();
        const double most = equation.find(" - ") != std::string::npos ? 10 * std::abs(last) + 1e5 * !in_ms : 0;
        expect_close(value, last, most, formula);
    }
    return last;
}

void expect_adds_up(const model::Prediction& p, const std::string& what) {
    SCOPED_TRACE(what);
    ASSERT_FALSE(p.worksheet.empty());
    double sum = 0;
    for (const model::Part& part : p.parts) {
        sum += part.ms;
        bool stands = false;
        for (const model::WorksheetLine& line : p.worksheet) {
            if (line.what == part.name && line.formula.find(" = ") != std::string::npos)
                stands = stands || std::abs(redo(line.formula) / part.ms - 1) < 2e-3;
        }
        EXPECT_TRUE(stands) << "no line gives the part " << part.name << ", " << part.ms << " ms";
    }
    EXPECT_NEAR(sum, p.ms, 1e-9 * p.ms);
    for (const model::WorksheetLine& line : p.worksheet) {
        if (line.what == "time") continue;  // names of parts stand between its numbers
        SCOPED_TRACE(line.what);
        redo(line.formula);
    }
}

Problem problem_of(DType dtype, std::int64_t len_q, std::int64_t len_kv, Causal causal, std::int64_t heads_kv) {
    Problem p;
    p.dtype = dtype;
    p.batch = 2;
    p.len_q = len_q;
    p.len_kv = len_kv;
    p.heads_q = 16;
    p.heads_kv = heads_kv;
    p.head_dim = p.head_dim_v = 128;
    p.mask.causal = causal;
    return p;
}

TEST(Worksheet, every_line_adds_up) {
    int sheets = 0;
    for (const char* name : {"h200", "a100", "l4", "b200", "xeon-16"}) {
        const model::Machine& machine = *model::find_machine(name);
        for (const DType dtype : {DType::bf16, DType::fp32}) {
            for (const auto& [len_q, len_kv] : {std::pair{2048, 2048}, {300, 300}, {1, 8192}, {512, 4096}}) {
                for (const Causal causal : {Causal::none, Causal::bottom_right}) {
                    Problem problem = problem_of(dtype, len_q, len_kv, causal, len_q == 1 ? 4 : 16);
                    problem.dropout.probability = len_q == 300 ? 0.1 : 0;
                    for (const Schedule schedule : kSchedules) {
                        for (const Pass pass : {Pass::forward, Pass::backward}) {
                            for (const char* by : {"tessera", "flash-attention", "cudnn"}) {
                                const model::PredictOptions options{.by = by, .worksheet = true};
                                if (model::refusal(problem, schedule, pass, machine, options)) continue;
                                const auto p = model::predict(problem, schedule, pass, machine, options);
                                expect_adds_up(p, fmt::format("{}: {}, {} {} of {}", name, problem.describe(),
                                                              name_of(schedule), name_of(pass), by));
                                ++sheets;
                            }
                        }
                    }
                }
            }
        }
    }
    EXPECT_GT(sheets, 150);
}

/// Packed documents, with the residual of O of a training forward.
TEST(Worksheet, packed_documents_add_up) {
    const model::Machine& machine = *model::find_machine("h200");
    const std::vector<std::pair<std::int64_t, std::int64_t>> documents = {{300, 300}, {1, 1}, {64, 64}, {1500, 1500}};
    for (const std::int64_t head_dim : {64, 128}) {
        for (const Pass pass : {Pass::forward, Pass::backward}) {
            Problem p{.dtype = DType::bf16, .batch = 4, .len_q = 1500, .len_kv = 1500, .heads_q = 8, .heads_kv = 2};
            p.head_dim = p.head_dim_v = head_dim;
            p.mask.causal = Causal::bottom_right;
            p.ragged = true, p.total_q = p.total_kv = 1865;
            const model::PredictOptions options{
                .by = "tessera", .sequences = documents, .worksheet = true, .o_residual = pass == Pass::forward};
            const auto found = model::predict(p, Schedule::fa3, pass, machine, options);
            expect_adds_up(found, fmt::format("{} {}", head_dim, name_of(pass)));
            model::PredictOptions without = options;
            without.o_residual = false;
            const auto plain = model::predict(p, Schedule::fa3, pass, machine, without);
            if (pass == Pass::forward) EXPECT_GT(found.ms, plain.ms) << "the residual takes time";
            else EXPECT_EQ(found.ms, plain.ms);
        }
    }
}

/// FlashAttention-3 with and without the kernel that combines splits.
TEST(Worksheet, packed_documents_of_flash3_add_up) {
    const model::Machine& machine = *model::find_machine("h200");
    for (const std::int64_t longest : {300, 1500}) {
        const std::vector<std::pair<std::int64_t, std::int64_t>> documents = {{64, 64}, {1, 1}, {longest, longest}};
        Problem p{.dtype = DType::bf16, .batch = 3, .len_q = longest, .len_kv = longest, .heads_q = 4, .heads_kv = 2};
        p.head_dim = p.head_dim_v = 128;
        p.mask.causal = Causal::bottom_right;
        p.ragged = true, p.total_q = p.total_kv = longest + 65;
        const model::PredictOptions options{.by = "flash-attention", .sequences = documents, .worksheet = true};
        const auto found = model::predict(p, Schedule::fa3, Pass::forward, machine, options);
        expect_adds_up(found, fmt::format("{}", longest));
        const bool combines = std::any_of(found.parts.begin(), found.parts.end(),
                                          [](const model::Part& part) { return part.name == "combine"; });
        EXPECT_EQ(combines, longest > 512);
    }
}

/// Found by tools/check_worksheets.py: parts of rows that together are less than an even share, blocks that end
/// together but for the last bits, and calls of a few clocks.
TEST(Worksheet, rare_lines_add_up) {
    struct Rare {
        const char* machine;
        const char* by;
        Schedule schedule;
        Pass pass;
        DType dtype;
        std::int64_t batch, len_q, len_kv, heads_q, heads_kv, head_dim;
        bool causal;
    };
    using enum Schedule;
    using enum Pass;
    for (const Rare& rare :
         {Rare{"rtx4090", "flash-attention", fa2, forward, DType::fp16, 16, 3, 7816, 8, 2, 128, true},
          Rare{"a100", "flash-attention", fa2, forward, DType::bf16, 1, 1, 6911, 8, 4, 96, true},
          Rare{"h200", "flash-attention", fa3, backward, DType::fp16, 2, 4108, 4108, 4, 1, 128, true},
          Rare{"h200", "tessera", fa1, forward, DType::bf16, 1, 3, 213, 2, 1, 32, true},
          Rare{"h200", "tessera", standard, forward, DType::bf16, 1, 3, 213, 2, 1, 32, true},
          Rare{"h200", "flash-attention", fa2, forward, DType::bf16, 1, 3, 213, 2, 1, 32, true}}) {
        Problem p;
        p.dtype = rare.dtype, p.batch = rare.batch, p.len_q = rare.len_q, p.len_kv = rare.len_kv;
        p.heads_q = rare.heads_q, p.heads_kv = rare.heads_kv, p.head_dim = p.head_dim_v = rare.head_dim;
        if (rare.causal) p.mask.causal = Causal::bottom_right;
        const auto prediction = model::predict(p, rare.schedule, rare.pass, *model::find_machine(rare.machine),
                                               {.by = rare.by, .worksheet = true});
        expect_adds_up(prediction, fmt::format("{}: {}", rare.machine, p.describe()));
        for (const model::Part& part : prediction.parts) EXPECT_GT(part.ms, 1e-9 * prediction.ms) << part.name;
    }
}

}  // namespace
}  // namespace tessera::worksheet_test
