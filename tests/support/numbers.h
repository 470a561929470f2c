// Number formats, written without a look at the library's own conversions, random numbers that are the same everywhere, and numbers
// that whoever starts a test gives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "turboattention.h"

namespace ta::testing {

float f16_to_float(uint16_t h);
uint16_t float_to_f16(float x);  // to nearest even; infinite beyond the range
float bf16_to_float(uint16_t h);
uint16_t float_to_bf16(float x);

size_t dtype_bytes(ta_dtype dtype);
// The float that x becomes when it is stored as `dtype`.
float round_to(ta_dtype dtype, float x);

class Random {
  public:
    explicit Random(uint64_t seed);
    uint64_t bits();
    int64_t below(int64_t n) { return int64_t(bits() % uint64_t(n)); }                  // 0..n-1
    int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }  // both included
    bool chance(int percent) { return below(100) < percent; }
    double uniform();  // [0, 1)
    double uniform(double low, double high) { return low + (high - low) * uniform(); }
    float normal();
    float student4();  // Student's t with 4 degrees of freedom, scaled to variance 1: heavy tails
    std::vector<float> normals(int64_t n, float scale = 1.0f);
    template <class T>
    const T& pick(const std::vector<T>& from) {
        return from[size_t(below(int64_t(from.size())))];
    }

  private:
    uint64_t state_;
};

// |a - b| / |b|, or |a| where b is zero.
double relative_l2(std::span<const double> a, std::span<const double> b);
double relative_l2(std::span<const float> a, std::span<const double> b);

// Equal numbers of equal bits: a NaN is the same as itself, 0 is not the same as -0.
bool same_bits(std::span<const float> a, std::span<const float> b);

// Of an environment variable.
uint64_t number_from(const char* variable, uint64_t otherwise);

}  // namespace ta::testing
