// SPDX-License-Identifier: Apache-2.0
//
// tessera roofline: predicts the cost of schedules on a device, without running anything.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>

#include "commands.hpp"
#include "device_option.hpp"
#include "io/atomic_file.hpp"
#include "model/live_keys.hpp"
#include "outputs.hpp"
#include "parse.hpp"
#include "plot/png.hpp"
#include "plot/svg.hpp"
#include "records.hpp"
#include "report.hpp"
#include "roofline_options.hpp"
#include "roofline_questions.hpp"
#include "roofline_text.hpp"
#include "roofline_views.hpp"
#include "table.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

/// The project's own Records: beside the installed command, or in the source folder of this build.
std::vector<std::string> own_records() {
    std::vector<std::string> paths;
    std::error_code error;
    const auto command = std::filesystem::read_symlink("/proc/self/exe", error);
    const auto installed = command.parent_path().parent_path() / "share/tessera/results";
    const std::filesystem::path root = std::filesystem::exists(installed, error) ? installed : TESSERA_RECORDS;
    for (const char* folder : {"h200", "h200/now", "cpu", "published"}) {
        const std::filesystem::path at = root / folder;
        for (const auto& entry : std::filesystem::directory_iterator(at, error)) {
            if (entry.path().extension() == ".jsonl") paths.push_back(entry.path().string());
        }
    }
    if (paths.empty())
        throw Error(ErrorCode::cannot_open, "--records",
                    "expected files of Records, because none are installed and the source tree of this build is gone");
    std::sort(paths.begin(), paths.end());
    return paths;
}

void show_accuracy(const RooflineOptions& options, const Session& session) {
    const std::vector<measure::Record> records = records_of(options.records.empty() ? own_records() : options.records);
    if (records.empty()) throw Error(ErrorCode::bad_data, "--records", "expected Records, got files that hold none");
    std::optional<model::Machine> machine;
    if (options.device_given) machine = machine_of_option(options.device);
    const measure::Comparisons comparisons = measure::compare(records, machine ? &*machine : nullptr);
    if (session.json) session.print_json(json_of(comparisons), "accuracy");
    else session.print(accuracy_text(comparisons, terminal_width(STDOUT_FILENO)));
}

void write_file(const std::string& path, std::string_view bytes) {
    io::AtomicFile file(path);
    file.write(std::as_bytes(std::span(bytes.data(), bytes.size())));
    file.commit();
}

/// Throws before the work if an output would be lost, or if one drawing would overwrite the other.
void expect_drawable(const RooflineOptions& options) {
    if (!options.svg.empty() && options.svg == options.png) unexpected("--png", "another file than --svg", options.png);
    expect_ending("--svg", options.svg, {".svg"});
    expect_ending("--png", options.png, {".png"});
    expect_own_output(options.svg, OutputKind::svg);
    expect_own_output(options.png, OutputKind::png);
}

void draw(const RooflineOptions& options, const model::Machine& machine, std::span<const measure::SweepRow> rows) {
    if (options.svg.empty() && options.png.empty()) return;
    // The lengths of a decode step lie on one point of a roofline.
    const bool decode = rows.size() > 1 && measure::is_decode(rows);
    draw_files(options, decode ? measure::decode_figure(machine, rows)
                               : measure::roofline_figure(machine, rows, options.baseline_given));
}

/// True if the rows differ only in length (and batch), so that they fit in one table.
bool is_range(std::span<const measure::SweepRow> rows) {
    const Problem& a = rows.front().problem;
    return std::all_of(rows.begin(), rows.end(), [&](const measure::SweepRow& row) {
        const Problem& b = row.problem;
        return a.heads_q == b.heads_q && a.heads_kv == b.heads_kv && a.head_dim == b.head_dim &&
               a.head_dim_v == b.head_dim_v && a.dtype == b.dtype && a.mask == b.mask;
    });
}

