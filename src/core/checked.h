// Arithmetic of sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace ta {

// a * b; nothing on overflow.
template <class T>
constexpr std::optional<T> checked_mul(T a, T b) {
    T r;
    if (__builtin_mul_overflow(a, b, &r)) return std::nullopt;
    return r;
}

// a + b; nothing on overflow.
template <class T>
constexpr std::optional<T> checked_add(T a, T b) {
    T r;
    if (__builtin_add_overflow(a, b, &r)) return std::nullopt;
    return r;
}

// The next multiple of `to`; the caller knows that it fits.
constexpr size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}

}  // namespace ta
