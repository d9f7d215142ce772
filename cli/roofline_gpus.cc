// SPDX-License-Identifier: Apache-2.0
//
// tessera roofline --gpus: one sequence whose rows are spread over several GPUs.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "device_option.hpp"
#include "measure/several_gpus.hpp"
#include "parse.hpp"
#include "report.hpp"
#include "roofline_questions.hpp"
#include "table.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

using measure::GpusLimits;
using measure::GpusQuestion;
using measure::GpusRow;

std::string link_names() {
    std::string names;
    for (const Link& link : links()) names += (names.empty() ? "" : ", ") + link.name;
    return names;
}

/// A link by name, or as GB/s and microseconds: "nvlink", "50", "50,20".
Link link_of_option(const std::string& text) {
    if (const Link* known = find_link(usual_name(text))) return *known;
    const std::vector<std::string> parts = parse_list("--link", text);
    const bool is_number = text.find_first_not_of("0123456789.,eE+-") == std::string::npos;
    if (!is_number || parts.size() > 2) unexpected("--link", link_names() + ", or GB/s[,us]", text);
    constexpr double kMostGbs = 1e5, kMostUs = 1e6;
    const double gbs = parse_number("--link", parts[0]), us = parts.size() > 1 ? parse_number("--link", parts[1]) : 0;
    if (!(gbs > 0 && gbs <= kMostGbs)) unexpected("--link", "GB/s over 0, at most 100000", text);
    if (!(us >= 0 && us <= kMostUs)) unexpected("--link", "0 to 1000000 microseconds", text);
    Link link{.name = text};
    link.copy_gbs = link.gather_gbs = link.send_gbs = {gbs, "--link"};
    link.meet_us = link.gather_us = link.send_us = {us, "--link"};
    return link;
}

std::vector<int> gpus_of_option(const std::string& text) {
    std::vector<int> counts;
    constexpr std::int64_t kMost = 65536;
    for (const std::string& part : parse_list("--gpus", text)) {
        const std::int64_t count = parse_size("--gpus", part);
        if (count < 1 || count > kMost) unexpected("--gpus", fmt::format("1..{}", kMost), part);
        counts.push_back(static_cast<int>(count));
    }
    expect_each_once("--gpus", text, counts);
    return counts;
}

/// The schedule of --schedule, or the newest one that the device has.
Schedule schedule_on_gpus(const RooflineOptions& options, const Problem& problem, const model::Machine& machine) {
    const std::vector<Schedule> asked = options.schedule_list();
    if (options.schedules != "all") {
        if (asked.size() != 1) unexpected("--schedule", "one schedule with --gpus", options.schedules);
        return asked.front();
    }
    const model::PredictOptions by_tessera{.by = "tessera"};
    for (const Pass pass : options.passes())
        if (model::refusal(problem, Schedule::fa3, pass, machine, by_tessera)) return Schedule::fa2;
    return Schedule::fa3;
}

std::string gpus_table(std::span<const GpusRow> rows, int width) {
    constexpr std::size_t kKeys = 2;
    Table table({{"rows", Align::right},
                 {"GPUs", Align::right},
                 {"time", Align::right},
                 {"error", Align::right},
                 {"speed-up", Align::right},
                 {"share", Align::right},
                 {"memory", Align::right},
                 {"a ring", Align::right}},
                kKeys);
    for (const GpusRow& row : rows)
        table.add({count_text(row.rows()), count_text(row.gpus), milliseconds_text(row.ms()),
                   fmt::format("+-{:.0f} %", 100 * row.error()), fmt::format("{:.2f}x", row.speed_up()),
                   fmt::format("{:.2f}", row.share()),
                   row.gpus == 1 ? "-" : bytes_text(static_cast<double>(row.memory())),
                   row.ring_ms() > 0 ? milliseconds_text(row.ring_ms()) : "-"});
    return table.text(width);
}

std::string length_or_none(std::int64_t len) { return len > 0 ? count_text(len) : "none"; }

std::string limits_table(std::span<const GpusLimits> limits, int width) {
    Table table({{"GPUs", Align::right},
                 {"faster than one from", Align::right},
                 {"share 0.9 from", Align::right},
                 {"a ring is faster", Align::right}});
    for (const GpusLimits& one : limits) {
        const std::string ring = one.ring_from == 0 ? "nowhere"
                                 : one.ring_from == one.ring_to
                                     ? "at " + count_text(one.ring_from)
                                     : fmt::format("{} to {}", count_text(one.ring_from), count_text(one.ring_to));
        table.add({count_text(one.gpus), length_or_none(one.faster_from), length_or_none(one.most_from), ring});
    }
    return table.text(width);
}

