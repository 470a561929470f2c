// One large piece of host memory: mapped, placed on a NUMA node, touched by many threads, registered with a GPU. It does
// without what it cannot have, and says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "src/core/status.h"
#include "src/core/thread_pool.h"
#include "tiering/host/memory_system.h"

namespace ta {

struct HostMemoryOptions {
    enum class Pages : uint8_t {
        kTransparent,  // huge where the system agrees
        kSmall,
        kHugeTlb,  // from the system's pool of huge pages, else transparent ones
    };
    uint64_t bytes = 0;
    Pages pages = Pages::kTransparent;
    int node = -1;  // NUMA node, with or without CPUs; -1: where the touching threads run
    // Makes a chunk known to a GPU, and takes that back. Called for chunks of `chunk_bytes`, once all of the memory is touched.
    std::function<Status(void* data, size_t bytes)> register_chunk;
    std::function<void(void* data, size_t bytes)> unregister_chunk;
    uint64_t chunk_bytes = uint64_t{1} << 30;
    bool needs_registration = false;  // true: without it there is no memory; false: it is a reason in degraded()
};

class HostMemory {
  public:
    // TA_E_MEMORY when the system has none; with needs_registration whatever register_chunk says.
    static Result<std::unique_ptr<HostMemory>> create(std::shared_ptr<MemorySystem> system, ThreadPool& threads,
                                                      const HostMemoryOptions& options);
    ~HostMemory();
    HostMemory(const HostMemory&) = delete;
    HostMemory& operator=(const HostMemory&) = delete;

    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }  // as asked for; whole huge pages with kHugeTlb
    bool registered() const { return registered_ > 0 && registered_ == bytes_; }
    HostMemoryOptions::Pages pages() const { return pages_; }
    // How much of what was looked at lies on each node, 0 ... 1; empty when the system does not tell.
    const std::vector<double>& share_of_nodes() const { return share_of_nodes_; }
    const std::vector<std::string>& degraded() const { return degraded_; }

  private:
    explicit HostMemory(std::shared_ptr<MemorySystem> system, const HostMemoryOptions& options)
        : system_(std::move(system)), options_(options) {}
    Status map(HostMemoryOptions::Pages wanted);
    void place();
    Status touch(ThreadPool& threads);
    void look_where_it_is();
    Status register_all();
    void unregister_all();

    const std::shared_ptr<MemorySystem> system_;
    const HostMemoryOptions options_;
    void* mapped_ = nullptr;
    size_t mapped_bytes_ = 0;
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
    size_t registered_ = 0;  // bytes
    HostMemoryOptions::Pages pages_ = HostMemoryOptions::Pages::kSmall;
    std::vector<double> share_of_nodes_;
    std::vector<std::string> degraded_;
};

}  // namespace ta
