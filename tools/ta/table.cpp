#include "tools/ta/table.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>

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
    const double size = std::fabs(x);
    const int before = size >= 1 ? int(std::log10(size)) + 1 : 1;
    // A value too small for four decimals keeps its first digits.
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

void print_table(const std::vector<Json>& rows, const std::vector<Column>& columns) {
    struct Printed {
        std::string head;
        std::vector<std::string> cells;
        bool right = true;
        size_t width = 0;
    };
    std::vector<Printed> table;
    std::string shared;
    for (size_t c = 0; c < columns.size(); ++c) {
        const Column& column = columns[c];
        Printed p{column.head, {}, true, 0};
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
        if (c > 0 && rows.size() > 1 && std::ranges::all_of(p.cells, [&](const std::string& s) { return s == p.cells[0]; })) {
            shared += (shared.empty() ? "" : ", ") + p.head + " " + p.cells[0];
            continue;
        }
        p.width = p.head.size();
        for (const std::string& s : p.cells) p.width = std::max(p.width, s.size());
        table.push_back(std::move(p));
    }
    if (!shared.empty()) std::printf("in all rows: %s\n", shared.c_str());
    const auto print = [&](const auto& text_of) {
        std::string line;
        for (const Printed& p : table) {
            const std::string& text = text_of(p);
            const std::string space(p.width - text.size(), ' ');
            line += (line.empty() ? "" : "  ") + (p.right ? space + text : text + space);
        }
        line.erase(line.find_last_not_of(' ') + 1);
        std::printf("%s\n", line.c_str());
    };
    print([](const Printed& p) -> const std::string& { return p.head; });
    for (size_t r = 0; r < rows.size(); ++r) print([&](const Printed& p) -> const std::string& { return p.cells[r]; });
    std::fflush(stdout);
}

std::vector<Column> columns_of_bench(const std::vector<Json>& rows) {
    // Keys that are not here come behind those before "|", in the order of their names.
    static constexpr std::array<const char*, 36> kOrder = {
        "what",      "beside",       "pages",       "policy",    "route",           "direction",    "node",
        "ranks",     "bits",         "batch",       "queries",   "block_bytes",     "blocks",       "tokens",
        "layers",    "percent_away", "|",           "bytes",     "exchanged_bytes", "p50_us",       "p99_us",
        "alone_us",  "beside_us",    "one_rank_us", "ranks_us",  "fetch_ms",        "attention_ms", "gb_s",
        "link_gb_s", "ceiling_gb_s", "percent",     "nccl_gb_s", "tera_ops_s",      "times_faster", "loses_percent",
        "difference"};
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
        // "block_bytes" is "block" in bytes; of a key that is a unit alone `name` says what it measures.
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
