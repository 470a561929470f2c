#include "tiering/host/memory_system.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#if !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace ta {
namespace {

constexpr int kPreferred = 1;                // MPOL_PREFERRED: a node that is full must not end the process, as MPOL_BIND would
constexpr unsigned kMoveExisting = 1u << 1;  // MPOL_MF_MOVE
constexpr int kMostNodes = 1024;

// libnuma's few functions are declared here, so that neither a build nor a program needs it.
struct Libnuma {
    int (*available)() = nullptr;
    long (*mbind)(void*, unsigned long, int, const unsigned long*, unsigned long, unsigned) = nullptr;
    long (*move_pages)(int, unsigned long, void**, const int*, int*, int) = nullptr;
    bool found = false;

    Libnuma() {
        void* library = dlopen("libnuma.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!library) return;
        const auto find = [&](auto& function, const char* name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
            return function != nullptr;
        };
        found = find(available, "numa_available") && find(mbind, "mbind") && find(move_pages, "move_pages") && available() >= 0;
    }
};

const Libnuma& libnuma() {
    static const Libnuma library;
    return library;
}

class SystemMemory final : public MemorySystem {
  public:
    void* map(size_t bytes, bool hugetlb, int& error) override {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (hugetlb ? MAP_HUGETLB : MAP_NORESERVE);
        void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (p != MAP_FAILED) return p;
        error = -errno;
        return nullptr;
    }
    void unmap(void* p, size_t bytes) override { munmap(p, bytes); }
    int advise_huge(void* p, size_t bytes) override { return madvise(p, bytes, MADV_HUGEPAGE) == 0 ? 0 : -errno; }
    int populate(void* p, size_t bytes) override {
        if (madvise(p, bytes, MADV_POPULATE_WRITE) == 0) return 0;
        if (errno != EINVAL) return -errno;
        // An older kernel. If memory has run out, this loop kills the process; the call above would have returned an error.
        const auto page = size_t(sysconf(_SC_PAGESIZE));
        auto* data = static_cast<volatile uint8_t*>(p);
        for (size_t i = 0; i < bytes; i += page) data[i] = data[i];
        return 0;
    }
    int prefer_node(void* p, size_t bytes, int node) override {
        if (!libnuma().found) return -ENOSYS;
        if (node < 0 || node >= kMostNodes) return -EINVAL;
        constexpr int kWord = 8 * sizeof(unsigned long);
        unsigned long mask[kMostNodes / kWord] = {};
        mask[node / kWord] = 1ul << node % kWord;
        return libnuma().mbind(p, bytes, kPreferred, mask, kMostNodes + 1, kMoveExisting) == 0 ? 0 : -errno;
    }
    int nodes_of(std::span<void* const> pages, std::span<int> nodes) override {
        if (!libnuma().found) return -ENOSYS;
        std::vector<void*> list(pages.begin(), pages.end());
        return libnuma().move_pages(0, list.size(), list.data(), nullptr, nodes.data(), 0) == 0 ? 0 : -errno;
    }
};

}  // namespace

std::shared_ptr<MemorySystem> system_memory() {
    return std::make_shared<SystemMemory>();
}

}  // namespace ta