void print_text(const RooflineOptions& options, const measure::SweepQuestion& question,
                std::span<const measure::SweepRow> rows, const Session& session) {
    const int width = terminal_width(STDOUT_FILENO);
    const auto fraction = options.attention_fraction();
    // The rows of one head_dim, mask and so on form a table.
    for (std::size_t begin = 0; begin < rows.size();) {
        std::size_t end = begin + 1;
        while (end < rows.size() && is_range(rows.subspan(begin, end - begin + 1))) ++end;
        const auto part = rows.subspan(begin, end - begin);
        std::string text = begin > 0 ? "\n" : "";
        text += heading_text(question.machine, part, width) + "\n";
        if (options.worksheet) {
            for (const measure::SweepRow& row : part) {
                if (&row != &part.front()) text += '\n';
                text += worksheet_text(row, question.machine, part.size() > 1, width);
            }
        } else if (part.size() == 1) {
            text += schedules_text(part.front(), question.machine, fraction, width) + "\n";
            text += limits_text(part.front(), question, width);
        } else {
            text += lengths_text(part, fraction, width) + "\n" + limits_text(part.front(), question, width);
        }
        session.print(text);
        begin = end;
    }
}

std::string not_fitting_text(std::int64_t bytes, const model::Machine& machine) {
    const double has = machine.memory_gib * 1073741824.0;
    const auto needed = static_cast<double>(bytes);
    return fmt::format("does not fit: it takes {} of memory, {} has {}, {} too little", bytes_text(needed),
                       machine.name, bytes_text(has), bytes_text(needed - has));
}

/// Collects the reasons why schedules cannot be predicted, each with its schedules.
class Reasons {
 public:
    void add(Schedule schedule, const std::string& why) {
        const auto known = std::find_if(all_.begin(), all_.end(), [&](const auto& one) { return one.first == why; });
        std::vector<Schedule>& of =
            (known != all_.end() ? *known : all_.emplace_back(why, std::vector<Schedule>{})).second;
        if (std::find(of.begin(), of.end(), schedule) == of.end()) of.push_back(schedule);
    }
    std::string text() const {
        std::string text;
        for (const auto& [why, schedules] : all_) {
            std::string names;
            for (const Schedule schedule : schedules)
                names += fmt::format("{}{}", names.empty() ? "" : ", ", name_of(schedule));
            text += fmt::format("\n  {}: {}", names, why);
        }
        return text;
    }

 private:
    std::vector<std::pair<std::string, std::vector<Schedule>>> all_;
};

/// The single problem of --tile and --timeline.
Problem one_problem(const RooflineOptions& options, const model::Machine& machine) {
    const std::vector<Problem> all = options.problems(machine);
    if (all.size() != 1)
        throw UsageError("--len", fmt::format("expected one problem with {}, got {}",
                                              options.timeline ? "--timeline" : "--tile", all.size()));
    all.front().validate();
    return model::on_live_keys(all.front(), options.shape.sequences());
}

void show_tile(const RooflineOptions& options, const model::Machine& machine, const Session& session) {
    const schedule::Workload w{.problem = one_problem(options, machine), .tile = *options.own_tile()};
    if (session.json) session.print_json(tile_json(w, machine), "tile");
    else session.print(tile_text(w, machine, terminal_width(STDOUT_FILENO)));
}

void show_timeline(const RooflineOptions& options, const model::Machine& machine, const Session& session) {
    const bool gpu = machine.kind == model::MachineKind::gpu;
    const std::vector<Schedule> asked = options.schedule_list();
    const std::vector<Pass> passes = options.passes();
    if (asked.size() != 1 && options.schedules != "all")
        unexpected("--schedule", "one schedule with --timeline", options.schedules);
    if (passes.size() != 1) unexpected("--pass", "forward or backward with --timeline", options.pass.text);
    schedule::Workload w{.problem = one_problem(options, machine),
                         .schedule = options.schedules != "all" ? asked.front()
                                     : gpu                      ? Schedule::fa3
                                                                : Schedule::fa2,
                         .pass = passes.front()};
    w.problem.batch = w.problem.heads_q = w.problem.heads_kv = 1;
    if (const auto why = model::refusal(w.problem, w.schedule, w.pass, machine))
        throw Error(ErrorCode::unsupported, name_of(w.schedule), *why);
    const auto own = options.own_tile();
    constexpr double kMostTiles = 1024, kMostOfTile = 4096.0 * 4096;
    if (static_cast<double>(w.problem.len_q) * static_cast<double>(w.problem.len_kv) > kMostTiles * kMostOfTile)
        unexpected("--len", "at most 1,024 tiles with --timeline", count_text(w.problem.len_kv));
    w.tile = own ? *own : model::predict(w.problem, w.schedule, w.pass, machine).tile;
    const auto tiles = [](std::int64_t len, std::int64_t block) {
        return std::ceil(static_cast<double>(len) / static_cast<double>(block));
    };
    if (tiles(w.problem.len_q, w.tile.block_q) * tiles(w.problem.len_kv, w.tile.block_kv) > kMostTiles)
        unexpected("--len", "at most 1,024 tiles with --timeline", count_text(w.problem.len_kv));
    if (session.json) session.print_json(timeline_json(w, machine), "timeline");
    else session.print(timeline_text(w, machine, terminal_width(STDOUT_FILENO)));
}

