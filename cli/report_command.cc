// SPDX-License-Identifier: Apache-2.0
//
// tessera report: writes Records as one HTML page and as Markdown tables.
#include "report/report.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "commands.hpp"
#include "device_option.hpp"
#include "inputs.hpp"
#include "io/atomic_file.hpp"
#include "measure/accuracy.hpp"
#include "outputs.hpp"
#include "parse.hpp"
#include "plot/svg.hpp"
#include "progress.hpp"
#include "records.hpp"
#include "report/chart.hpp"
#include "table.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

struct ReportOptions {
    std::vector<std::string> files;
    std::string output;
    std::string markdown;
    std::string device;
    std::string title = "Attention: speed and prediction";
    std::string svg;
    std::string note;
    std::vector<std::string> only;  ///< each a list of parts
    std::vector<std::string> without;
    std::vector<std::string> lines;
    std::string columns = "3";
};

void write_text(const std::string& path, const std::string& text) {
    io::AtomicFile file(path);
    file.write(std::as_bytes(std::span(text)));
    file.commit();
}

report::Sorted read_all(const ReportOptions& options) {
    const std::vector<measure::Record> records = records_of(options.files);
    std::optional<model::Machine> machine;
    if (!options.device.empty()) machine = machine_of_option(options.device);
    report::Sorted sorted = report::sorted(records, machine ? &*machine : nullptr);
    const auto known = [](const report::DeviceRows& d) { return model::machine_of_device(d.name) != nullptr; };
    if (machine && !sorted.devices.empty() && std::all_of(sorted.devices.begin(), sorted.devices.end(), known))
        throw UsageError("--device",
                         fmt::format("has no effect: the model knows {}; leave it out", sorted.devices.front().name));
    const auto of_its_kind = [&](const measure::Record& r) {
        return model::machine_of_device(r.device) == nullptr && measure::is_of_kind(r, machine->kind);
    };
    if (machine && !sorted.devices.empty() && std::none_of(records.begin(), records.end(), of_its_kind))
        throw UsageError("--device",
                         fmt::format("expected a {}, on which these were measured: {} is a {}",
                                     machine->kind == model::MachineKind::gpu ? "CPU" : "GPU", machine->name,
                                     machine->kind == model::MachineKind::gpu ? "GPU" : "CPU"));
    if (sorted.devices.empty()) {
        throw Error(ErrorCode::bad_data, options.files.front(),
                    records.empty()
                        ? "expected measurements of a forward or a backward, got no records"
                        : fmt::format("expected measurements of a forward or a backward, got {} other records",
                                      records.size()));
    }
    return sorted;
}

report::ChartOptions chart_options(const ReportOptions& options) {
    report::ChartOptions result{
        .title = options.title, .note = options.note, .without = options.without, .lines = options.lines};
    for (const std::string& list : options.only) result.only.push_back(parse_list("--only", list));
    result.columns = static_cast<std::size_t>(parse_size("--columns", options.columns));
    if (result.columns == 0) unexpected("--columns", "a number from 1 on", options.columns);
    return result;
}

/// Throws if options of the chart are given without it; they do not affect the page and the tables.
void expect_chart(const ReportOptions& options) {
    if (!options.svg.empty()) return;
    for (const auto& [name, values] :
         {std::pair{"--only", &options.only}, {"--without", &options.without}, {"--line", &options.lines}}) {
        if (!values->empty()) throw UsageError(name, "has no effect without --svg");
    }
}

void print_summary(const ReportOptions& options, const report::Sorted& sorted, const Session& session) {
    Json devices = Json::array();
    Table table({{"device"}, {"measurements", Align::right}, {"plots", Align::right}});
    for (const report::DeviceRows& device : sorted.devices) {
        const std::size_t plots = report::plots_of(device);
        devices.push_back({{"device", device.name}, {"measurements", device.count()}, {"plots", plots}});
        table.add({device.name, fmt::format("{}", device.count()), fmt::format("{}", plots)});
    }
    if (session.json) {
        Json json = {{"devices", devices}, {"left_out", sorted.left_out}};
        if (!options.output.empty()) json["html"] = options.output;
        if (!options.markdown.empty()) json["markdown"] = options.markdown;
        if (!options.svg.empty()) json["svg"] = options.svg;
        return session.print_json(json);
    }
    const int width = terminal_width(STDOUT_FILENO);
    std::vector<std::pair<std::string, std::string>> facts;
    if (!options.output.empty()) facts.emplace_back("written", options.output);
    if (!options.markdown.empty()) facts.emplace_back("written", options.markdown);
    if (!options.svg.empty()) facts.emplace_back("written", options.svg);
    for (const auto& [reason, count] : sorted.left_out)
        facts.emplace_back("left out", fmt::format("{} record{} ({})", count, count == 1 ? "" : "s", reason));
    session.print(table.text(width) + "\n" + facts_text(facts, width));
}

