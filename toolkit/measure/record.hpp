// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "measure/statistics.hpp"
#include "tessera/plan.hpp"

namespace tessera::measure {

/// One predicted or measured result with its provenance. Command line, plots and reports exchange results as Records
/// only. A Record is a line of JSON; fields without a value are left out.
struct Record {
    std::string what = "measured";  ///< measured, predicted
    std::string by = "tessera";     ///< "tessera" or the name of a peer
    std::string schedule;
    std::string kernel;
    std::string pass;
    std::string dtype;
    std::int64_t batch = 0;
    std::int64_t len_q = 0;  ///< of a ragged batch: the longest sequence
    std::int64_t len_kv = 0;
    std::int64_t heads_q = 0;
    std::int64_t heads_kv = 0;
    std::int64_t head_dim = 0;
    std::int64_t head_dim_v = 0;
    std::string mask = "none";           ///< "none", "causal bottom-right, window 128,0"
    std::vector<std::int64_t> lens_q{};  ///< queries of each sequence of a ragged batch
    std::vector<std::int64_t> lens_kv{};
    std::string features;  ///< other features of the Problem: "softcap 30, alibi"; empty: none
    bool deterministic = true;
    double ms = 0;         ///< median
    double ms_spread = 0;  ///< interquartile range
    double tflops = 0;     ///< counts visible pairs only
    std::string bound;     ///< resource that bounds the time, if a model names one
    std::optional<double> percent_of_bound{};
    std::map<std::string, double> bytes{};  ///< bytes moved, by memory level
    std::string device;
    int threads = 0;
    double clock_mhz = 0;           ///< 0: unknown
    std::optional<double> watts{};  ///< mean power of the device during the calls
    std::map<std::string, std::string> versions{};
    std::string date;
    std::string commit;
    std::string file{};  ///< file that read_records() found it in; not written
};

/// Returns the fields that a Plan and its timing give; the caller adds the provenance.
Record record_of(const Plan& plan, const Summary& milliseconds, double operations);

/// Returns "none" or the rule: "causal bottom-right, window 128,unbounded".
std::string mask_text(const Mask& mask);

/// Returns the features of a Problem besides mask and sizes, such as "softcap 30, alibi"; empty if it has none.
std::string features_text(const Problem& problem);

/// True if both describe one case: kernel, problem and device are equal, while results and dates may differ.
bool same_case(const Record& a, const Record& b);

nlohmann::ordered_json to_json(const Record& record);

/// Throws Error(bad_data), naming the field, when one is missing or of another type. Unknown fields are ignored, so
/// that older programs read newer records.
Record record_from_json(const nlohmann::ordered_json& json);

/// Appends whole lines to a JSON-lines file and creates it if needed. Each line is one write() to a file opened for
/// appending, so that programs that append at once do not mix lines. A last line that was cut off (a full disk, a power
/// cut) is ended first and stays a line of its own. Throws Error(cannot_write).
void append_records(const std::string& path, const std::vector<Record>& records);

/// Reads every line. A line that begins an object and does not finish it comes from a crash: it is skipped and counted
/// in `*cut_off`. Any other malformed line is Error(bad_data) with its number. Throws Error(cannot_open).
std::vector<Record> read_records(const std::string& path, std::int64_t* cut_off = nullptr);

}  // namespace tessera::measure
