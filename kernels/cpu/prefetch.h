// Fetches the piece that a decode attends to next while it works on another.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace ta::cpu {
namespace {

// A line with each of `count` steps of the work at hand, evenly over the piece. In bursts the fill buffers run full and the products
// wait.
class Prefetch {
  public:
    Prefetch() : at_(nullptr), stride_(0) {}
    Prefetch(const uint8_t* piece, size_t bytes, int count)
        : at_(piece), stride_(ptrdiff_t((bytes + size_t(count) - 1) / size_t(count))) {}

    [[gnu::always_inline]] void run() {
        _mm_prefetch(reinterpret_cast<const char*>(at_), _MM_HINT_T0);
        at_ += stride_;
    }

  private:
    const uint8_t* at_;
    ptrdiff_t stride_;
};

}  // namespace
}  // namespace ta::cpu