void execute(const ReportOptions& options, const Session& session) {
    if (options.output.empty() && options.markdown.empty() && options.svg.empty())
        throw UsageError("--output",
                         "expected a file for the page, --markdown with one for the tables or --svg with one for a "
                         "chart, got none");
    if (!options.markdown.empty() && options.output == options.markdown)
        unexpected("--markdown", "another file than --output", options.markdown);
    if (!options.svg.empty() && (options.svg == options.output || options.svg == options.markdown))
        unexpected("--svg", "another file than --output and --markdown", options.svg);
    for (const std::string& output : {options.output, options.markdown, options.svg}) {
        if (!output.empty()) expect_other_file(output, options.files);
    }
    expect_chart(options);
    const report::ChartOptions of_chart = chart_options(options);
    expect_ending("--output", options.output, {".html", ".htm"});
    expect_ending("--markdown", options.markdown, {".md", ".txt"});
    expect_own_output(options.output, OutputKind::html);
    expect_own_output(options.markdown, OutputKind::markdown);
    expect_ending("--svg", options.svg, {".svg"});
    expect_own_output(options.svg, OutputKind::svg);
    report::Sorted sorted;
    {
        Progress progress(3);
        progress.step("reading and predicting");
        sorted = read_all(options);
        progress.step("drawing");
        if (!options.output.empty()) write_text(options.output, report::html_page(sorted, options.title));
        if (!options.svg.empty()) write_text(options.svg, plot::svg(report::chart(sorted, of_chart)));
        progress.step("tables");
        if (!options.markdown.empty()) write_text(options.markdown, report::markdown(sorted, options.title));
    }
    print_summary(options, sorted, session);
}

}  // namespace

void add_report_command(CLI::App& app, Session& session) {
    CLI::App* command =
        add_command(app, session, "report",
                    "Make one HTML page of Records: speed by length, speed-up, roofline, predicted against measured; "
                    "Markdown tables; and a chart of speed by length as SVG",
                    {{"tessera report results.jsonl -o report.html", "a page that needs nothing else, for a browser"},
                     {"tessera report bench/results/h200/*.jsonl --markdown table.md", "the figures as tables"},
                     {"tessera report bench/results/h200/now/forward.jsonl --svg speed.svg --only causal",
                      "a chart: a panel for each head_dim, a line for each library"}});
    auto options = std::make_shared<ReportOptions>();
    command->add_option("RECORDS", options->files, "Files of records, as tessera bench -o writes them")
        ->required()
        ->group("Input");
    const auto add_text = [&](const char* name, std::string& value, const char* type, const char* description) {
        command->add_option(name, value, description)->type_name(type);
    };
    add_text("-o,--output", options->output, "FILE", "Write the page there");
    add_text("--markdown", options->markdown, "FILE", "Write the tables there");
    add_text(kDeviceOption, options->device, "NAME",
             "Machine of devices that the model does not know: a file of tessera calibrate, or a name");
    add_text("--title", options->title, "TEXT", "Title of the page, the tables and the chart");
    const auto add_texts = [&](const char* name, std::vector<std::string>& values, const char* type,
                               const char* description) {
        command->add_option(name, values, description)->type_name(type)->allow_extra_args(false)->group("Chart");
    };
    command->add_option("--svg", options->svg, "Write a chart of speed by length there: a panel for each kind of call")
        ->type_name("FILE")
        ->group("Chart");
    add_texts("--only", options->only, "PART,...",
              "Draw panels that have one of these parts: forward, bf16, \"head_dim 128\", causal, \"full mask\", "
              "\"16 heads\", \"16 threads\". If it is given twice, a panel has one part of each list");
    add_texts("--without", options->without, "PART", "Draw no panels that have this part; may be repeated");
    add_texts("--line", options->lines, "NAME",
              "Draw this line, such as \"tessera fa3\" or \"cuDNN\"; may be repeated; default: all");
    command->add_option("--note", options->note, "A sentence for the footer")->type_name("TEXT")->group("Chart");
    command->add_option("--columns", options->columns, "Panels per row; default 3")->type_name("N")->group("Chart");
    command->callback([options, &session] { execute(*options, session); });
}

}  // namespace tessera::cli
