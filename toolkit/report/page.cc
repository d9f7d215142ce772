// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "plot/style.hpp"
#include "plot/svg.hpp"
#include "plot/text.hpp"
#include "report/figures.hpp"
#include "report/report.hpp"

namespace tessera::report {
namespace {

using plot::escaped;

constexpr const char* kLayout =
    "*{box-sizing:border-box}"
    "body{margin:0;background:var(--page);color:var(--plot-ink);line-height:1.5;font-size:1rem;"
    "-webkit-text-size-adjust:100%}"
    "main,header{max-width:1520px;margin:0 auto;padding:0 16px}"
    "h1{font-size:1.7rem;margin:1.2em 0 .2em}h2{font-size:1.35rem;margin:2em 0 .2em}h3{font-size:1.1rem;margin:1.6em 0 "
    ".5em}"
    "p{margin:.3em 0;max-width:75ch;color:var(--plot-quiet)}"
    "nav{display:flex;flex-wrap:wrap;gap:.4em 1.2em;margin:.8em 0}"
    "a{color:var(--plot-c0)}"
    ".plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,380px),1fr));gap:14px}"
    "figure{margin:0;padding:8px;background:var(--plot-surface);border:1px solid var(--plot-grid);border-radius:10px}"
    ".plot{display:block;width:100%;height:auto}"
    "details{margin:.6em 0}summary{cursor:pointer;padding:.4em 0;color:var(--plot-c0)}"
    ".scroll{overflow-x:auto;border:1px solid var(--plot-grid);border-radius:10px;background:var(--plot-surface)}"
    "table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums;width:100%}"
    "th,td{padding:.3em .7em;text-align:left;white-space:nowrap;border-bottom:1px solid var(--plot-grid)}"
    "th{color:var(--plot-quiet);font-weight:600}.number{text-align:right}"
    "footer{margin:3em auto 2em;color:var(--plot-quiet);font-size:.875rem}";

std::string styles() {
    const auto theme = [](plot::Theme which, const char* page) {
        return fmt::format(":root{{--page:{};{}}}", page, plot::css_variables(which));
    };
    return fmt::format(":root{{color-scheme:light dark;font-family:{}}}{}@media (prefers-color-scheme:dark){{{}}}{}{}",
                       plot::kFontFamily, theme(plot::Theme::light, "#f5f6f8"), theme(plot::Theme::dark, "#0d0f12"),
                       kLayout, plot::css_rules());
}

/// The parts of a device's section, in order.
struct Part {
    const char* id;
    const char* name;
    const char* about;
    std::vector<plot::Figure> figures;
};

/// Sorts figures by their number of points, because only the first ones are shown unfolded.
std::vector<plot::Figure> fullest_first(std::vector<plot::Figure> figures) {
    const auto points = [](const plot::Figure& figure) {
        std::size_t sum = 0;
        for (const plot::Series& series : figure.series) sum += series.points.size();
        return sum;
    };
    std::stable_sort(figures.begin(), figures.end(),
                     [&](const plot::Figure& a, const plot::Figure& b) { return points(a) > points(b); });
    return figures;
}

std::vector<Part> parts_of(const DeviceRows& device) {
    return {
        {"speed", "Speed by length", "Only visible pairs of a query and a key count. Higher is faster.",
         fullest_first(speed_figures(device))},
        {"speed-up", "Speed-up", "The speed relative to the kernel named in the title, which is the line at 1.",
         fullest_first(speed_up_figures(device))},
        {"roofline", "Roofline",
         "Measured rates under the limits of the device. Left of the ridge the limit is memory, right of it the GEMMs, "
         "or the exponentials if their line is lower.",
         fullest_first(roofline_figures(device))},
        {"predicted", "Predicted against measured", "The model's time for the same call. On the line they agree.",
         prediction_figures(device)}};
}

std::string table_text(const DeviceRows& device) {
    constexpr std::size_t kFirstNumber = 7;  // columns before it hold words
    const auto columns = table_columns(device);
    const auto open = [&](const char* tag, std::size_t c) {
        const bool number = c >= kFirstNumber && columns[c] != "bound";
        return fmt::format("<{}{}>", tag, number ? " class=\"number\"" : "");
    };
    std::string text = "<div class=\"scroll\"><table><thead><tr><th>pass</th>";
    for (std::size_t c = 0; c < columns.size(); ++c) text += open("th", c) + escaped(columns[c]) + "</th>";
    text += "</tr></thead><tbody>\n";
    for (const Group& group : device.groups) {
        for (const Row& row : group.rows) {
            text += "<tr><td>" + escaped(group.pass) + "</td>";
            const auto cells = table_cells(device, group, row);
            for (std::size_t c = 0; c < cells.size(); ++c) text += open("td", c) + escaped(cells[c]) + "</td>";
            text += "</tr>\n";
        }
    }
    return text + "</tbody></table></div>";
}

/// Links to the parts of a device's section.
std::string nav_text(const std::vector<Part>& parts, const std::string& id) {
    std::string text = "<nav>";
    for (const Part& part : parts) {
        if (!part.figures.empty()) text += fmt::format("<a href=\"#{}-{}\">{}</a>", id, part.id, part.name);
    }
    return text + fmt::format("<a href=\"#{}-all\">Table</a></nav>\n", id);
}

std::string device_text(const DeviceRows& device, const std::string& id) {
    const Provenance from = provenance(device);
    const std::vector<Part> parts = parts_of(device);
    std::string text =
        fmt::format("<section id=\"{}\"><h2>{}</h2>\n<p>{}.</p>\n", id, escaped(device.name), escaped(from.when));
    for (const std::string& verdict : verdicts(device)) text += fmt::format("<p><b>{}</b></p>\n", escaped(verdict));
    for (const char* pass : {"forward", "backward"}) {
        if (const auto accuracy = accuracy_text(predicted_rows(device, pass)); !accuracy.empty())
            text += fmt::format("<p>{}: {}.</p>\n", pass, accuracy);
    }
    if (!from.versions.empty())
        text += fmt::format("<details><summary>Versions</summary><p>{}</p></details>\n", escaped(from.versions));
    text += nav_text(parts, id);
    for (const Part& part : parts) {
        if (part.figures.empty()) continue;
        text += fmt::format("<h3 id=\"{}-{}\">{}</h3>\n<p>{}</p>\n<div class=\"plots\">\n", id, part.id, part.name,
                            part.about);
        constexpr std::size_t kShown = 3;  // figures shown of a part; four parts make a dozen
        for (std::size_t i = 0; i < part.figures.size(); ++i) {
            if (i == kShown)
                text += fmt::format("</div>\n<details><summary>{} more</summary><div class=\"plots\">\n",
                                    part.figures.size() - kShown);
            text += "<figure>" + plot::svg(part.figures[i], plot::Home::page) + "</figure>\n";
        }
        text += part.figures.size() > kShown ? "</div></details>\n" : "</div>\n";
    }
    text += fmt::format("<details id=\"{}-all\"><summary>All {} measurements</summary>\n{}\n</details></section>\n", id,
                        device.count(), table_text(device));
    return text;
}

}  // namespace

std::size_t plots_of(const DeviceRows& device) {
    std::size_t count = 0;
    for (const Part& part : parts_of(device)) count += part.figures.size();
    return count;
}

std::string html_page(const Sorted& sorted, const std::string& title) {
    std::string text = fmt::format(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">{2}"
        "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>{0}</title>\n<style>{1}</style>"
        "</head>\n<body><header><h1>{0}</h1>\n<nav>",
        escaped(title), styles(), kHtmlMark);
    for (std::size_t i = 0; i < sorted.devices.size(); ++i)
        text += fmt::format("<a href=\"#d{}\">{}</a>", i, escaped(sorted.devices[i].name));
    text += "</nav></header>\n<main>\n";
    for (std::size_t i = 0; i < sorted.devices.size(); ++i)
        text += device_text(sorted.devices[i], fmt::format("d{}", i));
    text +=
        "<footer>Times are medians. Rates count the GEMMs of visible pairs: forward 2 (d + dv), backward "
        "2 (3 d + 2 dv) for each.</footer>\n</main></body></html>\n";
    return text;
}

}  // namespace tessera::report
