// A file as parts, and edits of it that a fuzz input says. Hashes are mended afterwards by who knows the format, so that what
// is behind them is reached.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "tests/fuzz/input.h"

namespace ta::fuzz {

using Bytes = std::vector<uint8_t>;
using Parts = std::vector<Bytes>;

template <class T>
T get(const Bytes& from, size_t at) {
    T x;
    std::memcpy(&x, from.data() + at, sizeof x);
    return x;
}
// Nothing where the part has become too short.
template <class T>
void put(Bytes& to, size_t at, const T& x) {
    if (at + sizeof x <= to.size()) std::memcpy(to.data() + at, &x, sizeof x);
}

inline Bytes joined(const Parts& parts) {
    Bytes all;
    for (const Bytes& p : parts) all.insert(all.end(), p.begin(), p.end());
    return all;
}

enum class Edit : uint8_t { kSet, kAdd, kOdd, kFill, kCopyBytes, kCopyPart, kSwapParts, kResize };
inline constexpr size_t kEdits = 8;
inline constexpr size_t kMostPart = 1 << 18;

// Takes edits from the input until it ends. `others`: files that parts may come from.
inline void edit(Input& in, Parts& parts, std::span<const Parts> others) {
    static constexpr uint64_t kOdd[] = {0,
                                        1,
                                        64,
                                        65,
                                        0x7fffffff,
                                        0x80000000,
                                        0xffffffff,
                                        uint64_t{1} << 32,
                                        uint64_t{1} << 40,
                                        uint64_t{1} << 60,
                                        INT64_MAX,
                                        uint64_t{1} << 63,
                                        UINT64_MAX,
                                        0x7f800000,   // infinity
                                        0x7fc00000,   // NaN
                                        0x7f7fffff};  // the largest float
    // A place for n bytes.
    const auto place = [&](const Bytes& part, size_t n) { return in.below(part.size() < n ? 0 : part.size() - n + 1); };
    const auto write = [](Bytes& part, size_t at, uint64_t x, size_t n) {
        if (n > 0 && at + n <= part.size()) std::memcpy(part.data() + at, &x, n);
    };
    for (int i = 0; i < 32 && !in.empty(); ++i) {
        const auto what = Edit(in.below(kEdits));
        Bytes& part = parts[in.below(parts.size())];
        switch (what) {
            case Edit::kSet: {
                const size_t n = size_t{1} << in.below(4);
                const size_t at = place(part, n);
                write(part, at, in.bits(int(n)), n);
                break;
            }
            case Edit::kAdd: {
                const size_t at = place(part, 8);
                const auto by = int8_t(in.byte());
                if (at + 8 <= part.size()) put(part, at, get<uint64_t>(part, at) + uint64_t(int64_t{by}));
                break;
            }
            case Edit::kOdd: {
                const size_t n = size_t{4} << in.below(2);
                const size_t at = place(part, n) / 4 * 4;
                write(part, at, kOdd[in.below(std::size(kOdd))], n);
                break;
            }
            case Edit::kFill: {
                const size_t n = in.byte(), at = place(part, n);
                if (n > 0 && at + n <= part.size()) std::memset(part.data() + at, int(in.byte()), n);
                break;
            }
            case Edit::kCopyBytes: {
                const Bytes from = parts[in.below(parts.size())];
                const size_t n = in.byte(), to = place(part, n), at = place(from, n);
                if (n > 0 && at + n <= from.size() && to + n <= part.size()) std::memcpy(part.data() + to, from.data() + at, n);
                break;
            }
            case Edit::kCopyPart: {
                const Parts& file = others[in.below(others.size())];
                part = file[in.below(file.size())];
                break;
            }
            case Edit::kSwapParts:
                part.swap(parts[in.below(parts.size())]);
                break;
            case Edit::kResize:
                part.resize(in.below(std::min(2 * part.size() + 2, kMostPart)));
                break;
        }
    }
}

// Seeds: an edit as the bytes that `edit` takes it from.
struct Writer {
    Bytes bytes;
    Writer& add(std::initializer_list<int> list) {
        for (int x : list) bytes.push_back(uint8_t(x));
        return *this;
    }
    Writer& place(size_t at, size_t part_bytes, size_t n) {
        const size_t choices = part_bytes - n + 1;
        for (size_t i = 0; i < (choices <= 256 ? 1u : choices <= 65536 ? 2u : 4u); ++i) bytes.push_back(uint8_t(at >> 8 * i));
        return *this;
    }
};

}  // namespace ta::fuzz
