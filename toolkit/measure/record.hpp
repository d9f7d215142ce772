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

/// One predicted or measured result with its provenance: the only thing that command line, plots and reports exchange.
/// A line of JSON; fields without a value are left out.
struct Record {
    std::string what = "measured";  ///< measured, predicted
    std::string by = "tessera";     ///< or a peer
    std::string schedule;
    std::string kernel;
    std::string pass;
    std::string dtype;
    std::int64_t batch = 0;
    std::int64_t len_q = 0;  ///< the longest sequence when ragged
    std::int64_t len_kv = 0;
    std::int64_t heads_q = 0;
    std::int64_t heads_kv = 0;
    std::int64_t head_dim = 0;
    std::int64_t head_dim_v = 0;
    std::string mask = "none";           ///< "none", "causal bottom-right, window 128,0"
    std::vector<std::int64_t> lens_q{};  ///< of the sequences of a ragged batch
    std::vector<std::int64_t> lens_kv{};
    std::string features;  ///< what else the Problem asks for: "softcap 30, alibi"; empty: nothing
    bool deterministic = true;
    double ms = 0;         ///< median
    double ms_spread = 0;  ///< interquartile range
    double tflops = 0;     ///< of visible pairs only
    std::string bound;     ///< the resource that bounds the time, when a model says so
    std::optional<double> percent_of_bound{};
    std::map<std::string, double> bytes{};  ///< moved, by memory level
    std::string device;
    int threads = 0;
    double clock_mhz = 0;           ///< 0: not known
    std::optional<double> watts{};  ///< mean power of the device during the calls
    std::map<std::string, std::string> versions{};
    std::string date;
    std::string commit;
    std::string file{};  ///< where read_records() found it; not written
};

/// The fields that a Plan and its timing give; provenance is the caller's to add.
Record record_of(const Plan& plan, const Summary& milliseconds, double operations);

/// "none", or the rule: "causal bottom-right, window 128,unbounded".
std::string mask_text(const Mask& mask);

/// What a Problem asks for besides mask and sizes: "softcap 30, alibi"; empty when nothing.
std::string features_text(const Problem& problem);

/// Are both of the same case: who computed what on which device, whatever came out and when?
bool same_case(const Record& a, const Record& b);

nlohmann::ordered_json to_json(const Record& record);

/// Throws Error(bad_data), naming the field, when one is missing or of another type. Unknown fields are ignored, so
/// that older programs read newer records.
Record record_from_json(const nlohmann::ordered_json& json);

/// Appends whole lines to a JSON-lines file, which is made when it is missing. Each line is one write() to a file
/// opened for appending, so programs that append at once don't mix lines. A last line that was cut off (a full disk, a
/// power cut) is ended first and stays a line of its own. Throws Error(cannot_write).
void append_records(const std::string& path, const std::vector<Record>& records);

/// Reads every line. A line that begins an object and does not finish it is what a crash left: it is skipped, and
/// counted in `*cut_off`. Any other malformed line is Error(bad_data) with its number. Throws Error(cannot_open).
std::vector<Record> read_records(const std::string& path, std::int64_t* cut_off = nullptr);

}  // namespace tessera::measure
