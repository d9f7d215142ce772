// SPDX-License-Identifier: Apache-2.0
//
// tessera machine: lists the built-in machines, or writes one as a machine file that can be edited.
#include <fmt/format.h>
#include <unistd.h>

#include <memory>

#include "commands.hpp"
#include "device_option.hpp"
#include "io/atomic_file.hpp"
#include "measure/machine_file.hpp"
#include "outputs.hpp"
#include "parse.hpp"
#include "table.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

struct MachineOptions {
    std::string machine;
    std::vector<std::string> changes;
    std::string name;
    std::string output;
};

/// The dtype of the peak rate in the list: the machine's own for matrix products.
DType listed_dtype(const model::Machine& machine) {
    return machine.kind == model::MachineKind::cpu ? DType::fp32
           : machine.supports(DType::bf16)         ? DType::bf16
                                                   : DType::fp16;
}

std::string machines_text(int width) {
    Table table({{"name"},
                 {"cores", Align::right},
                 {"TFLOP/s", Align::right},
                 {"GB/s", Align::right},
                 {"GiB", Align::right},
                 {"machine"}});
    for (const model::Machine& machine : model::machines()) {
        const DType dtype = listed_dtype(machine);
        table.add({machine.name, fmt::format("{}", machine.cores.value),
                   fmt::format("{:.4g} {}", machine.peak_tflops(dtype), name_of(dtype)),
                   fmt::format("{:.4g}", machine.dram_gbs.value), fmt::format("{:.4g}", machine.memory_gib.value),
                   machine.title});
    }
    std::string text = table.text(width) + "\n";
    for (const std::string& line :
         wrapped("tessera machine NAME > mine.json writes one as a file to edit, and --device mine.json reads it.",
                 static_cast<std::size_t>(width)))
        text += line + "\n";
    return text;
}

Json machines_json() {
    Json list = Json::array();
    for (const model::Machine& machine : model::machines()) {
        const DType dtype = listed_dtype(machine);
        list.push_back({{"name", machine.name},
                        {"title", machine.title},
                        {"kind", machine.kind == model::MachineKind::gpu ? "gpu" : "cpu"},
                        {"cores", machine.cores.value},
                        {"peak_tflops", machine.peak_tflops(dtype)},
                        {"peak_dtype", name_of(dtype)},
                        {"dram_gbs", machine.dram_gbs.value},
                        {"memory_gib", machine.memory_gib.value}});
    }
    return list;
}

/// Applies one --set QUANTITY=VALUE.
void change(model::Machine& machine, const std::string& text) {
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos) unexpected("--set", "QUANTITY=VALUE, such as cores=66", text);
    const std::string name = text.substr(0, equals);
    const double value = parse_number("--set", std::string_view(text).substr(equals + 1));
    std::vector<std::string> names;
    bool found = false;
    for_each_quantity(machine, [&](const char* known, const char*, model::Quantity& quantity) {
        names.emplace_back(known);
        if (name != known) return;
        quantity = {value, fmt::format("tessera machine --set; it was {:g}: {}", quantity.value, quantity.source)};
        found = true;
    });
    if (!found) expected_one_of("--set", names, name);
}

model::Machine changed_machine(const MachineOptions& options) {
    model::Machine machine = machine_of_option(options.machine, "NAME");
    for (const std::string& text : options.changes) change(machine, text);
    try {
        validate(machine);
    } catch (const Error& error) {
        if (options.changes.empty()) throw;
        throw UsageError("--set", error.what());
    }
    if (!options.name.empty()) machine.name = options.name;
    else if (!options.changes.empty()) machine.name += "-edited";
    return machine;
}

void execute(const MachineOptions& options, const CLI::App& command, const Session& session) {
    if (options.machine.empty()) {
        for (const CLI::Option* option : command.get_options()) {
            const std::string name = option->get_name(false, false);
            if (option->count() > 0 && name != "--json" && name != "--csv")
                throw UsageError(name, "expected the name of a machine with it, as in: tessera machine h200");
        }
        if (session.csv) session.print_csv(machines_json());
        else if (session.json) session.print_json(Json{{"machines", machines_json()}}, "list");
        else session.print(machines_text(terminal_width(STDOUT_FILENO)));
        return;
    }
    if (session.csv) throw UsageError("--csv", "expected without NAME: a machine file is JSON");
    expect_one_line("--name", options.name);
    expect_own_output(options.output, OutputKind::machine);
    const model::Machine machine = changed_machine(options);
    if (!options.output.empty()) measure::write_machine(options.output, machine);
    else session.print_json(measure::to_json(machine));
}

}  // namespace

void add_machine_command(CLI::App& app, Session& session) {
    CLI::App* command = add_command(
        app, session, "machine", "List the built-in machines, or write one as a file to edit, for --device",
        {{"tessera machine", "every machine that --device knows by name"},
         {"tessera machine h200 > mine.json", "its rates and capacities, each with its source, as a machine file"},
         {"tessera machine h200 --set cores=66 --name half-h200 -o half.json", "an H200 with half its multiprocessors"},
         {"tessera machine h100 --set clock_ghz=1.2 --set loaded_clock_ghz=1.2 -o slow.json", "a capped clock"},
         {"tessera roofline --device half.json --len 4096 --head-dim 128", "a prediction for it"}});
    auto options = std::make_shared<MachineOptions>();
    command->add_option("NAME", options->machine, "A built-in machine, or a machine file; default: list them");
    command
        ->add_option("--set", options->changes,
                     "Change a quantity of the file, such as cores, clock_ghz or dram_gbs; several times for several")
        ->type_name("QUANTITY=VALUE")
        ->allow_extra_args(false)
        ->take_all();
    command
        ->add_option("--name", options->name, "Name in the file; default: that of the machine, with --set NAME-edited")
        ->type_name("TEXT");
    command->add_option("-o,--output", options->output, "Write the machine file here; default: standard output")
        ->type_name("FILE");
    add_csv_flag(*command, session);
    command->callback([options, command, &session] { execute(*options, *command, session); });
}

}  // namespace tessera::cli
