// Output for people: tables, bytes in units, a line of progress.
#pragma once

#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ta::tools {

using Json = nlohmann::ordered_json;

// "1.5 MB", decimal; "512 B".
std::string bytes_text(uint64_t bytes);
// "0x00000000deadbeef".
std::string hex_text(uint64_t value);

struct Column {
    std::string key;
    std::string head;    // with the unit, but for bytes, whose unit follows from the largest value
    bool bytes = false;  // a number of bytes
};

// Rows are objects; a key that a row lacks is an empty cell. Numbers are right-aligned. Values shared by all rows stand once above,
// but for the first column.
void print_table(const std::vector<Json>& rows, const std::vector<Column>& columns);

// The columns of benchmark rows: what was measured first, then sizes, times, rates; units from the names of the keys.
std::vector<Column> columns_of_bench(const std::vector<Json>& rows);

// A line on a terminal's standard error that the next one overwrites; nothing elsewhere.
class Progress {
  public:
    Progress();
    ~Progress() { clear(); }
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;
    void show(const std::string& text);
    void clear();

  private:
    bool shown_ = false, terminal_;
};

}  // namespace ta::tools
