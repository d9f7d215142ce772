// SPDX-License-Identifier: Apache-2.0
#include "completion.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <string_view>

#include "device_option.hpp"
#include "learn/lesson.hpp"
#include "parse.hpp"

namespace tessera::cli {
namespace {

/// Splits "a, b, c".
std::vector<std::string> words_of(const std::string& list) {
    std::vector<std::string> words;
    for (std::string_view rest = list; !rest.empty();) {
        const std::size_t comma = rest.find(", ");
        words.emplace_back(rest.substr(0, comma));
        rest.remove_prefix(comma == std::string_view::npos ? rest.size() : comma + 2);
    }
    return words;
}

/// The starts of machine --set: each quantity and an equals sign.
std::vector<std::string> quantities() {
    std::vector<std::string> starts;
    for_each_quantity(model::machines().front(), [&](const char* name, const char*, const model::Quantity&) {
        starts.push_back(std::string(name) + "=");
    });
    return starts;
}

/// The lessons and the further words that learn takes.
std::vector<std::string> lesson_words() {
    std::vector<std::string> words;
    for (const learn::Lesson& lesson : learn::lessons()) words.push_back(std::to_string(lesson.number));
    for (const char* word : {"recap", "exam", "estimate", "again"}) words.emplace_back(word);
    return words;
}

/// True if the words of `text` have this one: "auto (default), cpu" has auto.
bool has_word(const std::string& text, const std::string& word) {
    const auto is_letter = [&](std::size_t at) {
        return at < text.size() && std::isalnum(static_cast<unsigned char>(text[at])) != 0;
    };
    for (std::size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1))
        if ((at == 0 || !is_letter(at - 1)) && !is_letter(at + word.size())) return true;
    return false;
}

/// The known values of options that have a few, by the option's name. --schedule and --backend take other values in
/// other commands, and each description lists its own.
std::vector<std::string> values_of(const std::string& option, const std::string& command,
                                   const std::string& description) {
    static const std::map<std::string, std::vector<std::string>> known = {
        {"--device", words_of(machine_names())},
        {"--compare", words_of(gpu_names())},
        {"--gpu", words_of(gpu_names())},
        {"--schedule", words_of("all, auto, " + schedule_names())},
        {"--pass", {"forward", "backward", "both"}},
        {"--dtype", {"fp32", "bf16", "fp16", "fp64"}},
        {"--backend", {"auto", "cpu", "cuda", "reference"}},
        {"--causal", {"none", "bottom-right", "top-left"}},
        {"--layout", {"bshd", "bhsd"}},
        {"--baseline", {"pytorch", "eager", "math", "efficient", "standard"}},
        {"--by", {"published", "tessera", "flash-attention", "cudnn"}},
        {"--kind", {"normal", "outliers", "large-logits", "index-coded"}},
        {"--mask", {"none", "causal", "lower-right", "bool", "float"}},
    };
    if (option == "SHELL") return completed_shells();
    if (option == "LESSON") return lesson_words();
    if (option == "--set" && command == "machine") return quantities();
    if (option == "NAME" && command == "machine") return words_of(machine_names());
    const auto found = known.find(option);
    if (found == known.end()) return {};
    std::vector<std::string> values = found->second;
    if (option == "--schedule" || option == "--backend")
        std::erase_if(values, [&](const std::string& value) { return !has_word(description, value); });
    return values;
}

/// The first clause of a description, without characters that are special to a shell.
std::string about_of(const std::string& description) {
    std::string text = description.substr(0, description.find(';'));
    for (const char odd : {'\'', '"', '`', '$', '\\', '[', ']'}) std::erase(text, odd);
    std::replace(text.begin(), text.end(), ':', ',');
    constexpr std::size_t kMost = 80;
    if (text.size() > kMost) text = text.substr(0, text.rfind(' ', kMost)) + " ...";
    return text;
}

CompletedOption completed(const CLI::Option& option, const std::string& command) {
    CompletedOption result;
    for (const std::string& name : option.get_lnames()) result.names.push_back("--" + name);
    for (const std::string& name : option.get_snames()) result.names.push_back("-" + name);
    result.about = about_of(option.get_description());
    result.takes_value = option.get_items_expected_max() > 0;
    const std::string name = result.names.empty() ? option.get_name(true, false) : result.names.front();
    result.values = values_of(name, command, option.get_description());
    const std::string type = option.get_type_name();
    result.file = result.values.empty() && (result.names.empty() || type == "FILE");
    if (name == "--device") result.file = true;  // a machine file too; `which` names it --gpu, and takes none
    return result;
}

std::string spaced(const std::vector<std::string>& words) { return fmt::format("{}", fmt::join(words, " ")); }

std::string bash_script(const std::vector<CompletedCommand>& commands) {
    std::vector<std::string> names, global{"--help", "--version", "--json"};
    std::string words, values;
    for (const CompletedCommand& command : commands) {
        names.insert(names.end(), command.names.begin(), command.names.end());
        std::vector<std::string> options;
        const auto pattern = [&](const std::string& end) {
            std::string text;
            for (const std::string& name : command.names)
                text += fmt::format("{}\"{}{}\"", text.empty() ? "" : " | ", name, end);
            return text;
        };
        std::string arguments;
        for (const CompletedOption& option : command.options) {
            options.insert(options.end(), option.names.begin(), option.names.end());
            if (option.names.empty()) {
                arguments = fmt::format(" values=\"{}\" files={}", spaced(option.values), option.file ? 1 : 0);
                continue;
            }
            if (!option.takes_value) continue;
            for (const std::string& name : option.names)
                values += fmt::format("        {}) value=1 values=\"{}\" files={} ;;\n", pattern(" " + name),
                                      spaced(option.values), option.file ? 1 : 0);
        }
        words += fmt::format("        {}) options=\"{}\"{} ;;\n", pattern(""), spaced(options), arguments);
    }
    return fmt::format(R"(# Completion of tessera for bash: source <(tessera completion bash)
_tessera() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD - 1]}}"
    local command="" options="" values="" files=0 value=0 begun="" i
    if [[ $current == "=" ]]; then current=""
    elif [[ $before == "=" ]]; then before="${{COMP_WORDS[COMP_CWORD - 2]}}"; fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "${{COMP_WORDS[i]}}" in
        -*) ;;
        *) command="${{COMP_WORDS[i]}}"; break ;;
        esac
    done
    case "$command $before" in
{2}    esac
    if ((value == 0)); then
        case "$command" in
        "") options="{0} {1}" ;;
{3}        esac
    fi
    COMPREPLY=()
    if ((value == 0)) && [[ -z $command || $current == -* || ($files == 0 && -z $values) ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$current")
        return
    fi
    if [[ $current == *,* ]]; then begun="${{current%,*}},"; fi
    if [[ -n $values ]]; then
        mapfile -t COMPREPLY < <(compgen -P "$begun" -W "$values" -- "${{current##*,}}")
    fi
    if ((files == 1)); then
        local file
        while IFS= read -r file; do COMPREPLY+=("$file"); done < <(compgen -f -- "$current")
        compopt -o filenames 2>/dev/null
    fi
}}
complete -F _tessera tessera
)",
                       spaced(names), spaced(global), values, words);
}

