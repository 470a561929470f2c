#include "support/failing_memory.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace ta::testing {
namespace {

enum class Armed : int { kNothing = 0, kHooks = 1, kNew = 2, kBoth = 3 };
std::atomic<Armed> g_armed{Armed::kNothing};
std::atomic<bool> g_forever{false};
std::atomic<int64_t> g_left{0};
std::atomic<uint64_t> g_allocations{0};
std::atomic<void (*)()> g_what{nullptr};
std::atomic<int64_t> g_before{0};  // allocations before it
std::atomic<const void*> g_caller{nullptr};

// An address of its own for each thread.
const void* this_thread() {
    static thread_local char here;
    return &here;
}
void count_down() {
    if (g_what.load() == nullptr || g_caller.load() == this_thread() || g_before.fetch_sub(1) != 0) return;
    if (void (*const what)() = g_what.exchange(nullptr)) what();
}

bool is_armed(Armed source) {
    return (int(g_armed.load()) & int(source)) != 0;
}
bool fails_now() {
    g_allocations.fetch_add(1);
    const int64_t left = g_left.fetch_sub(1);
    return left == 0 || (left < 0 && g_forever.load());
}

void* allocate(size_t bytes, size_t alignment) {
    count_down();
    if (is_armed(Armed::kNew) && fails_now()) return nullptr;
    if (alignment <= alignof(std::max_align_t)) return std::malloc(bytes ? bytes : 1);
    void* p = nullptr;
    return posix_memalign(&p, alignment, bytes ? bytes : 1) == 0 ? p : nullptr;
}
void* allocate_or_throw(size_t bytes, size_t alignment) {
    if (void* p = allocate(bytes, alignment)) return p;
    throw std::bad_alloc();
}

}  // namespace

void skip_allocations(int64_t n) {
    g_left = n;
}
void arm_memory(MemorySource source, bool forever) {
    g_forever = forever;
    g_armed = source == MemorySource::kHooks ? Armed::kHooks : source == MemorySource::kNew ? Armed::kNew : Armed::kBoth;
}
void break_memory(MemorySource source, bool forever, int64_t skip) {
    skip_allocations(skip);
    arm_memory(source, forever);
}
bool memory_failed() {
    return g_left.load() < 0;
}
void heal_memory() {
    g_armed = Armed::kNothing;
}
uint64_t allocations() {
    return g_allocations.load();
}
void call_at_allocation(int64_t skip, void (*what)()) {
    g_what = nullptr;
    g_caller = this_thread();
    g_before = skip;
    g_what = what;
}
bool hook_fails() {
    return is_armed(Armed::kHooks) && fails_now();
}

}  // namespace ta::testing

void* operator new(size_t n) {
    return ta::testing::allocate_or_throw(n, 1);
}
void* operator new[](size_t n) {
    return ta::testing::allocate_or_throw(n, 1);
}
void* operator new(size_t n, std::align_val_t a) {
    return ta::testing::allocate_or_throw(n, size_t(a));
}
void* operator new[](size_t n, std::align_val_t a) {
    return ta::testing::allocate_or_throw(n, size_t(a));
}
void* operator new(size_t n, const std::nothrow_t&) noexcept {
    return ta::testing::allocate(n, 1);
}
void* operator new[](size_t n, const std::nothrow_t&) noexcept {
    return ta::testing::allocate(n, 1);
}
void* operator new(size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
    return ta::testing::allocate(n, size_t(a));
}
void* operator new[](size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
    return ta::testing::allocate(n, size_t(a));
}
void operator delete(void* p) noexcept {
    std::free(p);
}
void operator delete[](void* p) noexcept {
    std::free(p);
}
void operator delete(void* p, size_t) noexcept {
    std::free(p);
}
void operator delete[](void* p, size_t) noexcept {
    std::free(p);
}
void operator delete(void* p, std::align_val_t) noexcept {
    std::free(p);
}
void operator delete[](void* p, std::align_val_t) noexcept {
    std::free(p);
}
void operator delete(void* p, size_t, std::align_val_t) noexcept {
    std::free(p);
}
void operator delete[](void* p, size_t, std::align_val_t) noexcept {
    std::free(p);
}
