#include "src/core/process_mark.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace ta {
namespace {

using Place = std::atomic<uint64_t>;

// A page that the kernel zeroes in children. It stays mapped until the process ends, because threads may still read it while
// destructors of static objects run.
Place* map_wiped_page() {
    const auto bytes = size_t(sysconf(_SC_PAGESIZE));
    void* page = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return nullptr;
    if (madvise(page, bytes, MADV_WIPEONFORK) == 0) return new (page) Place(0);
    munmap(page, bytes);
    return nullptr;
}

// For kernels without such pages: a handler of the C library's fork() zeroes the place. A raw clone() bypasses the handler.
Place* make_handled_place() {
    static Place place{0};
    return pthread_atfork(nullptr, nullptr, [] { place.store(0, std::memory_order_relaxed); }) == 0 ? &place : nullptr;
}

Place* find_place() {
    Place* wiped = map_wiped_page();
    return wiped ? wiped : make_handled_place();
}

}  // namespace

ProcessMark ProcessMark::here() {
    static Place* const place = find_place();
    if (!place) return {nullptr, uint64_t(getpid())};
    static Place last{0};  // inherited, so that a child's own marks are higher than all that it inherits
    uint64_t now = place->load(std::memory_order_relaxed);
    while (now == 0) {
        const uint64_t next = last.fetch_add(1, std::memory_order_relaxed) + 1;
        if (place->compare_exchange_strong(now, next, std::memory_order_relaxed)) now = next;
    }
    return {place, now};
}

bool ProcessMark::is_pid() const {
    return uint64_t(getpid()) == value_;
}

}  // namespace ta
