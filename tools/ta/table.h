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

// Columns of the terminal on standard output; 100 if it is no terminal.
size_t line_width();
// Prints a text behind its label. If it is longer than line_width(), it is broken at spaces, and later lines are indented like
// the first.
void print_wrapped(const std::string& label, const std::string& text);

struct Column {
    std::string key;
    std::string head;      // with the unit; for bytes the unit is added, as the largest value needs it
    bool bytes = false;    // a number of bytes
    bool is_case = false;  // says what was measured, as opposed to a result
};

// Rows are objects; a key that a row lacks gives an empty cell. Numbers are right-aligned. A value shared by all rows is
// printed once, above the table; but not that of the first column, unless it is one of several that say what was measured. A
// table wider than line_width() gets heads of several lines and narrow columns of text. If that is not enough, the remaining
// columns follow in a table below.
void print_table(const std::vector<Json>& rows, const std::vector<Column>& columns);

// The columns of benchmark rows: first what was measured, then sizes, times, rates. Units follow from the names of keys.
std::vector<Column> columns_of_bench(const std::vector<Json>& rows);

// A line on standard error that the next one overwrites. Prints only if that is a terminal.
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
