// SPDX-License-Identifier: Apache-2.0
#include "inputs.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>

#include "core/arguments.hpp"
#include "core/batch.hpp"
#include "input_names.hpp"
#include "io/npy.hpp"
#include "io/safetensors.hpp"
#include "session.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

constexpr const char* kFiles = "Tensors of a .safetensors file";

/// The tensors in the order of .npy files on the command line.
constexpr const char* kPositional[] = {"q", "k", "v", "do"};

/// Maps "cu_seqlens_q" to "--cu-seqlens-q".
std::string option_of_role(std::string role) {
    std::replace(role.begin(), role.end(), '_', '-');
    return "--" + role;
}

/// True if files hold this argument. The backward's inputs that are results of the forward are computed instead.
bool is_read(const TensorArgument<BackwardArgs>& argument) {
    return argument.use == Use::input && !is_result(argument);
}

/// True if it is an input of the backward alone.
bool is_backward_only(const TensorArgument<BackwardArgs>& argument) {
    return std::none_of(kTensors<ForwardArgs>.begin(), kTensors<ForwardArgs>.end(),
                        [&](const auto& other) { return std::string_view(other.name) == argument.name; });
}

/// Calls f(argument) for each input of the forward that the backward lacks: those of a cache of keys.
template <class F>
void for_each_of_cache(const F& f) {
    for (const auto& argument : kTensors<ForwardArgs>) {
        const bool in_both =
            std::any_of(kTensors<BackwardArgs>.begin(), kTensors<BackwardArgs>.end(),
                        [&](const auto& other) { return std::string_view(other.name) == argument.name; });
        if (argument.use == Use::input && !in_both) f(argument);
    }
}

/// Reads the files into a map from role to tensor.
class Reader {
 public:
    Reader(const InputOptions& options, Inputs& inputs) : options_(options), inputs_(inputs) { read_files(); }

    /// Finds a tensor by its role; without an option it has its default name.
    TensorView find(const std::string& role) const {
        if (npy_) {
            const auto at = std::find(std::begin(kPositional), std::end(kPositional), role) - std::begin(kPositional);
            if (at < static_cast<std::ptrdiff_t>(inputs_.files.size()))
                return only(inputs_.files[static_cast<std::size_t>(at)]);
            bad_data(inputs_.origin(), "expected a fourth .npy file with do, the gradient of o, for --backward");
        }
        const auto named = options_.names.find(role);
        const std::string& name = named == options_.names.end() ? role : named->second;
        const io::TensorFile& file = inputs_.files.front();
        const io::NamedTensor* tensor = file.find(name);
        if (tensor == nullptr) {
            bad_data(file.origin(), fmt::format("expected a tensor {} ({}), the file has {}{}", io::printable(name),
                                                role, listed(file), naming_text(file, options_.names)));
        }
        return file.view(*tensor);
    }

    /// Finds a tensor that is used only if its option is given. Otherwise notes that the file has one of that name.
    TensorView find_optional(const std::string& role) const {
        if (options_.names.contains(role)) return find(role);
        if (!npy_ && inputs_.files.front().find(role) != nullptr)
            print_note(fmt::format("{} has a tensor {}, which is not used; {} {} uses it",
                                   inputs_.files.front().origin(), role, option_of_role(role), role));
        return {};
    }

 private:
    void read_files() {
        const auto& files = options_.files;
        const auto ends_with = [](const char* end) {
            return [end](const std::string& file) { return file.ends_with(end); };
        };
        npy_ = files.size() == 3 || files.size() == 4;
        const bool fits = npy_ ? std::none_of(files.begin(), files.end(), ends_with(".safetensors"))
                               : files.size() == 1 && !files.front().ends_with(".npy");
        if (!fits) {
            throw UsageError("FILE", fmt::format("expected one .safetensors file, or .npy files q k v [do], got {}",
                                                 fmt::join(files, " ")));
        }
        if (!npy_) {
            inputs_.files.push_back(io::read_safetensors(files.front()));
            inputs_.metadata = inputs_.files.front().metadata();
            return;
        }
        if (!options_.names.empty()) {
            throw UsageError(option_of_role(options_.names.begin()->first),
                             "names a tensor of a .safetensors file, got .npy files");
        }
        const io::NpyOptions how{.bf16 = options_.dtype == "bf16"};
        for (const std::string& file : files) inputs_.files.push_back(io::read_npy(file, how));
    }

