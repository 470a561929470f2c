// Memory that runs out on demand: operator new of this program, which failing_memory.cpp replaces, and the allocator hooks of a
// context.
#pragma once

#include <cstdint>

namespace ta::testing {

enum class MemorySource { kHooks, kNew, kBoth };

// From now on the allocation after the next `skip` ones of the source fails, in all threads; with `forever` all after it too.
void break_memory(MemorySource source, bool forever, int64_t skip);
void heal_memory();
// The same in two steps, for a program that counts only what some of its calls allocate: allocations are counted, and fail,
// between arm_memory and heal_memory.
void skip_allocations(int64_t n);
void arm_memory(MemorySource source, bool forever);
// True if more than the skipped allocations have been asked for.
bool memory_failed();
// Allocations of either source since the program began, while faults were set for it.
uint64_t allocations();
// From now on, or until it is called with nullptr, the allocation by operator new after the next `skip` ones of threads other than
// this calls `what` once, before it is made.
void call_at_allocation(int64_t skip, void (*what)());
// For allocator hooks: whether the next allocation fails.
bool hook_fails();

}  // namespace ta::testing
