// SPDX-License-Identifier: Apache-2.0
#include "outputs.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "measure/machine_file.hpp"
#include "measure/record.hpp"
#include "parse.hpp"
#include "plot/mark.hpp"
#include "report/report.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

/// The first 64 KiB of the file, where the mark of its kind must be.
std::string head_of(const std::string& path) {
    constexpr std::size_t kMost = 65536;
    std::string head(kMost, '\0');
    std::ifstream file(path, std::ios::binary);
    file.read(head.data(), static_cast<std::streamsize>(kMost));
    head.resize(static_cast<std::size_t>(file.gcount()));
    return head;
}

bool is_own(const std::string& path, OutputKind kind) {
    const std::string head = head_of(path);
    const auto has = [&](std::string_view mark) { return head.find(mark) != std::string::npos; };
    switch (kind) {
        case OutputKind::records: return measure::read_records(path), true;
        case OutputKind::machine: return measure::read_machine(path), true;
        case OutputKind::svg: return head.starts_with("<svg") && has(plot::kSvgMark);
        case OutputKind::png: return head.starts_with("\x89PNG") && has(plot::kPngMark);
        case OutputKind::html: return has(report::kHtmlMark);
        case OutputKind::markdown: return head.starts_with(report::kMarkdownMark);
        case OutputKind::tensors: return has("\"generator\":\"tessera ") || has("\"tessera.version\":");
    }
    return false;
}

const char* name_of(OutputKind kind) {
    switch (kind) {
        case OutputKind::records: return "records";
        case OutputKind::machine: return "machine file";
        case OutputKind::svg:
        case OutputKind::png: return "drawing";
        case OutputKind::html: return "page";
        case OutputKind::markdown: return "tables";
        case OutputKind::tensors: return "tensors";
    }
    return "?";
}

}  // namespace

void expect_own_output(const std::string& path, OutputKind kind) {
    if (path == "-") throw UsageError("-", "expected a file; /dev/stdout is standard output");
    struct stat status {};
    if (path.empty() || ::stat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_size == 0) return;
    std::string why;
    try {
        if (is_own(path, kind)) return;
    } catch (const Error& error) {
        if (error.code() != ErrorCode::bad_data) throw;
        why = fmt::format(" ({})", error.what());
    }
    throw Error(ErrorCode::cannot_write, path,
                fmt::format("expected a new file or {} written by tessera, got other content{}; the file is unchanged",
                            name_of(kind), why));
}

void expect_ending(const char* option, const std::string& path, std::initializer_list<std::string_view> endings) {
    const std::string ending = std::filesystem::path(path).extension().string();
    if (ending.empty() || std::find(endings.begin(), endings.end(), ending) != endings.end()) return;
    unexpected(option, fmt::format("a name that ends in {}", fmt::join(endings, " or ")), path);
}

}  // namespace tessera::cli