/// Adds the win of a schedule, that of the sum of its passes, to a line.
void add_win(Json& line, const measure::SweepRow& row, const measure::SweepCell& cell) {
    line["baseline"] = model::name_of(row.baseline.kind);
    if (row.baseline.cell.known()) line["baseline_ms"] = row.baseline.cell.ms();
    if (const double win = row.win(&cell); win > 0) {
        line["win"] = win;
        line["win_error"] = row.win_error(cell);
    }
    if (const auto reason = row.no_win(cell)) line["no_win"] = *reason;
}

/// A line for each length, schedule and pass.
Json csv_rows(const model::Machine& machine, std::span<const measure::SweepRow> rows) {
    Json list = Json::array();
    for (const measure::SweepRow& row : rows) {
        for (const measure::SweepCell& cell : row.cells) {
            Json line{{"device", machine.name}};
            const Json problem = json_of(row.problem);
            for (const auto& [key, value] : problem.items()) line[key] = value;
            line["schedule"] = name_of(cell.schedule);
            if (!cell.known()) {
                line["refusal"] = cell.refusal;
                list.push_back(line);
            }
            for (const model::Prediction& pass : cell.passes) {
                Json one = line;
                one["pass"] = name_of(pass.pass);
                one["by"] = pass.by;
                one["ms"] = pass.ms;
                one["error"] = pass.error;
                one["tflops"] = pass.tflops;
                one["bound"] = pass.bound;
                one["percent_of_bound"] = pass.percent_of_bound;
                one["dram_bytes"] = pass.cost.work.bytes.dram;
                one["memory_bytes"] = pass.memory.total();
                one["fits"] = cell.fits;
                add_win(one, row, cell);
                list.push_back(one);
            }
        }
    }
    return list;
}

void execute(const RooflineOptions& options, const Session& session) {
    if (options.accuracy) return show_accuracy(options, session);
    if (!options.records.empty()) throw UsageError("--records", "expected --accuracy with it");
    if (!options.model.empty()) return show_model(options, session);
    if (!options.compare.empty()) return show_comparison(options, session);
    if (!options.gpus.empty()) {
        expect_drawable(options);
        return show_gpus(options, session);
    }
    const model::Machine machine = machine_of_option(options.device);
    if (options.timeline) return show_timeline(options, machine, session);
    if (!options.tile.empty()) return show_tile(options, machine, session);
    expect_drawable(options);
    const measure::SweepQuestion question{machine, options.schedule_list(), options.passes(),
                                          options.predict_options(machine), options.baseline_kind()};
    options.attention_fraction();  // an error must come before the work
    std::vector<measure::SweepRow> rows;
    Reasons reasons;
    for (const Problem& problem : options.problems(machine)) {
        rows.push_back(measure::sweep_one(problem, question));
        for (const auto& cell : rows.back().cells) {
            const std::string why = !cell.known() ? cell.refusal
                                    : cell.fits   ? ""
                                                  : not_fitting_text(cell.longest().memory.total(), machine);
            if (!why.empty()) reasons.add(cell.schedule, why);
        }
    }
    const bool any = std::any_of(rows.begin(), rows.end(), [](const auto& row) { return row.best() != nullptr; });
    if (!any) throw Error(ErrorCode::unsupported, "", "no schedule can be predicted:" + reasons.text());
    draw(options, machine, rows);
    if (session.csv) return session.print_csv(csv_rows(machine, rows));
    if (!session.json) return print_text(options, question, rows, session);
    Json document = Json::array();
    const auto fraction = options.attention_fraction();
    for (const measure::SweepRow& row : rows) document.push_back(json_of(row, fraction));
    session.print_json(Json{{"device", machine.name}, {"rows", document}});
}