    static TensorView only(const io::TensorFile& file) { return file.view(file.tensors().front()); }

    static std::string listed(const io::TensorFile& file) {
        constexpr std::size_t kMost = 20;
        std::string text;
        for (const io::NamedTensor& t : std::span(file.tensors()).first(std::min(file.tensors().size(), kMost))) {
            text += (text.empty() ? "" : ", ") + io::printable(t.name);
        }
        if (text.empty()) return "none";
        return file.tensors().size() > kMost ? fmt::format("{}, and {} more", text, file.tensors().size() - kMost)
                                             : text;
    }

    [[noreturn]] static void bad_data(const std::string& origin, const std::string& message) {
        io::bad_data(origin, message);
    }

    const InputOptions& options_;
    Inputs& inputs_;
    bool npy_ = false;
};

[[noreturn]] void bad_tensor(const Inputs& inputs, const std::string& role, const std::string& message) {
    io::bad_data(inputs.origin(), role + ": " + message);
}

void expect_rank(const Inputs& inputs, const char* role, const TensorView& t) {
    const bool of_cache = inputs.cache.kv_lengths.given() && std::string_view(role) != "q";
    const bool ragged = inputs.layout.ragged && !of_cache;
    const bool fits = ragged ? t.rank == 3 : t.rank == (inputs.layout.unbatched && !of_cache ? 3 : 4);
    if (!fits) {
        bad_tensor(inputs, role,
                   fmt::format("expected {}, got {}",
                               of_cache ? "rank 4, since it is a cache"
                               : ragged ? "rank 3, since the batch is ragged"
                                        : "rank 4 (or 3 in all of q, k, v)",
                               t.describe()));
    }
}

/// Notes if the layout in a file's metadata contradicts the option; the metadata never sets the layout.
void note_other_layout(const Inputs& inputs) {
    const auto stated = inputs.metadata.find("layout");
    if (stated == inputs.metadata.end()) return;
    const bool heads_first = stated->second == "bhsd" || stated->second.starts_with("batch,heads");
    if (heads_first && inputs.layout.layout == Layout::bshd) {
        print_note(fmt::format("the metadata of {} give the layout {}, which --layout bhsd selects", inputs.origin(),
                               io::printable(stated->second)));
    }
}

/// The longest sequence in cu_seqlens; the library rejects entries that are out of order.
std::int64_t longest_sequence(const TensorView& cu_seqlens, std::int64_t total) {
    std::int64_t longest = 0;
    for (std::int64_t b = 0; b + 1 < cu_seqlens.shape[0]; ++b) {
        const std::int64_t begin = cu_seqlen(cu_seqlens, b);
        const std::int64_t end = cu_seqlen(cu_seqlens, b + 1);
        if (begin >= 0 && end >= begin && end <= total) longest = std::max(longest, end - begin);
    }
    return longest;
}

void set_ragged(Inputs& inputs) {
    Problem& p = inputs.problem;
    const bool cache = inputs.cache.kv_lengths.given();
    if (cache && inputs.tensors.cu_seqlens_kv.given())
        throw UsageError("--cu-seqlens-kv", "expected without --kv-lengths, which has the keys of each sequence");
    if (!inputs.tensors.cu_seqlens_q.given())
        throw UsageError("--cu-seqlens-q", "expected with --cu-seqlens-kv, got nothing");
    if (!cache && !inputs.tensors.cu_seqlens_kv.given())
        throw UsageError("--cu-seqlens-kv", "expected with --cu-seqlens-q, got nothing");
    for (const auto& [role, t] :
         {std::pair{"cu_seqlens_q", &inputs.tensors.cu_seqlens_q}, {"cu_seqlens_kv", &inputs.tensors.cu_seqlens_kv}}) {
        if (cache && !t->given()) continue;
        if (t->rank != 1 || t->shape[0] < 1 || is_floating(t->dtype)) {
            bad_tensor(inputs, role, "expected int32 or int64 [batch + 1], got " + t->describe());
        }
    }
    p.ragged = true;
    p.batch = inputs.tensors.cu_seqlens_q.shape[0] - 1;
    p.total_q = inputs.tensors.q.shape[0];
    p.len_q = longest_sequence(inputs.tensors.cu_seqlens_q, p.total_q);
    if (cache) return;
    p.total_kv = inputs.tensors.k.shape[0];
    p.len_kv = longest_sequence(inputs.tensors.cu_seqlens_kv, p.total_kv);
}

