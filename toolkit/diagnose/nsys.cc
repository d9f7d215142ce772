// SPDX-License-Identifier: Apache-2.0
//
// Reads exports of Nsight Systems (--type sqlite). It creates tables on demand and changes them between versions: every
// column except the two times and a name may be missing.
#include <sqlite3.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "diagnose/kernel_text.hpp"
#include "diagnose/trace.hpp"
#include "tessera/error.hpp"

namespace tessera::diagnose {
namespace {

constexpr const char* kKernels = "CUPTI_ACTIVITY_KIND_KERNEL";

struct CloseDatabase {
    void operator()(sqlite3* database) const { ::sqlite3_close_v2(database); }
};
struct Finalize {
    void operator()(sqlite3_stmt* statement) const { ::sqlite3_finalize(statement); }
};

class Database {
 public:
    explicit Database(const std::string& path) : path_(path) {
        sqlite3* database = nullptr;
        const int status = ::sqlite3_open_v2(path.c_str(), &database, SQLITE_OPEN_READONLY, nullptr);
        database_.reset(database);
        if (status != SQLITE_OK) throw Error(ErrorCode::cannot_open, path, ::sqlite3_errstr(status));
        // Functions in the schema are not run, because the file may come from anybody.
        ::sqlite3_db_config(database, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, nullptr);
        ::sqlite3_limit(database, SQLITE_LIMIT_LENGTH, 64 << 20);
    }

    using Statement = std::unique_ptr<sqlite3_stmt, Finalize>;

    Statement prepare(const std::string& query) const {
        sqlite3_stmt* statement = nullptr;
        if (::sqlite3_prepare_v2(database_.get(), query.c_str(), -1, &statement, nullptr) != SQLITE_OK) fail();
        return Statement(statement);
    }
    bool step(const Statement& statement) const {
        const int status = ::sqlite3_step(statement.get());
        if (status != SQLITE_ROW && status != SQLITE_DONE) fail();
        return status == SQLITE_ROW;
    }
    bool has_table(const std::string& name) const {
        const Statement statement =
            prepare("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = '" + name + "'");
        return step(statement);
    }
    std::set<std::string> columns(const std::string& table) const {
        const Statement statement = prepare("SELECT name FROM pragma_table_info('" + table + "')");
        std::set<std::string> names;
        while (step(statement)) names.insert(text(statement, 0));
        return names;
    }
    static std::string text(const Statement& statement, int column) {
        const unsigned char* bytes = ::sqlite3_column_text(statement.get(), column);
        const auto size = static_cast<std::size_t>(::sqlite3_column_bytes(statement.get(), column));
        return bytes == nullptr ? "" : std::string(reinterpret_cast<const char*>(bytes), std::min(size, kLongestName));
    }

 private:
    [[noreturn]] void fail() const {
        throw Error(ErrorCode::bad_data, path_,
                    std::string("expected an export of Nsight Systems, got: ") + ::sqlite3_errmsg(database_.get()));
    }

    std::string path_;
    std::unique_ptr<sqlite3, CloseDatabase> database_;
};

/// Reads the GPUs in TARGET_INFO_GPU, with CUDA's numbers of them.
std::vector<std::pair<std::int64_t, Gpu>> read_gpus(const Database& database) {
    std::vector<std::pair<std::int64_t, Gpu>> gpus;
    if (!database.has_table("TARGET_INFO_GPU")) return gpus;
    const std::set<std::string> columns = database.columns("TARGET_INFO_GPU");
    if (columns.count("name") == 0) return gpus;
    const bool capability = columns.count("computeMajor") != 0 && columns.count("computeMinor") != 0;
    const auto or_null = [&](const char* column) { return std::string(columns.count(column) != 0 ? column : "NULL"); };
    const auto statement = database.prepare(
        "SELECT DISTINCT name, " + or_null("computeMajor") + ", " + or_null("computeMinor") + ", " +
        or_null("smCount") + ", " + or_null("totalMemory") + ", " +
        or_null(columns.count("cuDevice") != 0 ? "cuDevice" : "id") + " FROM TARGET_INFO_GPU LIMIT 64");
    while (database.step(statement)) {
        Gpu gpu{.name = Database::text(statement, 0)};
        if (capability) {
            const int major = ::sqlite3_column_int(statement.get(), 1);
            const int minor = ::sqlite3_column_int(statement.get(), 2);
            if (major > 0 && major < 100) gpu.capability = 10 * major + minor;
        }
        if (const int count = ::sqlite3_column_int(statement.get(), 3); count > 0) gpu.multiprocessors = count;
        const double bytes = ::sqlite3_column_double(statement.get(), 4);
        if (bytes > 0) gpu.memory_gib = bytes / 1073741824.0;
        gpus.emplace_back(::sqlite3_column_int64(statement.get(), 5), gpu);
    }
    return gpus;
}

/// Keeps the GPUs that ran kernels, the longest one first and equal ones once; all of them if none of these ran any.
void keep_those_that_ran(std::vector<std::pair<std::int64_t, Gpu>> gpus,
                         const std::map<std::int64_t, double>& us_of_device, Trace& trace) {
    const auto us = [&](const auto& gpu) {
        const auto found = us_of_device.find(gpu.first);
        return found == us_of_device.end() ? 0.0 : found->second;
    };
    std::stable_sort(gpus.begin(), gpus.end(), [&](const auto& a, const auto& b) { return us(a) > us(b); });
    const bool any = !gpus.empty() && us(gpus.front()) > 0;
    for (const auto& gpu : gpus) {
        const bool known = std::any_of(trace.gpus.begin(), trace.gpus.end(), [&](const Gpu& other) {
            return other.name == gpu.second.name && other.multiprocessors == gpu.second.multiprocessors;
        });
        if (!known && (!any || us(gpu) > 0)) trace.gpus.push_back(gpu.second);
    }
}

/// Looks up names by their numbers in StringIds, each one once.
class Names {
 public:
    Names(const Database& database, Trace& trace)
        : database_(database), trace_(trace), query_(database.prepare("SELECT value FROM StringIds WHERE id = ?1")) {}

