// Slots as the embedder's allocator sees them: which hold nothing but zeros, and whether one came back that does not.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "support/handles.h"

namespace ta::testing {

struct Slots {
    std::mutex mutex;
    std::vector<std::pair<uint8_t*, size_t>> alive;
    std::atomic<int> returned_dirty{0}, returned{0};

    ta_allocator hooks() {
        auto a = sized<ta_allocator>();
        a.user = this;
        a.allocate = [](size_t bytes, size_t alignment, void* user) -> void* {
            auto& s = *static_cast<Slots*>(user);
            void* p = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
            std::memset(p, 0x5a, bytes);
            const std::lock_guard lock(s.mutex);
            if (alignment == 4096) s.alive.emplace_back(static_cast<uint8_t*>(p), bytes);
            return p;
        };
        a.deallocate = [](void* p, size_t bytes, size_t alignment, void* user) {
            auto& s = *static_cast<Slots*>(user);
            if (p && alignment == 4096) {
                ++s.returned;
                s.returned_dirty += is_zero(static_cast<uint8_t*>(p), bytes) ? 0 : 1;
                const std::lock_guard lock(s.mutex);
                std::erase_if(s.alive, [&](const auto& slot) { return slot.first == p; });
            }
            std::free(p);
        };
        return a;
    }
    Context make_context() {
        const ta_allocator mine = hooks();
        auto o = sized<ta_context_options>();
        o.threads = 1;
        o.allocator = &mine;
        return testing::make_context(o);
    }
    static bool is_zero(const uint8_t* p, size_t bytes) {
        return std::all_of(p, p + bytes, [](uint8_t x) { return x == 0; });
    }
    size_t zero() {
        const std::lock_guard lock(mutex);
        return size_t(std::count_if(alive.begin(), alive.end(), [](const auto& s) { return is_zero(s.first, s.second); }));
    }
};

}  // namespace ta::testing
