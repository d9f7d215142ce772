// SPDX-License-Identifier: Apache-2.0
#include "report/chart.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "report/figures.hpp"
#include "tessera/error.hpp"

namespace tessera::report {
namespace {

using plot::Figure;
using plot::Panels;
using plot::Series;

constexpr std::size_t kKinds = 7;
using Parts = std::array<std::string, kKinds>;

/// Returns the parts that describe a group, the most important first.
Parts parts_of(const Group& g) {
    return {g.pass,
            g.dtype,
            "head_dim " + g.head_dim,
            g.mask == "full" ? "full mask" : g.mask,
            g.heads + (g.heads == "1" ? " head" : " heads"),
            g.others,
            ""};
}

bool has(const Group& group, const std::string& part) {
    const Parts parts = parts_of(group);
    if (std::find(parts.begin(), parts.end(), part) != parts.end()) return true;
    return fmt::format(", {}, ", group.others).find(fmt::format(", {}, ", part)) != std::string::npos;
}

bool is_selected(const Group& group, const ChartOptions& options) {
    const auto in_group = [&](const std::string& part) { return has(group, part); };
    std::set<std::int64_t> lengths;
    for (const Row& row : group.rows) lengths.insert(row.record.len_kv);
    return lengths.size() > 1 && std::none_of(options.without.begin(), options.without.end(), in_group) &&
           std::all_of(options.only.begin(), options.only.end(), [&](const std::vector<std::string>& choices) {
               return std::any_of(choices.begin(), choices.end(), in_group);
           });
}

std::vector<const Group*> selected_groups(const DeviceRows& device, const ChartOptions& options) {
    std::vector<const Group*> groups;
    for (const Group& group : device.groups) {
        if (is_selected(group, options)) groups.push_back(&group);
    }
    return groups;
}

std::vector<std::string> present_in(const DeviceRows& device, const std::vector<const Group*>& groups) {
    const auto measured = [&](const std::string& label) {
        return std::any_of(groups.begin(), groups.end(), [&](const Group* g) { return !g->of(label).empty(); });
    };
    std::vector<std::string> present;
    std::copy_if(device.labels.begin(), device.labels.end(), std::back_inserter(present), measured);
    return present;
}

bool has_lines(const DeviceRows& device, const std::vector<const Group*>& groups, const ChartOptions& options) {
    const std::vector<std::string> present = present_in(device, groups);
    return std::all_of(options.lines.begin(), options.lines.end(), [&](const std::string& line) {
        return std::find(present.begin(), present.end(), line) != present.end();
    });
}

std::vector<std::string> lines_of(const DeviceRows& device, const std::vector<const Group*>& groups,
                                  const ChartOptions& options) {
    const std::vector<std::string> present = present_in(device, groups);
    for (const std::string& line : options.lines) {
        if (std::find(present.begin(), present.end(), line) == present.end())
            throw Error(ErrorCode::invalid_argument, "--line",
                        fmt::format("expected one of \"{}\", got \"{}\"", fmt::join(present, "\", \""), line));
    }
    return options.lines.empty() ? present : options.lines;
}

/// Joins "32 heads", "16 heads", "8 heads" to "32, 16 or 8 heads".
std::string choice_of(std::vector<std::string> values) {
    const std::string last = values.back();
    const std::size_t space = last.rfind(' ');
    const std::string unit = space == std::string::npos ? "" : last.substr(space);
    values.pop_back();
    for (std::string& value : values) {
        if (!unit.empty() && value.ends_with(unit)) value.resize(value.size() - unit.size());
    }
    return values.empty() ? last : fmt::format("{} or {}", fmt::join(values, ", "), last);
}

/// The titles of the panels. A panel's title has the fewest parts that distinguish it from the other panels; the
/// remaining parts are in `common`, once for all of them.
struct Titles {
    std::vector<std::string> panels;
    std::string common;
};

Titles titles_of(const std::vector<const Group*>& groups) {
    std::vector<Parts> parts;
    for (const Group* group : groups) parts.push_back(parts_of(*group));
    std::array<bool, kKinds> in_title{};
    const auto values = [&](std::size_t kind) {
        std::vector<std::string> found;
        for (const Parts& p : parts) {
            if (!p[kind].empty() && std::find(found.begin(), found.end(), p[kind]) == found.end())
                found.push_back(p[kind]);
        }
        return found;
    };
    const auto title = [&](const Parts& p) {
        std::vector<std::string> words;
        for (std::size_t kind = 0; kind < kKinds; ++kind) {
            if (in_title[kind] && !p[kind].empty()) words.push_back(p[kind]);
        }
        return fmt::format("{}", fmt::join(words, ", "));
    };
    const auto distinct = [&] {
        std::set<std::string> seen;
        return std::all_of(parts.begin(), parts.end(), [&](const Parts& p) { return seen.insert(title(p)).second; });
    };
    for (std::size_t kind = 0; kind < kKinds; ++kind) in_title[kind] = values(kind).size() > 1;
    for (std::size_t kind = kKinds; kind-- > 0;) {
        if (!in_title[kind]) continue;
        in_title[kind] = false;
        if (!distinct()) in_title[kind] = true;
    }
    Titles titles;
    std::vector<std::string> common;
    for (const Parts& p : parts) titles.panels.push_back(title(p));
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
        if (in_title[kind] || values(kind).empty()) continue;
        common.push_back(choice_of(values(kind)));
    }
    titles.common = fmt::format("{}", fmt::join(common, ", "));
    return titles;
}

/// Formats a number as "16,384".
std::string grouped(std::int64_t number) {
    std::string text = fmt::format("{}", number);
    for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > 0; at -= 3)
        text.insert(static_cast<std::size_t>(at), 1, ',');
    return text;
}

