// SPDX-License-Identifier: Apache-2.0
#include "diagnose/trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "io/other_format.hpp"
#include "tessera/error.hpp"

namespace tessera::diagnose {
namespace {

// With the texts this takes at most 630 MB; diagnose() adds 160 MB for its data per run and operator.
constexpr std::size_t kMostRuns = 5'000'000;
constexpr std::size_t kMostSites = 5'000'000;
constexpr std::size_t kMostOps = 1'500'000;
constexpr std::size_t kMostNotes = 20;

constexpr std::string_view kSqliteMagic{"SQLite format 3\0", 16};

[[noreturn]] void throw_no_trace(const std::string& origin, const std::string& got) {
    throw Error(
        ErrorCode::bad_data, origin,
        "expected a trace (PyTorch profiler .json or .json.gz, Nsight Systems .sqlite or csv, Nsight Compute csv, "
        "JAX trace.json.gz) or names of kernels, got " +
            got);
}

bool ends_with(const std::string& text, std::string_view end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

/// Rejects files that must first be exported by their own tool.
void refuse_reports(const std::string& path) {
    if (ends_with(path, ".nsys-rep") || ends_with(path, ".qdrep"))
        throw_no_trace(path, "a report of Nsight Systems; nsys export --type sqlite FILE makes a .sqlite of it");
    if (ends_with(path, ".ncu-rep"))
        throw_no_trace(path, "a report of Nsight Compute; ncu --import FILE --csv > kernels.csv makes a table of it");
    if (ends_with(path, ".xplane.pb"))
        throw_no_trace(path, "a profile of XLA; jax.profiler writes a trace.json.gz beside it");
}

/// The kind of a file that is no trace, by its first bytes; "" if they are those of no other format, or of a text.
std::string other_file(std::string_view head, const std::string& origin) {
    const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(head.data()), head.size());
    const std::string what = io::other_format(io::MemorySource(bytes, origin)).what;
    const bool text = what.starts_with("text ") || what.starts_with("JSON ") || what.starts_with("an empty");
    if (text) return "";
    // A profile that was packed, and one that a memory snapshot was taken for.
    if (what.starts_with("a zip archive") && !what.starts_with("a zip archive of"))
        return what + "; unpack it, and give the trace that is in it";
    if (what.starts_with("a pickle"))
        return what +
               ", such as torch.cuda.memory._dump_snapshot() writes; profile.export_chrome_trace() writes a trace";
    return what;
}

/// True for an object or a list; "[rank0]: ..." and "[12:04:33] ..." are lines of a log.
bool begins_json(std::string_view text) {
    if (text[0] == '{') return true;
    if (text[0] != '[') return false;
    const std::size_t next = text.find_first_not_of(" \t\r\n", 1);
    if (next == std::string_view::npos || text[next] == '{' || text[next] == '[') return true;
    const std::size_t end = text.find(']');
    const std::size_t after = end == std::string_view::npos ? end : text.find_first_not_of(" \t\r", end + 1);
    return after == std::string_view::npos || std::string_view(",]}\n").find(text[after]) != std::string_view::npos;
}

Trace read_sniffed(Sniffed& sniffed, const std::string& origin) {
    const std::string_view head = sniffed.head();
    if (head.empty()) throw_no_trace(origin, "an empty file");
    if (head.substr(0, 2) == "\xFF\xFE" || head.substr(0, 2) == "\xFE\xFF")
        throw_no_trace(origin,
                       "text in UTF-16, as PowerShell's > writes it; save it as UTF-8 (| Out-File -Encoding utf8)");
    const std::size_t first = head.find_first_not_of(" \t\r\n\xEF\xBB\xBF");
    const bool json = first != std::string_view::npos && begins_json(head.substr(first));
    const std::string other = other_file(head, origin);
    if (json) {
        try {
            return read_chrome_trace(*sniffed.take(), origin);
        } catch (const Error& error) {
            if (error.code() != ErrorCode::bad_data || other.empty()) throw;
            throw_no_trace(origin, other);
        }
    }
    if (!other.empty()) throw_no_trace(origin, other);
    if (head.find('\0') != std::string_view::npos) throw_no_trace(origin, "binary data");
    return read_text(*sniffed.take(), origin);
}

/// Writes control characters as "\\x0a", so that a name stays on its line.
std::string on_one_line(const std::string& name) {
    std::string text;
    for (const char c : name) {
        const auto code = static_cast<unsigned char>(c);
        if (code < 0x20 || code == 0x7F) text += fmt::format("\\x{:02x}", code);
        else text += c;
    }
    return text;
}

void finish_names(Trace& trace, const std::string& file) {
    trace.file = file;
    for (Gpu& gpu : trace.gpus) gpu.name = on_one_line(gpu.name);
}

}  // namespace

Texts::Texts(std::size_t most_bytes) : most_bytes_(most_bytes) { texts_.emplace_back("(more names than are kept)"); }

std::uint32_t Texts::number_of(std::string_view text) {
    if (const auto found = numbers_.find(text); found != numbers_.end()) return found->second;
    constexpr std::size_t kOverhead = 128;  // bytes per text in both containers
    if (bytes_ + text.size() + kOverhead > most_bytes_) {
        full_ = true;
        return kLost;
    }
    bytes_ += text.size() + kOverhead;
    texts_.emplace_back(text);
    const auto number = static_cast<std::uint32_t>(texts_.size() - 1);
    numbers_.emplace(texts_.back(), number);
    return number;
}

void Trace::add(const KernelRun& run) {
    if (runs.size() < kMostRuns) {
        runs.push_back(run);
        return;
    }
    const auto [sum, is_new] = sums_.try_emplace(run.name, runs.size());
    if (is_new) {
        KernelRun first = run;
        first.correlation = first.external = -1;
        runs.push_back(first);
        if (sums_.size() == 1) notes.emplace_back("more than 5,000,000 runs: the later ones are summed by name only");
        return;
    }
    runs[sum->second].us += run.us;
    runs[sum->second].count += run.count;
}

void Trace::add(const LaunchSite& site) {
    if (sites.size() < kMostSites) sites.push_back(site);
    runs_at_launches.try_emplace(site.process, runs.size(), runs.size()).first->second.second = runs.size();
}

void Trace::add(const OpRun& op) {
    if (ops.size() < kMostOps) ops.push_back(op);
}

void Trace::add(const MarkedStep& step) {
    constexpr std::size_t kMostSteps = 100'000;
    if (steps.size() < kMostSteps) steps.push_back(step);
}

Trace read_trace(const std::string& path, const OnProgress& on_progress) {
    refuse_reports(path);
    Sniffed sniffed(open_bytes(path, on_progress));
    Trace trace = path != "-" && sniffed.head().substr(0, kSqliteMagic.size()) == kSqliteMagic
                      ? read_nsys_sqlite(path, on_progress)
                      : read_sniffed(sniffed, path == "-" ? "standard input" : path);
    finish_names(trace, path == "-" ? "standard input" : path);
    if (trace.kernels.full()) trace.notes.emplace_back("more names of kernels than are kept (128 MB)");
    if (trace.notes.size() > kMostNotes) trace.notes.resize(kMostNotes);
    return trace;
}

Trace read_trace_bytes(std::string_view bytes, const std::string& origin) {
    Sniffed sniffed(bytes_of(bytes));
    Trace trace = read_sniffed(sniffed, origin);
    finish_names(trace, origin);
    return trace;
}

}  // namespace tessera::diagnose