/// The parts of a pass, which add up to its time.
std::string parts_text(const ContextParallelPrediction& pass) {
    std::string text;
    for (const Part& part : pass.parts)
        text += fmt::format("{}{} {}", text.empty() ? "" : " + ", part.name, milliseconds_text(part.ms));
    return fmt::format("{}; {} of {} of exchanges are hidden", text, milliseconds_text(pass.hidden_ms),
                       milliseconds_text(pass.exchange_ms));
}

std::vector<std::pair<std::string, std::string>> facts_of(const GpusQuestion& question, const GpusRow& last,
                                                          const std::string& passes) {
    const Link& link = question.link;
    std::string rates = link.name + ":";
    if (question.copies && link.copy_gbs > 0)
        rates += fmt::format(" {:.4g} GB/s for each GPU by copies of a host's GPUs;", link.copy_gbs.value);
    rates +=
        fmt::format(" by NCCL {:.4g} GB/s in a gather, {:.4g} by sends", link.gather_gbs.value, link.send_gbs.value);
    if (link.gpus_of_host > 0 && last.gpus > link.gpus_of_host)
        rates +=
            fmt::format("; between hosts of {} GPUs {:.4g} GB/s for each", link.gpus_of_host, link.between_gbs.value);
    rates += link.measured_gpus > 0 ? fmt::format("; measured on up to {} GPUs", link.measured_gpus)
                                    : "; not measured by this project";
    return {{"device", fmt::format("{}: {}", question.machine.name, question.machine.title)},
            {"problem", last.problem.describe()},
            {"pass", fmt::format("{}: {} of tessera, rows in order {}, {} group{} of key heads on {} GPUs", passes,
                                 name_of(question.schedule), last.passes.front().order, last.passes.front().steps,
                                 last.passes.front().steps == 1 ? "" : "s", last.gpus)},
            {"link", rates}};
}

constexpr const char* kLegend =
    "all times are predictions. speed-up: over one GPU at the same rows. share: speed-up / GPUs. memory: beside the "
    "tensors of one layer, on each GPU. a ring: the time of one that passes K and V on, by the same formulas; no ring "
    "was measured";
constexpr const char* kLegendOfLimits = ". The second table asks rows that double, up to 2,097,152";

Json gpus_json(const GpusRow& row) {
    Json entry{{"gpus", row.gpus},
               {"problem", json_of(row.problem)},
               {"ms", row.ms()},
               {"error", row.error()},
               {"link_measured", row.measured()},
               {"one_gpu_ms", row.one_gpu_ms()},
               {"fits_one_gpu", row.fits_one_gpu()},
               {"speed_up", row.speed_up()},
               {"share", row.share()},
               {"kernel_ms", row.kernel_ms()},
               {"bytes_received", row.bytes_received()},
               {"memory_bytes", row.memory()}};
    if (row.ring_ms() > 0) entry["ring_ms"] = row.ring_ms();
    return entry;
}

Json passes_json(const GpusRow& row) {
    Json passes = Json::array();
    for (const ContextParallelPrediction& pass : row.passes) {
        Json parts;
        for (const Part& part : pass.parts) parts[part.name] = part.ms;
        passes.push_back({{"pass", name_of(pass.pass)},
                          {"ms", pass.ms},
                          {"error", pass.error},
                          {"order", pass.order},
                          {"steps", pass.steps},
                          {"exchange_ms", pass.exchange_ms},
                          {"hidden_ms", pass.hidden_ms},
                          {"bytes_received", pass.bytes_received},
                          {"memory_bytes", pass.memory},
                          {"ring_memory_bytes", pass.ring_memory},
                          {"parts_ms", parts}});
    }
    return passes;
}

Json limits_json(const GpusLimits& limits) {
    Json entry{{"gpus", limits.gpus}, {"shortest", limits.shortest}, {"longest", limits.longest}};
    const std::pair<const char*, std::int64_t> lengths[] = {{"faster_from", limits.faster_from},
                                                            {"share_090_from", limits.most_from},
                                                            {"ring_faster_from", limits.ring_from},
                                                            {"ring_faster_to", limits.ring_to}};
    for (const auto& [name, len] : lengths)
        if (len > 0) entry[name] = len;
    return entry;
}

