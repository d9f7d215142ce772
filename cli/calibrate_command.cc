// SPDX-License-Identifier: Apache-2.0
//
// tessera calibrate: measures this machine's roofs and writes a machine file that other commands take.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "commands.hpp"
#include "device_option.hpp"
#include "io/atomic_file.hpp"
#include "measure/calibrate.hpp"
#include "measure/machine_file.hpp"
#include "outputs.hpp"
#include "parallel.hpp"
#include "parse.hpp"
#include "progress.hpp"
#include "records.hpp"
#include "table.hpp"

namespace tessera::cli {
namespace {

struct CalibrateOptions {
    std::string threads;
    std::vector<std::string> micro;
    std::string device;
    std::string name;
    std::string output;
};

/// The measured performance of the CPU's kernels.
std::string kernels_text(const model::Machine& machine, int width) {
    const auto is_measured = [](std::string_view name) { return name != "extra_tiles" && name != "loop_starts"; };
    std::vector<Column> columns{{"kernels"}};
    for_each_share(measured_kernels(machine).front().shares, [&](const char* name, const double&) {
        if (is_measured(name)) columns.push_back({name, Align::right});
    });
    Table table(columns);
    for (const MeasuredKernels& one : measured_kernels(machine)) {
        std::vector<std::string> cells{one.kernels};
        for_each_share(one.shares, [&](const char* name, const double& value) {
            if (is_measured(name)) cells.push_back(fmt::format("{:.3g}", value));
        });
        table.add(std::move(cells));
    }
    return table.text(width);
}

std::string text_of(const model::Machine& machine) {
    const int width = terminal_width(STDOUT_FILENO);
    Table table({{"quantity"}, {"value", Align::right}, {"unit"}, {"source"}});
    for_each_quantity(machine, [&](const char* name, const char* unit, const model::Quantity& quantity) {
        table.add({name, fmt::format("{:.4g}", quantity.value), unit, quantity.source});
    });
    const double peak = machine.peak_tflops(machine.kind == model::MachineKind::gpu ? DType::bf16 : DType::fp32);
    return facts_text({{"machine", fmt::format("{}: {}", machine.name, machine.title)},
                       {"GEMMs", fmt::format("{:.4g} TFLOP/s at most", peak)},
                       {"exps", fmt::format("{:.4g} a second at most",
                                            machine.exp_rate * machine.cores * machine.rated_clock_ghz * 1e9)}},
                      width) +
           "\n" + table.text(width) + (machine.kernels == nullptr ? "" : "\n" + kernels_text(machine, width));
}

model::Machine calibrate(const CalibrateOptions& options) {
    if (!options.micro.empty()) {
        if (options.device.empty())
            throw UsageError("--device",
                             "expected the GPU that the Records are of; other quantities come from its datasheet");
        if (!options.threads.empty()) throw UsageError("--threads", "has no effect with --micro; leave it out");
        return measure::calibrate_gpu(machine_of_option(options.device), records_of(options.micro));
    }
    if (!options.device.empty()) throw UsageError("--device", "expected --micro RECORDS with it");
    const auto threads = options.threads.empty() ? 0 : parse_size("--threads", options.threads);
    constexpr std::int64_t kMost = 1024;
    const std::int64_t most = std::min<std::int64_t>(kMost, available_threads());
    if (threads > most || (threads == 0 && !options.threads.empty()))
        unexpected("--threads", fmt::format("1..{}, the cores of this process", most), options.threads);
    Progress progress(measure::kCpuMeasurements);
    return measure::calibrate_cpu(static_cast<int>(threads), [&](const std::string& what) { progress.step(what); });
}

void execute(const CalibrateOptions& options, const Session& session) {
    // An error must come before the measurement, which takes seconds.
    expect_one_line("--name", options.name);
    expect_own_output(options.output, OutputKind::machine);
    if (!options.output.empty()) const io::AtomicFile can_be_made(options.output);
    model::Machine machine = calibrate(options);
    if (!options.name.empty()) machine.name = options.name;
    if (!options.output.empty()) measure::write_machine(options.output, machine);
    if (session.json) session.print_json(measure::to_json(machine));
    else session.print(text_of(machine));
}

}  // namespace

void add_calibrate_command(CLI::App& app, Session& session) {
    CLI::App* command = add_command(
        app, session, "calibrate", "Measure the roofs of the machine at hand and write a machine file for --device",
        {{"tessera calibrate -o host.json", "this CPU: GEMMs, exponentials, caches, memory, kernels; 10 to 40 seconds"},
         {"tessera calibrate --device h200 --micro bench/results/h200/micro.jsonl -o mine.json",
          "a GPU, from the Records that bench/micro wrote on it"},
         {"tessera roofline --device host.json --len 512:8192", "use it"}});
    auto options = std::make_shared<CalibrateOptions>();
    command->add_option("--threads", options->threads, "Threads of the CPU; default: all that this process may use")
        ->type_name("N");
    command->add_option("--micro", options->micro, "Records of bench/micro: calibrate the GPU that they are of")
        ->type_name("FILE");
    command->add_option(kDeviceOption, options->device, "With --micro: the GPU to start from, by name or machine file")
        ->type_name("NAME");
    command->add_option("--name", options->name, "Name in the file; default: this-host, or NAME-calibrated")
        ->type_name("TEXT");
    command->add_option("-o,--output", options->output, "Write the machine file")->type_name("FILE");
    command->callback([options, &session] { execute(*options, session); });
}

}  // namespace tessera::cli