    std::uint32_t operator()(std::int64_t id) {
        if (const auto found = known_.find(id); found != known_.end()) return found->second;
        ::sqlite3_reset(query_.get());
        ::sqlite3_bind_int64(query_.get(), 1, id);
        const std::string name = database_.step(query_) ? Database::text(query_, 0) : "(missing name)";
        const std::uint32_t number = trace_.kernels.number_of(name);
        if (known_.size() < 1'000'000) known_.emplace(id, number);
        return number;
    }

 private:
    const Database& database_;
    Trace& trace_;
    Database::Statement query_;
    std::unordered_map<std::int64_t, std::uint32_t> known_;
};

}  // namespace

Trace read_nsys_sqlite(const std::string& path, const OnProgress& on_progress) {
    const Database database(path);
    if (!database.has_table(kKernels) || !database.has_table("StringIds")) {
        throw Error(ErrorCode::bad_data, path,
                    std::string("expected a table ") + kKernels +
                        " as Nsight Systems exports, got none (was CUDA traced: nsys profile --trace cuda?)");
    }
    Trace trace;
    trace.tool = "Nsight Systems";
    trace.timed = trace.ordered = true;
    const std::set<std::string> columns = database.columns(kKernels);
    std::string name_column;
    for (const char* column : {"demangledName", "mangledName", "shortName"}) {
        if (name_column.empty() && columns.count(column) != 0) name_column = column;
    }
    if (name_column.empty() || columns.count("start") == 0 || columns.count("end") == 0)
        throw Error(ErrorCode::bad_data, path,
                    "expected a table of kernels with the columns start, end and demangledName, got one without them");
    if (name_column == "shortName")
        trace.notes.emplace_back("names are short: they lack the namespaces and templates that distinguish releases");
    const auto gpus = read_gpus(database);
    std::map<std::int64_t, double> us_of_device;

    const auto optional = [&](const char* column) { return columns.count(column) != 0 ? column : "0"; };
    std::int64_t total = 0;
    {
        const auto count = database.prepare(std::string("SELECT count(*) FROM ") + kKernels);
        if (database.step(count)) total = ::sqlite3_column_int64(count.get(), 0);
    }
    const auto rows =
        database.prepare(std::string("SELECT start, end, ") + name_column + ", " + optional("deviceId") + ", " +
                         optional("streamId") + ", " + optional("graphNodeId") + " FROM " + kKernels);
    Names name_of_id(database, trace);
    std::int64_t done = 0;
    std::int64_t in_graphs = 0;
    while (database.step(rows)) {
        KernelRun run;
        const double start = ::sqlite3_column_double(rows.get(), 0);
        const double end = ::sqlite3_column_double(rows.get(), 1);
        run.name = name_of_id(::sqlite3_column_int64(rows.get(), 2));
        run.stream = static_cast<std::uint32_t>(::sqlite3_column_int64(rows.get(), 3) << 20) +
                     static_cast<std::uint32_t>(::sqlite3_column_int64(rows.get(), 4));
        trace.device_of_stream.try_emplace(run.stream, run.stream >> 20);
        in_graphs += ::sqlite3_column_int64(rows.get(), 5) != 0 ? 1 : 0;
        run.start_us = start / 1000;
        run.us = std::max(0.0, end - start) / 1000;
        us_of_device[::sqlite3_column_int64(rows.get(), 3)] += run.us;
        trace.add(run);
        if (on_progress && ++done % 4096 == 0)
            on_progress(static_cast<std::uint64_t>(done), static_cast<std::uint64_t>(total));
    }
    keep_those_that_ran(gpus, us_of_device, trace);
    if (in_graphs > 0) trace.notes.push_back(std::to_string(in_graphs) + " runs of kernels came from CUDA graphs");
    if (database.has_table("CUPTI_ACTIVITY_KIND_GRAPH_TRACE"))
        trace.notes.emplace_back(
            "CUDA graphs were traced as a whole: kernels in them are missing (nsys profile --cuda-graph-trace=node)");
    return trace;
}

}  // namespace tessera::diagnose
