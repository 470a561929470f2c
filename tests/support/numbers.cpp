#include "support/numbers.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>

namespace ta::testing {
namespace {

constexpr double kTau = 6.283185307179586;
constexpr uint64_t kWeyl = 0x9e3779b97f4a7c15u;

uint64_t mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

template <class T>
double relative_l2_of(std::span<const T> a, std::span<const double> b) {
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < b.size(); ++i) {
        const double d = double(a[i]) - b[i];
        difference += d * d;
        norm += b[i] * b[i];
    }
    return norm > 0.0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

}  // namespace

float f16_to_float(uint16_t h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    double x;
    if (exponent == 31) {
        x = mantissa ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    } else if (exponent == 0) {
        x = std::ldexp(double(mantissa), -24);
    } else {
        x = std::ldexp(double(mantissa + 1024), exponent - 25);
    }
    return float(h >> 15 ? -x : x);
}

uint16_t float_to_f16(float x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const double a = std::fabs(double(x));
    if (std::isnan(x)) return uint16_t(sign | 0x7e00);
    if (a >= 65520.0) return uint16_t(sign | 0x7c00);
    if (a == 0.0) return sign;
    const int exponent = std::max(std::ilogb(a), -14);
    const int mantissa = int(std::nearbyint(std::ldexp(a, 10 - exponent)));  // 2048 carries into the exponent by itself
    return uint16_t(sign | (mantissa < 1024 ? mantissa : ((exponent + 15) << 10) + (mantissa - 1024)));
}

float bf16_to_float(uint16_t h) {
    return std::bit_cast<float>(uint32_t(h) << 16);
}

uint16_t float_to_bf16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if (std::isnan(x)) return uint16_t(bits >> 16 | 0x40);
    const uint32_t rest = bits & 0xffff, kept = bits >> 16;
    const bool up = rest > 0x8000 || (rest == 0x8000 && (kept & 1));
    return uint16_t(kept + up);
}

size_t dtype_bytes(ta_dtype dtype) {
    return dtype == TA_DTYPE_F32 ? 4 : 2;
}

float round_to(ta_dtype dtype, float x) {
    if (dtype == TA_DTYPE_F16) return f16_to_float(float_to_f16(x));
    if (dtype == TA_DTYPE_BF16) return bf16_to_float(float_to_bf16(x));
    return x;
}

// SplitMix64. The seed is mixed, too: else the numbers of one seed were those of the seed before, from the second one on.
Random::Random(uint64_t seed) : state_(mixed(seed + kWeyl)) {}

uint64_t Random::bits() {
    return mixed(state_ += kWeyl);
}

double Random::uniform() {
    return double(bits() >> 11) * 0x1p-53;
}

float Random::normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return float(radius * std::cos(kTau * uniform()));
}

float Random::student4() {
    double chi = 0.0;
    for (int i = 0; i < 4; ++i) {
        const double n = normal();
        chi += n * n;
    }
    return float(normal() / std::sqrt(chi / 4.0) / std::sqrt(2.0));
}

std::vector<float> Random::normals(int64_t n, float scale) {
    std::vector<float> x;
    x.reserve(size_t(n));
    for (int64_t i = 0; i < n; ++i) x.push_back(normal() * scale);
    return x;
}

double relative_l2(std::span<const double> a, std::span<const double> b) {
    return relative_l2_of(a, b);
}
double relative_l2(std::span<const float> a, std::span<const double> b) {
    return relative_l2_of(a, b);
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
    return std::ranges::equal(a, b, {}, std::bit_cast<uint32_t, float>, std::bit_cast<uint32_t, float>);
}

uint64_t number_from(const char* variable, uint64_t otherwise) {
    const char* text = std::getenv(variable);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

}  // namespace ta::testing