std::string zsh_script(const std::vector<CompletedCommand>& commands) {
    std::string names, cases;
    for (const CompletedCommand& command : commands) {
        std::string pattern;
        for (const std::string& name : command.names) {
            names += fmt::format("        '{}:{}'\n", name, command.about);
            pattern += (pattern.empty() ? "" : "|") + name;
        }
        cases += fmt::format("    {})\n        _arguments -s", pattern);
        for (const CompletedOption& option : command.options) {
            const std::string action = !option.values.empty() ? fmt::format("({})", spaced(option.values))
                                       : option.file          ? "_files"
                                                              : " ";
            if (option.names.empty()) cases += fmt::format(" \\\n            '*:argument:{}'", action);
            for (const std::string& name : option.names)
                cases += fmt::format(" \\\n            '*{}[{}]{}'", name, option.about,
                                     option.takes_value ? ":value:" + action : "");
        }
        cases += "\n        ;;\n";
    }
    return fmt::format(R"(#compdef tessera
# Completion of tessera for zsh: as a file _tessera in a folder of $fpath, or source <(tessera completion zsh)
_tessera() {{
    local -a commands
    commands=(
{}    )
    if (( CURRENT == 2 )); then
        _describe command commands
        _arguments '--help[Print this help and exit]' '--version[Print the version and exit]'
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
{}    esac
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _tessera "$@"
else
    compdef _tessera tessera
fi
)",
                       names, cases);
}

std::string fish_script(const std::vector<CompletedCommand>& commands) {
    std::string text =
        "# Completion of tessera for fish: tessera completion fish | source\n"
        "complete -c tessera -f\n";
    for (const CompletedCommand& command : commands) {
        for (const std::string& name : command.names)
            text += fmt::format("complete -c tessera -n __fish_use_subcommand -a {} -d '{}'\n", name, command.about);
        const std::string seen = fmt::format("'__fish_seen_subcommand_from {}'", spaced(command.names));
        for (const CompletedOption& option : command.options) {
            std::string line = fmt::format("complete -c tessera -n {}", seen);
            for (const std::string& name : option.names)
                line += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
            if (!option.values.empty()) line += fmt::format(" -a '{}'", spaced(option.values));
            if (option.file) line += option.names.empty() ? " -F" : " -r -F";
            else if (option.takes_value && !option.names.empty()) line += " -x";
            text += line + fmt::format(" -d '{}'\n", option.about);
        }
    }
    return text;
}

}  // namespace

std::vector<CompletedCommand> completed_commands(const CLI::App& app) {
    std::vector<CompletedCommand> commands;
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
        CompletedCommand one{
            .names = {command->get_name()}, .about = about_of(command->get_description()), .options = {}};
        for (const std::string& alias : command->get_aliases()) one.names.push_back(alias);
        for (const CLI::Option* option : command->get_options())
            one.options.push_back(completed(*option, command->get_name()));
        commands.push_back(std::move(one));
    }
    return commands;
}

std::vector<std::string> completed_shells() { return {"bash", "zsh", "fish"}; }

std::string completion_script(const std::string& shell, const std::vector<CompletedCommand>& commands) {
    if (shell == "bash") return bash_script(commands);
    return shell == "zsh" ? zsh_script(commands) : fish_script(commands);
}

}  // namespace tessera::cli