/// Sets the fields that follow from a cache: its capacity, and which of its tensors exist.
void set_cache(Inputs& inputs) {
    const ForwardArgs& cache = inputs.cache;
    Problem& p = inputs.problem;
    for_each_of_cache([&](const TensorArgument<ForwardArgs>& argument) {
        if (argument.option.field != nullptr) p.*argument.option.field = (cache.*argument.view).given();
        if (!p.kv_lengths && (cache.*argument.view).given())
            throw UsageError(option_of_role(argument.name), "expected --kv-lengths with it");
    });
    if (!p.kv_lengths) return;
    p.len_kv = inputs.tensors.k.shape[1];
    if (!cache.page_table.given()) return;
    if (cache.page_table.rank != 2)
        bad_tensor(inputs, "page_table", "expected int32 [batch, pages], got " + cache.page_table.describe());
    p.page_size = inputs.tensors.k.shape[1];
    p.len_kv = p.page_size * cache.page_table.shape[1];
}

/// Sets the shapes from q, k and v; the library checks that they agree.
void set_shapes(Inputs& inputs) {
    for (const auto& [role, t] :
         {std::pair{"q", &inputs.tensors.q}, {"k", &inputs.tensors.k}, {"v", &inputs.tensors.v}}) {
        expect_rank(inputs, role, *t);
        const bool of_cache = inputs.cache.kv_lengths.given() && std::string_view(role) != "q";
        *t = of_cache ? FileLayout{.layout = inputs.layout.layout}.canonical(*t) : inputs.layout.canonical(*t);
    }
    Problem& p = inputs.problem;
    if (inputs.layout.ragged) {
        set_ragged(inputs);
    } else {
        p.batch = inputs.tensors.q.shape[0];
        p.len_q = inputs.tensors.q.shape[1];
        p.len_kv = inputs.tensors.k.shape[1];
    }
    const auto of_end = [](const TensorView& t, int back) { return t.shape[static_cast<std::size_t>(t.rank - back)]; };
    p.heads_q = of_end(inputs.tensors.q, 2);
    p.heads_kv = of_end(inputs.tensors.k, 2);
    p.head_dim = of_end(inputs.tensors.q, 1);
    p.head_dim_v = of_end(inputs.tensors.v, 1);
    for (const auto& argument : kTensors<BackwardArgs>) {
        if (is_read(argument) && argument.need == Need::with_option && argument.option.field != nullptr)
            p.*argument.option.field = (inputs.tensors.*argument.view).given();
    }
    p.ragged = inputs.layout.ragged;
    set_cache(inputs);
}

/// Converts a tensor to the dtype of --dtype; without the option it must already have the Problem's dtype.
void set_dtype(Inputs& inputs, bool keep, const std::string& role, TensorView& t) {
    if (!t.given() || t.dtype == inputs.problem.dtype) return;
    if (!is_floating(t.dtype)) bad_tensor(inputs, role, "expected fp64, fp32, fp16 or bf16, got " + t.describe());
    if (keep) {
        bad_tensor(inputs, role,
                   fmt::format("expected {}, the dtype of q, got {}; --dtype converts all to one dtype",
                               name_of(inputs.problem.dtype), name_of(t.dtype)));
    }
    inputs.owned.push_back(converted(role, t, inputs.problem.dtype));
    t = inputs.owned.back().view;
}

}  // namespace

void InputOptions::declare(CLI::App& command, bool required) {
    command.add_option("FILE", files, "One .safetensors file, or .npy files: q k v, and do for --backward")
        ->required(required)
        ->group("Input");
    for (const auto& argument : kTensors<BackwardArgs>) {
        if (!is_read(argument)) continue;
        const std::string role = argument.name;
        const std::string otherwise = argument.need == Need::always ? role : "none";
        command
            .add_option_function<std::string>(
                option_of_role(role), [this, role](const std::string& name) { names[role] = name; },
                fmt::format("{}{}; default {}", argument.about, is_backward_only(argument) ? ", for --backward" : "",
                            otherwise))
            ->type_name("NAME")
            ->group(kFiles);
    }
    for_each_of_cache([&](const TensorArgument<ForwardArgs>& argument) {
        const std::string role = argument.name;
        command
            .add_option_function<std::string>(
                option_of_role(role), [this, role](const std::string& name) { names[role] = name; },
                fmt::format("{}; default none", argument.about))
            ->type_name("NAME")
            ->group(kFiles);
    });
    command
        .add_option("--layout", layout,
                    "bshd (default): [batch, len, heads, dim]; bhsd: [batch, heads, len, dim]; batch may be left out")
        ->type_name("NAME")
        ->group(kFiles);
    command.add_option("--dtype", dtype, "Compute in keep (default, the file's), fp32, bf16 or fp16")
        ->type_name("TYPE")
        ->group(kFiles);
}

