// SPDX-License-Identifier: Apache-2.0
//
// The columns of tables that profilers print or that people paste: which one holds the name, the runs, the time.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::diagnose {

/// The index of each column of a table; -1 if it is missing.
struct Columns {
    int name = -1, total = -1, average = -1, duration = -1, count = -1, start = -1, metric = -1, unit = -1, value = -1,
        id = -1, capability = -1, gpu_time = -1, cpu_total = -1, end = -1;
    bool self_time = false;  ///< PyTorch's "Self CUDA"
    bool rocprof = false, tree = false;
    // Units in microseconds; 0: the title names none.
    double total_us = 0, average_us = 0, duration_us = 0, start_us = 0;
    double gpu_time_us = 1e-3;  ///< Nsight Compute's base unit; a line under the titles may name another

    bool per_metric() const { return metric >= 0 && value >= 0; }
    bool timed() const { return total >= 0 || average >= 0 || duration >= 0 || per_metric() || gpu_time >= 0; }
    /// The column that gives the time of a row, and its unit.
    int time() const { return total >= 0 ? total : average >= 0 ? average : duration >= 0 ? duration : gpu_time; }
    double time_us() const {
        return total >= 0 ? total_us : average >= 0 ? average_us : duration >= 0 ? duration_us : gpu_time_us;
    }
    bool of_one_run() const { return total < 0 && average < 0 && duration >= 0; }
    bool known() const { return name >= 0 && (timed() || count >= 0 || (start >= 0 && end >= 0)); }
};

/// Finds the columns by their titles: those of nsys stats (all reports of kernels), ncu, nvprof, PyTorch's profiler,
/// and the like in Markdown. None if no column has names of kernels, or there is no other column.
std::optional<Columns> columns_of(const std::vector<std::string>& titles);

/// Parses a number, with or without commas between thousands; none for a comma elsewhere, as in "43,4".
std::optional<double> number_of_cell(std::string text);

/// The microseconds in one "ns", "usecond", "(ms)" or in the unit of "Duration [ms]"; 0 if no word is a unit.
double microseconds_in(std::string_view text);

/// Converts "4.768s", "774.9 us" or "107.681us" to microseconds; a number without a unit counts units of `unit_us`
/// microseconds. None if the text is no time, or if `unit_us` is 0 and the number has no unit.
std::optional<double> duration_us(const std::string& text, double unit_us);

/// The cells of "| a | b |", without quotes of code; none if the line is no row of Markdown.
std::vector<std::string> markdown_cells(std::string_view line);

/// True for "|---|---:|".
bool is_markdown_rule(const std::vector<std::string>& cells);

/// A row of a table whose titles were not pasted.
struct LooseRow {
    std::string name{};
    double us = 0;
    double count = 1;
    bool all_read = true;  ///< false: numbers stand beside it that were not understood
};

/// Reads a row of PyTorch's profiler (the name, then ten numbers with units), of nsys stats (per cent, nanoseconds,
/// instances, more numbers, the name) or of nvprof. None for any other line.
std::optional<LooseRow> loose_row(std::string_view line);

/// The line without the rank in front of it, "[rank0]: ", and with "|" for the lines of a drawn table.
std::string plain_line(std::string_view line);

/// True if a line has marks, but no letter and no digit: "+-----+", "=====". A line of dashes and spaces is none.
bool is_ruling(std::string_view line);

/// The cells of "a | b | c"; the bars of a tree in front of a name, "|-- ", belong to the first. None without " | ".
std::vector<std::string> tree_cells(std::string_view line);

/// The name of a candidate in a line of Inductor's autotuning, "triton_mm_3 0.0123 ms 98.1% BLOCK_K=32, ..."; "" for
/// any other line.
std::string autotuned_name(std::string_view line);

/// Splits a line of csv at `separator` into fields; quotes within quotes are doubled.
std::vector<std::string> fields_of(std::string_view line, char separator);

/// Reads a row without titles whose cells are set apart by tabs or semicolons: a name, and after it a whole number
/// (the runs) and a time with its unit (their sum). None for any other line.
std::optional<LooseRow> separated_row(std::string_view line);

/// True if a line has numbers outside of the name's brackets, so that it is more than a name.
bool has_numbers_beside(std::string_view line);

/// True if a line is a sentence: it has many words outside of brackets, as no kernel's name has.
bool is_sentence(std::string_view line);

}  // namespace tessera::diagnose