/// The lengths of the rows: --rows times the GPUs, or --len.
std::vector<Problem> problems_on_gpus(const RooflineOptions& options, const model::Machine& machine, int gpus) {
    if (!options.rows_of_gpu.empty() && !options.shape.ragged.empty())
        throw UsageError("--rows", "has no effect beside --ragged, which has the lengths of all documents");
    if (options.rows_of_gpu.empty()) return options.problems(machine);
    RooflineOptions of_all = options;
    of_all.shape.len.clear();
    for (const std::int64_t rows : options.rows_list())
        of_all.shape.len += (of_all.shape.len.empty() ? "" : ",") + std::to_string(rows * gpus);
    return of_all.problems(machine);
}

Json gpus_csv(const GpusQuestion& question, std::span<const GpusRow> rows) {
    Json list = Json::array();
    for (const GpusRow& row : rows) {
        Json line{{"device", question.machine.name}, {"link", question.link.name}};
        const Json entry = gpus_json(row);
        for (const auto& [key, value] : entry.items()) line[key] = value;
        list.push_back(line);
    }
    return list;
}

Json gpus_document(const GpusQuestion& question, std::span<const GpusRow> rows, std::span<const GpusLimits> limits) {
    Json list = Json::array(), of_limits = Json::array();
    for (const GpusRow& row : rows) {
        list.push_back(gpus_json(row));
        list.back()["passes"] = passes_json(row);
    }
    for (const GpusLimits& one : limits) of_limits.push_back(limits_json(one));
    return {{"device", question.machine.name},
            {"link", question.link.name},
            {"schedule", name_of(question.schedule)},
            {"rows", list},
            {"limits", of_limits}};
}

std::string gpus_text(const GpusQuestion& question, std::span<const GpusRow> rows, std::span<const GpusLimits> limits,
                      int width) {
    std::string passes;
    for (const Pass pass : question.passes) passes += (passes.empty() ? "" : " + ") + std::string(name_of(pass));
    const GpusRow& last = rows.back();
    std::string text = facts_text(facts_of(question, last, passes), width) + "\n" + gpus_table(rows, width);
    if (!limits.empty()) text += "\n" + limits_table(limits, width);
    std::vector<std::pair<std::string, std::string>> notes;
    for (const ContextParallelPrediction& pass : last.passes)
        if (last.gpus > 1) notes.emplace_back(fmt::format("{} on {}", name_of(pass.pass), last.gpus), parts_text(pass));
    const double most = question.machine.memory_gib * 1073741824;
    for (const GpusRow& row : rows)
        if (row.gpus > 1 && static_cast<double>(row.memory()) > most)
            notes.emplace_back("memory",
                               fmt::format("{} rows on {}: {} of one GPU's {}", count_text(row.rows()), row.gpus,
                                           bytes_text(static_cast<double>(row.memory())), bytes_text(most)));
    if (!last.fits_one_gpu()) notes.emplace_back("one GPU", "the whole sequence does not fit its memory");
    notes.emplace_back("read it", std::string(kLegend) + (limits.empty() ? "" : kLegendOfLimits));
    return text + "\n" + facts_text(notes, width);
}

}  // namespace

void show_gpus(const RooflineOptions& options, const Session& session) {
    const model::Machine machine = machine_of_option(options.device);
    GpusQuestion question{machine, {}, options.passes(), link_of_option(options.link)};
    question.documents = options.shape.sequences();
    question.copies = !options.nccl;
    std::vector<GpusRow> rows;
    std::vector<GpusLimits> limits;
    for (const int gpus : gpus_of_option(options.gpus)) {
        const std::vector<Problem> problems = problems_on_gpus(options, machine, gpus);
        question.schedule = schedule_on_gpus(options, problems.front(), machine);
        for (const Problem& problem : problems) rows.push_back(measure::row_on_gpus(problem, gpus, question));
        if (gpus > 1 && !session.csv && question.documents.empty())
            limits.push_back(measure::limits_on_gpus(problems.front(), gpus, question));
    }
    if (options.rows_of_gpu.empty())
        std::stable_sort(rows.begin(), rows.end(),
                         [](const GpusRow& a, const GpusRow& b) { return a.rows() < b.rows(); });
    if (!options.svg.empty() || !options.png.empty()) draw_files(options, measure::gpus_figure(question, rows));
    if (session.csv) session.print_csv(gpus_csv(question, rows));
    else if (session.json) session.print_json(gpus_document(question, rows, limits), "gpus");
    else session.print(gpus_text(question, rows, limits, terminal_width(STDOUT_FILENO)));
}

}  // namespace tessera::cli
