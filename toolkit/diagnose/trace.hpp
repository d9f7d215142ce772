// SPDX-License-Identifier: Apache-2.0
//
// The part of a trace that is kept: the runs of kernels, and the CPU's operators that concern attention. A file of any
// size and content takes less than a gigabyte.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "diagnose/bytes.hpp"
#include "diagnose/call.hpp"

namespace tessera::diagnose {

/// Maps each text to a number and stores it once. Beyond a limit every text is kLost.
class Texts {
 public:
    static constexpr std::uint32_t kLost = 0;  ///< "(more names than are kept)"
    explicit Texts(std::size_t most_bytes);
    Texts(Texts&&) = default;  // no copies: the numbers hold views of the texts
    Texts& operator=(Texts&&) = default;

    std::uint32_t number_of(std::string_view text);
    const std::string& operator[](std::uint32_t number) const { return texts_[number]; }
    std::size_t size() const { return texts_.size(); }
    bool full() const { return full_; }

 private:
    std::size_t most_bytes_;
    std::size_t bytes_ = 0;
    bool full_ = false;
    std::deque<std::string> texts_;
    std::unordered_map<std::string_view, std::uint32_t> numbers_;
};

/// One run of a kernel, or the sum of `count` runs if the tool gives only that.
struct KernelRun {
    std::uint32_t name = 0;    ///< index into Trace::kernels
    std::uint32_t stream = 0;  ///< the stream and device, as one number
    double start_us = 0;
    double us = 0;
    std::int64_t count = 1;
    std::int64_t correlation = -1;  ///< the launch's number; -1: unknown
    std::int64_t external = -1;     ///< PyTorch's number of the operator; -1: unknown
};

/// A place where the CPU launched a kernel.
struct LaunchSite {
    std::int64_t correlation = -1;
    double start_us = 0;
    std::uint32_t thread = 0;   ///< the thread and process, as one number
    std::uint32_t process = 0;  ///< as one number
};

/// An operator on the CPU that concerns attention.
struct OpRun {
    std::uint32_t name = 0;    ///< index into Trace::ops_named
    std::uint32_t inputs = 0;  ///< index into Trace::inputs: JSON of dims, types, strides, scalars; 0: unknown
    std::uint32_t thread = 0;
    std::uint32_t process = 0;
    double start_us = 0;
    double end_us = 0;
    std::int64_t external = -1;
};

/// A step that PyTorch's profiler marked on the CPU, "ProfilerStep#7".
struct MarkedStep {
    std::int64_t number = 0;
    double start_us = 0;
    double end_us = 0;
};

/// The `tool` of a file that holds only names of kernels.
inline constexpr const char* kNamesAlone = "names of kernels";

struct Trace {
    std::string file;
    std::string tool;  ///< "PyTorch profiler", or kNamesAlone
    Texts kernels{std::size_t{128} << 20};
    Texts ops_named{std::size_t{16} << 20};
    Texts inputs{std::size_t{64} << 20};
    std::deque<KernelRun> runs;
    std::deque<LaunchSite> sites;
    /// The runs that the file had given at the first and at the last launch of a process: where files were joined, a
    /// process's runs stand between them.
    std::map<std::uint32_t, std::pair<std::size_t, std::size_t>> runs_at_launches;
    std::deque<OpRun> ops;
    std::vector<MarkedStep> steps;  ///< in the order of the file
    std::vector<Gpu> gpus;          ///< the one on which kernels ran longest comes first
    std::unordered_map<std::uint32_t, std::uint32_t> device_of_stream;  ///< KernelRun::stream -> a number of its device
    std::optional<Version> torch;
    std::optional<int> cuda;                         ///< run time: 12080
    bool timed = false;                              ///< runs have a time
    bool ordered = false;                            ///< runs are single ones with a start
    std::vector<std::string> notes;                  ///< problems with the file, for the reader
    std::vector<std::string> backends_of_operators;  ///< Diagnosis::backends_of_operators

    /// Adds a run; beyond a limit it is added to the sum of its kernel only.
    void add(const KernelRun& run);
    void add(const LaunchSite& site);
    void add(const OpRun& op);
    void add(const MarkedStep& step);  ///< nothing beyond a limit

 private:
    std::unordered_map<std::uint32_t, std::size_t> sums_;  // kernel -> its run that holds the sum
};

/// Reads a file of any supported kind, or standard input for "-"; the content, not the name, decides the kind. A
/// damaged file is read as far as possible, and `notes` says so. Throws Error(cannot_open), Error(bad_data).
Trace read_trace(const std::string& path, const OnProgress& on_progress = {});

/// Reads bytes in memory as read_trace() reads a file; SQLite needs a file.
Trace read_trace_bytes(std::string_view bytes, const std::string& origin);

// One reader for each kind of file.
Trace read_chrome_trace(ByteStream& stream, const std::string& origin);
Trace read_nsys_sqlite(const std::string& path, const OnProgress& on_progress);
Trace read_text(ByteStream& stream, const std::string& origin);  ///< tables of nsys and ncu, or names

}  // namespace tessera::diagnose
