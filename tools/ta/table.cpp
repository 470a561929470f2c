#include "tools/ta/table.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>

namespace ta::tools {
namespace {

constexpr std::array<const char*, 5> kUnits = {"B", "KB", "MB", "GB", "TB"};

size_t unit_of(double bytes) {
    size_t unit = 0;
    for (; bytes >= 1000 && unit + 1 < kUnits.size(); ++unit) bytes /= 1000;
    return unit;
}

// Four significant digits, never an exponent.
std::string number_text(double x) {
    if (!std::isfinite(x)) return "-";
    if (x == 0) return "0";
    const double size = std::fabs(x);
    const int before = size >= 1 ? int(std::log10(size)) + 1 : 1;
    // A value too small for four decimals keeps two significant digits.
    if (size > 0 && size < 1e-3) {
        char text[32];
        std::snprintf(text, sizeof text, "%.2g", x);
        return text;
    }
    char text[64];
    std::snprintf(text, sizeof text, "%.*f", std::clamp(4 - before, 0, 3), x);
    return text;
}

std::string cell_text(const Json& row, const Column& column, size_t unit) {
    const auto at = row.find(column.key);
    if (at == row.end() || at->is_null()) return "";
    if (at->is_string()) return at->get<std::string>();
    if (at->is_boolean()) return at->get<bool>() ? "yes" : "no";
    if (!at->is_number()) return at->dump();
    if (column.bytes && unit > 0) return number_text(at->get<double>() / std::pow(1000.0, double(unit)));
    if (at->is_number_integer()) return at->dump();
    return number_text(at->get<double>());
}

// Breaks a text at spaces. A word longer than `width` gets a line of its own.
std::vector<std::string> wrapped(const std::string& text, size_t width) {
    if (text.size() <= width) return {text};
    std::vector<std::string> lines;
    std::istringstream words(text);
    for (std::string word; words >> word;) {
        if (lines.empty() || lines.back().size() + 1 + word.size() > width)
            lines.push_back(word);
        else
            lines.back() += " " + word;
    }
    if (lines.empty()) lines.emplace_back();
    return lines;
}
size_t longest(const std::vector<std::string>& lines) {
    size_t most = 0;
    for (const std::string& line : lines) most = std::max(most, line.size());
    return most;
}

struct PrintedColumn {
    std::string head;
    std::vector<std::string> cells;
    bool right = true, is_case = false;
    size_t width = 0;

