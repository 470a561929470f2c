// Shared by the fuzz targets: how they read their input, how they say that something is wrong, and what replay.cpp needs of
// them. docs/testing.md has how they are run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace ta::fuzz {

// Ends the program: the fuzzer keeps the input.
[[noreturn]] inline void wrong(const char* what, const char* detail = "") {
    std::fprintf(stderr, "WRONG: %s %s\n", what, detail);
    std::abort();
}
inline void require(bool good, const char* what, const char* detail = "") {
    if (!good) wrong(what, detail);
}

// Bytes, and zeros behind them.
class Input {
  public:
    Input(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
    bool empty() const { return at_ == end_; }
    uint64_t bits(int bytes) {
        uint64_t x = 0;
        for (int i = 0; i < bytes && at_ < end_; ++i) x |= uint64_t{*at_++} << 8 * i;
        return x;
    }
    uint8_t byte() { return uint8_t(bits(1)); }
    // 0 to n - 1, and 0 if n is 0.
    size_t below(size_t n) { return n == 0 ? 0 : size_t(bits(n <= 256 ? 1 : n <= 65536 ? 2 : 4)) % n; }

  private:
    const uint8_t *at_, *end_;
};

// Inputs that reach what random ones would take long to find, by name. They are written to the corpus by replay.cpp.
using Seeds = std::vector<std::pair<std::string, std::vector<uint8_t>>>;
Seeds seeds();

}  // namespace ta::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
