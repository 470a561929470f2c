// Steps with numbers that are the same everywhere, statuses and folders: what the tests of turboattention.hpp share.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <turboattention.hpp>
#include <vector>

namespace hpp_tests {

inline constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64;
inline constexpr int64_t kRow = kHeads * kDim;

inline std::vector<float> numbers(int64_t n, uint32_t seed) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) seed = seed * 1664525 + 1013904223, v = static_cast<float>(seed >> 8) / (1 << 23) - 1;
    return x;
}
template <class T>
ta::View<T> view(std::vector<T>& x) {
    return {x.data(), static_cast<int64_t>(x.size()) / kRow, kHeads, kDim};
}

inline ta::PoolOptions shape(uint32_t bits = 4) {
    return {.layers = kLayers, .kv_heads = kHeads, .head_dim = kDim, .bits = bits, .budget_bytes = 64 << 20};
}

// Appends n tokens to a sequence and returns what the last layer's attention gives.
inline std::vector<float> feed(const ta::Plan& plan, const ta::Sequence& seq, int32_t n, uint32_t seed = 1) {
    auto k = numbers(n * kRow, seed), v = numbers(n * kRow, seed + 1), q = numbers(n * kRow, seed + 2), out = q;
    auto step = plan.begin(seq, n);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        step.append(layer, view(k), view(v));
        step.attend(layer, view(q), view(out));
    }
    step.end();
    return out;
}

inline ta_status status_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const ta::Error& error) {
        EXPECT_STRNE(error.what(), "");
        return error.status();
    }
    return TA_OK;
}

struct Folder {
    std::filesystem::path path;
    Folder() {
        std::string name = (std::filesystem::temp_directory_path() / "hpp_test_XXXXXX").string();
        if (!mkdtemp(name.data())) throw std::runtime_error("mkdtemp");
        path = name;
    }
    ~Folder() { std::filesystem::remove_all(path); }
    std::string file(const char* name) const { return path / name; }
};

}  // namespace hpp_tests
