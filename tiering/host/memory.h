// One large piece of host memory: mapped, placed on a NUMA node, touched by many threads, registered with a GPU. If the system
// refuses one of these, the memory does without it, and degraded() says so.
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
    // Registers a chunk with a GPU, and undoes that. Called for chunks of `chunk_bytes`, once all of the memory is touched.
    std::function<Status(void* data, size_t bytes)> register_chunk;
    std::function<void(void* data, size_t bytes)> unregister_chunk;
    uint64_t chunk_bytes = uint64_t{1} << 30;
    bool needs_registration = false;  // true: create() fails without registration; false: degraded() says why it is missing
};

class HostMemory {
  public:
    // TA_E_MEMORY: the system has none. With needs_registration also the error of register_chunk.
    static Result<std::unique_ptr<HostMemory>> create(std::shared_ptr<MemorySystem> system, ThreadPool& threads,
                                                      const HostMemoryOptions& options);
    ~HostMemory();
    HostMemory(const HostMemory&) = delete;
    HostMemory& operator=(const HostMemory&) = delete;

    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }  // as asked for, rounded up to whole pages; with kHugeTlb to huge ones
    bool registered() const { return registered_ > 0 && registered_ == bytes_; }
    HostMemoryOptions::Pages pages() const { return pages_; }
    // The share of each node, 0 ... 1, by the pages that were looked up; empty if the system does not tell.
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
