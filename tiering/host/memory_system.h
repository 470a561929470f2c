// The seam to the operating system's memory: mappings, huge pages, NUMA placement. Tests let each of it fail.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace ta {

// Failures are -errno. Thread-safe.
class MemorySystem {
  public:
    virtual ~MemorySystem() = default;
    // Private zeroed memory, of huge pages from the system's pool with `hugetlb`; nullptr and the error.
    virtual void* map(size_t bytes, bool hugetlb, int& error) = 0;
    virtual void unmap(void* p, size_t bytes) = 0;
    // Asks for transparent huge pages.
    virtual int advise_huge(void* p, size_t bytes) = 0;
    // Makes the system back the pages with memory. Their content stays.
    virtual int populate(void* p, size_t bytes) = 0;
    // Pages that are populated in this range from now on lie on the node, if it has room. -ENOSYS: there is no libnuma, or no
    // NUMA.
    virtual int prefer_node(void* p, size_t bytes, int node) = 0;
    // Writes the node of each page, or -errno in its place.
    virtual int nodes_of(std::span<void* const> pages, std::span<int> nodes) = 0;
};

std::shared_ptr<MemorySystem> system_memory();

}  // namespace ta