/// Returns "16,384 tokens in all" or "batch 1": the batch of a call of one length.
std::string batch_text(const std::vector<const Group*>& groups) {
    std::set<std::int64_t> batches, tokens;
    for (const Group* group : groups) {
        for (const Row& row : group->rows) {
            batches.insert(row.record.batch);
            tokens.insert(row.record.batch * row.record.len_q);
        }
    }
    if (tokens.size() == 1) return fmt::format(", {} tokens in all", grouped(*tokens.begin()));
    return batches.size() == 1 ? fmt::format(", batch {}", *batches.begin()) : "";
}

std::string joined(const std::set<std::string>& texts) { return fmt::format("{}", fmt::join(texts, ", ")); }

/// Returns the commit or versions, and the date, of a line's measurements. The cuDNN version appears for cuDNN only.
std::string source_of(const std::vector<const Group*>& groups, const std::string& label) {
    static const std::set<std::string> surroundings = {"tessera", "driver", "cuda", "nvcc"};
    std::set<std::string> days, sources;
    for (const Group* group : groups) {
        for (const Row* row : group->of(label)) {
            const measure::Record& r = row->record;
            days.insert(r.date.substr(0, 10));
            if (r.by == "tessera") {
                if (!r.commit.empty()) sources.insert("commit " + r.commit);
                continue;
            }
            for (const auto& [name, version] : r.versions) {
                if (surroundings.count(name) == 0 && (name != "cudnn" || r.by == "cudnn"))
                    sources.insert(name + " " + version);
            }
        }
    }
    return fmt::format("{}: {}{}{}", label, joined(sources), sources.empty() ? "" : "; ", joined(days));
}

double highest_rate(const std::vector<const Group*>& groups, const std::vector<std::string>& lines) {
    double most = 0;
    for (const Group* group : groups) {
        for (const std::string& label : lines) {
            for (const Row* row : group->of(label)) most = std::max(most, row->record.tflops);
        }
    }
    return most;
}

/// Returns a round end of the axis at or above the highest rate.
double round_end(double most) {
    const double step = std::pow(10.0, std::floor(std::log10(most)));
    for (const double part : {0.2, 0.5, 1.0}) {
        if (most / (part * step) <= 8) return std::ceil(most / (part * step)) * part * step;
    }
    return std::ceil(most / step) * step;
}

Figure panel_of(const DeviceRows& device, const Group& group, const std::vector<std::string>& lines, const Unit& unit) {
    Figure figure;
    figure.x.scale = plot::Scale::log2;
    figure.y.from_zero = true;
    for (const std::string& label : lines) {
        Series series = line_style(device, label);
        for (const Row* row : group.of(label)) {
            const measure::Record& r = row->record;
            const double rate = r.tflops * unit.per_tflops;
            series.points.push_back({static_cast<double>(r.len_kv), rate,
                                     fmt::format("{}, {} x {}: {:.4g} {}", label, r.batch, r.len_kv, rate, unit.name)});
        }
        if (!series.points.empty()) figure.series.push_back(std::move(series));
    }
    // The last drawn line lies on top, which is the first of the legend.
    std::reverse(figure.series.begin(), figure.series.end());
    return figure;
}

}  // namespace

Panels chart(const Sorted& sorted, const ChartOptions& options) {
    const DeviceRows* device = nullptr;
    std::vector<const Group*> groups;
    for (const DeviceRows& other : sorted.devices) {
        std::vector<const Group*> found = selected_groups(other, options);
        const auto fits = [&](const DeviceRows& d, const std::vector<const Group*>& its) {
            return std::make_pair(has_lines(d, its, options), its.size());
        };
        if (found.empty() || (device != nullptr && fits(other, found) <= fits(*device, groups))) continue;
        groups = std::move(found), device = &other;
    }
    if (device == nullptr)
        throw Error(ErrorCode::invalid_argument, "--only",
                    "expected parts of measured calls of several lengths, got none");
    const std::vector<std::string> lines = lines_of(*device, groups, options);
    const double most = highest_rate(groups, lines);
    const Unit unit = most < 5 ? Unit{"GFLOP/s", 1000} : Unit{};
    const Titles titles = titles_of(groups);
    Panels panels{.title = options.title, .columns = std::min(options.columns, groups.size())};
    panels.subtitle = fmt::format("{} by sequence length (tokens), higher is faster. {}: {}{}.", unit.name,
                                  device->name, titles.common, batch_text(groups));
    for (std::size_t i = 0; i < groups.size(); ++i) {
        Figure figure = panel_of(*device, *groups[i], lines, unit);
        figure.title = titles.panels[i];
        figure.title_size = 13;
        figure.dense = true;
        figure.height = 226;
        figure.y.most = round_end(most * unit.per_tflops);
        panels.panels.push_back(std::move(figure));
    }
    if (!options.note.empty()) panels.footer.push_back(options.note);
    for (const std::string& label : lines) {
        panels.legend.push_back(line_style(*device, label));
        panels.footer.push_back(source_of(groups, label));
    }
    return panels;
}

}  // namespace tessera::report