/// Throws for options that have no effect beside --model, --compare or --csv.
void expect_of_question(const RooflineOptions& options, const CLI::App& command, const Session& session) {
    const bool no_table = options.accuracy || options.timeline || !options.tile.empty() || options.worksheet;
    if (session.csv && no_table)
        throw UsageError("--csv", "has no effect with --accuracy, --timeline, --tile or --worksheet; leave it out");
    if (session.csv && command.count("--amdahl") > 0)
        throw UsageError("--amdahl", "has no effect with --csv; leave it out");
    if (!options.model.empty()) {
        expect_only(command, "--model",
                    {"--device", "--compare", "--batch", "--len", "--dtype", "--schedule", "--by", "--threads"});
    } else if (!options.compare.empty()) {
        for (const char* other :
             {"--svg", "--png", "--tile", "--timeline", "--worksheet", "--amdahl", "--accuracy", "--baseline"})
            if (command.count(other) > 0) throw UsageError(other, "has no effect with --compare; leave it out");
    }
    if (!options.gpus.empty())
        expect_only(command, "--gpus",
                    {"--device", "--link",     "--rows",  "--nccl",     "--ragged", "--batch", "--len",
                     "--heads",  "--head-dim", "--dtype", "--causal",   "--window", "--scale", "--softcap",
                     "--sinks",  "--schedule", "--pass",  "--backward", "--svg",    "--png"});
    for (const char* needs_gpus : {"--link", "--rows", "--nccl"})
        if (options.gpus.empty() && command.count(needs_gpus) > 0)
            throw UsageError(needs_gpus, "expected --gpus with it");
    if (!options.rows_of_gpu.empty() && command.count("--len") > 0)
        throw UsageError("--rows", "expected --rows or --len, got both");
    if (!options.compare.empty() && command.count("--device") > 0)
        throw UsageError("--device", "expected --compare or --device, got both");
}

}  // namespace

void draw_files(const RooflineOptions& options, const plot::Figure& figure) {
    const std::string svg = plot::svg(figure);
    if (!options.svg.empty()) write_file(options.svg, svg);
    if (!options.png.empty()) write_file(options.png, plot::png(svg));
}

void add_roofline_command(CLI::App& app, Session& session) {
    CLI::App* command = add_command(
        app, session, "roofline", "Predict what schedules cost on a device, and what bounds them; runs nothing",
        {{"tessera roofline --device h200 --len 512:65536 --heads 16 --head-dim 128 --causal bottom-right",
          "how time and win grow with the length"},
         {"tessera roofline --device a100 --tokens 16384 --len 512:16384 --pass both --svg a.svg",
          "the sizes of the papers, drawn"},
         {"tessera roofline --compare h100,h200,b200 --len 8192 --heads 32/8 --head-dim 128",
          "which GPU for this call"},
         {"tessera roofline --model config.json --device h200 --batch 4 --len 8k", "attention in a whole model"},
         {"tessera roofline --gpus 1,2,4,8 --rows 8k --heads 32/8 --head-dim 128 --causal bottom-right",
          "one sequence on several GPUs"},
         {"tessera roofline --device h200 --len 4096 --schedule fa3 --worksheet", "the calculation, line by line"},
         {"tessera roofline --device l4 --len 8192 --amdahl 0.4", "the speed-up of a whole model"},
         {"tessera roofline --device a100 --head-dim 128 --tile 128,64", "what fits the memory of a core"},
         {"tessera roofline --device h200 --len 512 --head-dim 128 --timeline", "fa3's units in time, one head"},
         {"tessera roofline --accuracy", "how far the model is from measurements"}});
    auto options = std::make_shared<RooflineOptions>();
    options->declare(*command);
    add_csv_flag(*command, session);
    command->callback([options, command, &session] {
        options->dtype_given = command->count("--dtype") > 0;
        if (options->accuracy) expect_only(*command, "--accuracy", {"--records", "--device"});
        if (options->accuracy && command->count("--device") > 0 && options->records.empty())
            throw UsageError("--device", "expected --records with it: the Records of that machine");
        expect_of_question(*options, *command, session);
        if (options->worksheet && !options->amdahl.empty())
            throw UsageError("--amdahl", "has no effect with --worksheet; leave it out");
        if (options->timeline)
            expect_only(*command, "--timeline",
                        {"--device", "--len", "--len-q", "--len-kv", "--head-dim", "--dtype", "--causal", "--window",
                         "--schedule", "--pass", "--backward", "--tile"});
        else if (!options->tile.empty())
            expect_only(*command, "--tile",
                        {"--device", "--batch", "--len", "--len-q", "--len-kv", "--heads", "--head-dim", "--dtype"});
        options->device_given = command->count("--device") > 0;
        options->by_given = command->count("--by") > 0;
        options->baseline_given = command->count("--baseline") > 0;
        execute(*options, session);
    });
}

}  // namespace tessera::cli