void InputOptions::expect_no_names() const {
    if (!names.empty())
        throw UsageError(option_of_role(names.begin()->first), "expected a file with it, which has the tensor");
}

ForwardArgs Inputs::forward_args() const {
    auto args = inputs_of<ForwardArgs>(tensors);
    for_each_of_cache([&](const TensorArgument<ForwardArgs>& argument) { args.*argument.view = cache.*argument.view; });
    return args;
}

std::string Inputs::origin() const {
    std::string text;
    for (const io::TensorFile& file : files) text += (text.empty() ? "" : ", ") + file.origin();
    return text;
}

void rethrow_for_files(const Error& error, const Inputs& inputs) {
    if (error.code() != ErrorCode::invalid_argument) throw Error(error);
    throw Error(ErrorCode::bad_data, inputs.origin(), error.what());
}

void validate_problem_of(const Inputs& inputs) {
    try {
        inputs.problem.validate();
    } catch (const Error& error) {
        rethrow_for_files(error, inputs);
    }
}

Inputs read_inputs(const InputOptions& options, bool backward) {
    Inputs inputs;
    inputs.layout.layout = parse_layout(options.layout);
    const bool keep = options.dtype == "keep";
    if (!keep) inputs.problem.dtype = parse_dtype(options.dtype);
    for (const auto& argument : kTensors<BackwardArgs>) {
        if (!backward && is_backward_only(argument) && options.names.contains(argument.name))
            throw UsageError(option_of_role(argument.name), "expected --backward with it");
    }
    const Reader reader(options, inputs);
    note_other_layout(inputs);
    const auto find = [&](const TensorArgument<BackwardArgs>& argument) {
        return argument.need == Need::always ? reader.find(argument.name) : reader.find_optional(argument.name);
    };
    for (const auto& argument : kTensors<BackwardArgs>) {
        if (is_read(argument) && !is_backward_only(argument)) inputs.tensors.*argument.view = find(argument);
    }
    for_each_of_cache([&](const TensorArgument<ForwardArgs>& argument) {
        inputs.cache.*argument.view = reader.find_optional(argument.name);
    });
    if (backward && inputs.cache.kv_lengths.given())
        throw UsageError("--kv-lengths", "expected a forward with it, since a cache of keys has no gradient");
    inputs.layout.ragged = inputs.tensors.cu_seqlens_q.given() || inputs.tensors.cu_seqlens_kv.given();
    inputs.layout.unbatched = !inputs.layout.ragged && inputs.tensors.q.rank == 3;
    if (keep) inputs.problem.dtype = inputs.tensors.q.dtype;
    if (!is_floating(inputs.tensors.q.dtype))
        bad_tensor(inputs, "q", "expected fp64, fp32, fp16 or bf16, got " + inputs.tensors.q.describe());
    set_shapes(inputs);
    for (const auto& argument : kTensors<BackwardArgs>) {
        if (!is_read(argument)) continue;
        TensorView& t = inputs.tensors.*argument.view;
        if (is_backward_only(argument) && backward) {
            t = find(argument);
            t = argument.shape == ShapeRule::lse ? inputs.layout.canonical_lse(t) : inputs.layout.canonical(t);
        }
        const bool any_of_two = argument.dtype == DTypeRule::fp32_or_problem;
        if (argument.dtype == DTypeRule::problem || (any_of_two && t.dtype != DType::fp32))
            set_dtype(inputs, keep, argument.name, t);
    }
    return inputs;
}

void expect_other_file(const std::string& output, const std::vector<std::string>& inputs) {
    struct stat target {};
    if (::stat(output.c_str(), &target) != 0) return;
    for (const std::string& input : inputs) {
        struct stat status {};
        if (::stat(input.c_str(), &status) == 0 && status.st_dev == target.st_dev && status.st_ino == target.st_ino) {
            throw UsageError("--output", fmt::format("expected another file than the input {}", input));
        }
    }
}

}  // namespace tessera::cli
