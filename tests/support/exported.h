// The bytes of a sequence that its program carries by means of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "support/handles.h"

namespace ta::testing {

// The sink of an export. It may stop it, at the write after `most` of them.
struct Exported {
    std::vector<char> bytes;
    int writes = 0, most = 1 << 30, released = 0;
    ta_sink sink() {
        auto s = sized<ta_sink>();
        s.user = this;
        s.write = [](void* user, uint64_t offset, const void* data, uint64_t n) {
            auto& b = *static_cast<Exported*>(user);
            if (++b.writes > b.most) return 1;
            b.bytes.resize(std::max<size_t>(b.bytes.size(), offset + n));
            std::memcpy(b.bytes.data() + offset, data, n);
            return 0;
        };
        s.release = [](void* user) { ++static_cast<Exported*>(user)->released; };
        return s;
    }
};

}  // namespace ta::testing