    // Makes the column as narrow as its words allow. Text cells are broken if they are wider than `most_text`.
    void shrink(size_t most_text) {
        size_t cell = longest(cells);
        if (!right && cell > most_text) {
            cell = most_text;
            for (const std::string& c : cells) cell = std::max(cell, longest(wrapped(c, most_text)));
        }
        width = std::max(cell, longest(wrapped(head, 1)));
    }
};
using PrintedColumns = std::vector<PrintedColumn>;

size_t width_of(const PrintedColumns& columns) {
    size_t width = 0;
    for (const PrintedColumn& c : columns) width += c.width + 2;
    return width - std::min<size_t>(width, 2);
}

// Prints one text per column, each broken to the column's width. `down`: all end on the last line.
void print_row(const PrintedColumns& columns, bool down, const auto& text_of) {
    std::vector<std::vector<std::string>> texts;
    size_t height = 0;
    for (const PrintedColumn& c : columns) {
        const std::string& text = text_of(c);
        texts.push_back(wrapped(text, c.width));
        height = std::max(height, texts.back().size());
    }
    for (size_t row = 0; row < height; ++row) {
        std::string line;
        for (size_t i = 0; i < columns.size(); ++i) {
            const size_t above = down ? height - texts[i].size() : 0;
            const std::string text = row >= above && row - above < texts[i].size() ? texts[i][row - above] : "";
            const std::string space(columns[i].width - std::min(columns[i].width, text.size()), ' ');
            line += (i == 0 ? "" : "  ") + (columns[i].right ? space + text : text + space);
        }
        line.erase(line.find_last_not_of(' ') + 1);
        std::printf("%s\n", line.c_str());
    }
}

}  // namespace

std::string bytes_text(uint64_t bytes) {
    const size_t unit = unit_of(double(bytes));
    return (unit == 0 ? std::to_string(bytes) : number_text(double(bytes) / std::pow(1000.0, double(unit)))) + " " +
           kUnits[unit];
}

std::string hex_text(uint64_t value) {
    char text[32];
    std::snprintf(text, sizeof text, "0x%016llx", (unsigned long long)value);
    return text;
}

size_t line_width() {
    winsize size{};
    const bool terminal = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return terminal ? std::max<size_t>(40, size.ws_col) : 100;
}

void print_wrapped(const std::string& label, const std::string& text) {
    std::string begin = label;
    for (const std::string& line : wrapped(text, std::max(line_width(), label.size() + 20) - label.size())) {
        std::printf("%s%s\n", begin.c_str(), line.c_str());
        begin.assign(label.size(), ' ');
    }
}

void print_table(const std::vector<Json>& rows, const std::vector<Column>& columns) {
    PrintedColumns table;
    std::string shared;
    for (size_t c = 0; c < columns.size(); ++c) {
        const Column& column = columns[c];
        PrintedColumn p{column.head, {}, true, column.is_case, 0};
        size_t unit = 0;
        if (column.bytes) {
            double most = 0;
            for (const Json& row : rows) {
                if (row.contains(column.key) && row[column.key].is_number())
                    most = std::max(most, row[column.key].get<double>());
            }
            unit = unit_of(most);
            p.head += (p.head.empty() ? "" : " ") + std::string("(") + kUnits[unit] + ")";
        }
        for (const Json& row : rows) {
            p.cells.push_back(cell_text(row, column, unit));
            if (row.contains(column.key) && row[column.key].is_string()) p.right = false;
        }
        const bool empty = std::ranges::all_of(p.cells, [](const std::string& s) { return s.empty(); });
        if (empty) continue;
        const bool may_share = rows.size() > 1 && (c > 0 || (columns.size() > 1 && columns[1].is_case));
        if (may_share && std::ranges::all_of(p.cells, [&](const std::string& s) { return s == p.cells[0]; })) {
            shared += (shared.empty() ? "" : ", ") + p.head + " " + p.cells[0];
            continue;
        }
        p.width = std::max(p.head.size(), longest(p.cells));
        table.push_back(std::move(p));
    }
    if (!shared.empty()) print_wrapped("in all rows: ", shared);
    const size_t limit = line_width();
    if (width_of(table) > limit)
        for (PrintedColumn& p : table) p.shrink(limit * 2 / 5);
    if (table.empty()) return;
    // Each part repeats the columns that say what was measured.
    auto first = table.begin() + 1;
    while (first != table.end() && first->is_case) ++first;
    if (width_of({table.begin(), first}) > limit / 2) first = table.begin() + 1;
    const PrintedColumns cases(table.begin(), first);
    PrintedColumns part = cases;
    const auto print_part = [&] {
        print_row(part, true, [](const PrintedColumn& p) -> const std::string& { return p.head; });
        for (size_t r = 0; r < rows.size(); ++r)
            print_row(part, false, [r](const PrintedColumn& p) -> const std::string& { return p.cells[r]; });
    };
    for (; first != table.end(); ++first) {
        part.push_back(*first);
        if (width_of(part) <= limit || part.size() == cases.size() + 1) continue;
        part.pop_back();
        print_part();
        std::printf("\n");
        part = cases;
        part.push_back(*first);
    }
    print_part();
    std::fflush(stdout);
}

std::vector<Column> columns_of_bench(const std::vector<Json>& rows) {
    // Keys that are not listed here take the place of "|", ordered by name.
    static constexpr auto kOrder = std::to_array<const char*>({"what",
                                                               "pages",
                                                               "route",
                                                               "node",
                                                               "ranks",
                                                               "bits",
                                                               "batch",
                                                               "queries",
                                                               "block_bytes",
                                                               "blocks",
                                                               "tokens",
                                                               "over",
                                                               "layers",
                                                               "percent_on_host",
                                                               "percent_on_peer",
                                                               "q_heads",
                                                               "kv_heads",
                                                               "head_dim",
                                                               "batch_invariant",
                                                               "|",
                                                               "bytes",
                                                               "exchanged_bytes",
                                                               "p50_us",
                                                               "p99_us",
                                                               "alone_us",
                                                               "beside_us",
                                                               "one_rank_us",
                                                               "ranks_us",
                                                               "fetch_ms",
                                                               "attention_ms",
                                                               "gb_s",
                                                               "link_gb_s",
                                                               "ceiling_gb_s",
                                                               "percent",
                                                               "nccl_gb_s",
                                                               "tera_ops_s",
                                                               "times_faster",
                                                               "loses_percent",
                                                               "difference"});
    const auto place = [](const std::string& key) {
        const auto at = std::ranges::find(kOrder, key);
        return (at == kOrder.end() ? std::ranges::find(kOrder, std::string("|")) : at) - kOrder.begin();
    };
    std::vector<std::string> keys;
    for (const Json& row : rows) {
        for (const auto& item : row.items()) {
            if (item.key() != "part" && std::ranges::find(keys, item.key()) == keys.end()) keys.push_back(item.key());
        }
    }
    std::ranges::sort(keys);
    std::ranges::stable_sort(keys, {}, place);
    std::vector<Column> columns;
    for (const std::string& key : keys) {
        Column column{key, key};
        column.is_case = place(key) < place("|");
        // "block_bytes" becomes "block", in bytes. If a key is only a unit, `name` says what it measures.
        const auto ends = [&](const std::string& suffix, const char* name, const char* unit) {
            if (!key.ends_with(suffix)) return false;
            column.head = key.size() == suffix.size() ? name : key.substr(0, key.size() - suffix.size());
            while (column.head.ends_with('_')) column.head.pop_back();
            if (*unit) column.head += " (" + std::string(unit) + ")";
            return true;
        };
        column.bytes = ends("bytes", "size", "");
        if (!column.bytes && !ends("_us", "", "us") && !ends("_ms", "", "ms") && !ends("gb_s", "rate", "GB/s") &&
            !ends("tera_ops_s", "rate", "Tops/s") && !ends("percent", "of ceiling", "%"))
            ends("_seconds", "", "s");
        if (key.starts_with("percent_")) column.head = key.substr(std::string("percent_").size()) + " (%)";
        std::ranges::replace(column.head, '_', ' ');
        columns.push_back(std::move(column));
    }
    return columns;
}

Progress::Progress() : terminal_(isatty(STDERR_FILENO)) {}

void Progress::show(const std::string& text) {
    if (!terminal_) return;
    std::fprintf(stderr, "\r\033[K%s", text.c_str());
    std::fflush(stderr);
    shown_ = true;
}

void Progress::clear() {
    if (shown_) std::fprintf(stderr, "\r\033[K");
    shown_ = false;
}

}  // namespace ta::tools
