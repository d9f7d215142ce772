// SPDX-License-Identifier: Apache-2.0
//
// tessera gen: input tensors from a seed.
#include <fmt/format.h>
#include <unistd.h>

#include <memory>

#include "commands.hpp"
#include "commit.hpp"
#include "generated.hpp"
#include "io/safetensors.hpp"
#include "io/tensor_file.hpp"
#include "options.hpp"
#include "outputs.hpp"
#include "parse.hpp"
#include "progress.hpp"
#include "table.hpp"

namespace tessera::cli {
namespace {

struct GenOptions {
    ShapeOptions shape;
    std::string kind = "normal";
    std::string layout = "bshd";
    std::string seed = "0";
    bool gradient = false;
    std::string output;
};

std::string shape_of(const TensorView& view) {
    return io::shape_text(std::span(view.shape).first(static_cast<std::size_t>(view.rank)));
}

void print_json(const GenOptions& options, const Session& session, const GeneratedInputs& inputs) {
    Json tensors = Json::object();
    for (const auto& [name, view] : inputs.named()) {
        tensors[name] = {{"dtype", name_of(view.dtype)},
                         {"shape", std::vector(view.shape.begin(), view.shape.begin() + view.rank)}};
    }
    session.print_json(Json{{"output", options.output},
                            {"kind", options.kind},
                            {"seed", parse_seed("--seed", options.seed)},
                            {"layout", options.layout},
                            {"tensors", tensors}});
}

void print_text(const GenOptions& options, const Session& session, const GeneratedInputs& inputs) {
    Table table({{"tensor"}, {"dtype"}, {"shape"}, {"size", Align::right}});
    for (const auto& [name, view] : inputs.named()) {
        table.add({name, name_of(view.dtype), shape_of(view),
                   bytes_text(static_cast<double>(view.size() * size_of(view.dtype)))});
    }
    session.print(fmt::format("{} (kind {}, seed {}, {})\n\n{}", options.output, options.kind, options.seed,
                              options.layout, table.text(terminal_width(STDOUT_FILENO))));
}

void execute(const GenOptions& options, const Session& session) {
    const auto fill = parse_choice<check::Fill>("--kind", options.kind,
                                                {{"normal", check::Fill::normal},
                                                 {"outliers", check::Fill::outliers},
                                                 {"large-logits", check::Fill::large_logits},
                                                 {"index-coded", check::Fill::index_coded}});
    const Problem problem = options.shape.problem({});
    const Layout layout = parse_layout(options.layout);
    const std::uint64_t seed = parse_seed("--seed", options.seed);
    if (!options.output.ends_with(".safetensors"))
        unexpected("--output", "a name that ends in .safetensors", options.output);
    expect_own_output(options.output, OutputKind::tensors);
    GeneratedInputs inputs;
    {
        Progress progress(2);
        progress.step("generating");
        inputs = generate_inputs(problem, options.shape.sequences(), layout, fill, seed, options.gradient);
        progress.step("writing " + options.output);
        io::write_safetensors(options.output, inputs.named(),
                              {{"generator", fmt::format("tessera {} ({})", TESSERA_VERSION, TESSERA_COMMIT)},
                               {"kind", options.kind},
                               {"seed", options.seed},
                               {"layout", options.layout}});
    }
    if (session.json) print_json(options, session, inputs);
    else print_text(options, session, inputs);
}

}  // namespace

void add_gen_command(CLI::App& app, Session& session) {
    CLI::App* command =
        add_command(app, session, "gen", "Write input tensors made from a seed: the same bits on every machine",
                    {{"tessera gen --len 512 --heads 8/2 --grad -o in.safetensors", "normal q, k, v and do"},
                     {"tessera gen --kind outliers --dtype bf16 --layout bhsd -o in.safetensors",
                      "the outlier inputs of the FlashAttention-3 paper"},
                     {"tessera gen --ragged 100,37,1x512 -o in.safetensors", "a ragged batch with its cu_seqlens"}});
    auto options = std::make_shared<GenOptions>();
    options->shape.declare(*command, false);
    command
        ->add_option(
            "--kind", options->kind,
            "normal (default); outliers: one in 1000 elements ten times as wide; large-logits: scores of deviation 30; "
            "index-coded: each row of v holds its index")
        ->type_name("NAME");
    command
        ->add_option("--layout", options->layout,
                     "bshd (default): [batch, len, heads, dim]; bhsd: [batch, heads, len, dim]")
        ->type_name("NAME");
    command->add_option("--seed", options->seed, "Seed; default 0")->type_name("N");
    command->add_flag("--grad", options->gradient, "With do, the gradient of the output");
    command->add_option("-o,--output", options->output, "The .safetensors file to write")
        ->type_name("FILE")
        ->required();
    command->callback([options, &session] { execute(*options, session); });
}

}  // namespace tessera::cli
