// Memory that runs out on demand: operator new of this program, and the allocator hooks of a context.
#pragma once

#include <cstdint>

namespace ta::testing {

enum class MemorySource { kHooks, kNew };

// From now on the allocation after the next `skip` ones of the source fails, in all threads; with `forever` all after it too.
void break_memory(MemorySource source, bool forever, int64_t skip);
void heal_memory();
// Allocations of either source since the program began, while faults were set for it.
uint64_t allocations();
// For allocator hooks: whether the next allocation fails.
bool hook_fails();

}  // namespace ta::testing
