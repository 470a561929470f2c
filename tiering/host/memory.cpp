#include "tiering/host/memory.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>

#include "src/core/checked.h"
#include "src/io/file_system.h"

namespace ta {
namespace {

constexpr size_t kHugePage = 2 << 20, kSmallPage = 4096;
constexpr size_t kTouchStep = 32 << 20;
constexpr size_t kPagesLookedAt = 4096;
constexpr double kWellPlaced = 0.99;

}  // namespace

Result<std::unique_ptr<HostMemory>> HostMemory::create(std::shared_ptr<MemorySystem> system, ThreadPool& threads,
                                                       const HostMemoryOptions& options) {
    if (options.bytes == 0 || options.bytes > uint64_t{1} << 56 || options.chunk_bytes == 0)
        return fail(TA_E_INVALID, "a host tier of %llu bytes", (unsigned long long)options.bytes);
    std::unique_ptr<HostMemory> memory(new HostMemory(std::move(system), options));
    TA_RETURN_IF_ERROR(memory->map(options.pages));
    memory->place();
    TA_RETURN_IF_ERROR(memory->touch(threads));
    memory->look_where_it_is();
    TA_RETURN_IF_ERROR(memory->register_all());
    return memory;
}

HostMemory::~HostMemory() {
    unregister_all();
    if (mapped_) system_->unmap(mapped_, mapped_bytes_);
}

Status HostMemory::map(HostMemoryOptions::Pages wanted) {
    int error = 0;
    if (wanted == HostMemoryOptions::Pages::kHugeTlb) {
        bytes_ = mapped_bytes_ = round_up(options_.bytes, kHugePage);
        mapped_ = system_->map(mapped_bytes_, true, error);
        if (mapped_) {
            data_ = static_cast<uint8_t*>(mapped_);
            pages_ = HostMemoryOptions::Pages::kHugeTlb;
            return {};
        }
        degraded_.push_back("no huge pages from the system's pool for the host tier: " + error_text(error));
    }
    bytes_ = round_up(options_.bytes, kSmallPage);
    const bool huge = wanted != HostMemoryOptions::Pages::kSmall && bytes_ >= kHugePage;
    // Maps more than needed, so that the data can begin on a huge page's boundary.
    mapped_bytes_ = bytes_ + (huge ? kHugePage : 0);
    mapped_ = system_->map(mapped_bytes_, false, error);
    if (!mapped_) {
        return fail(TA_E_MEMORY, "no %zu bytes of address space for the host tier: %s", mapped_bytes_,
                    error_text(error).c_str())
            .tier(TA_TIER_HOST)
            .bytes(mapped_bytes_);
    }
    data_ = static_cast<uint8_t*>(mapped_);
    if (!huge) return {};
    data_ = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(mapped_), kHugePage));
    if (const int r = system_->advise_huge(data_, bytes_); r < 0) {
        degraded_.push_back("no transparent huge pages for the host tier: " + error_text(r));
    } else {
        pages_ = HostMemoryOptions::Pages::kTransparent;
    }
    return {};
}

void HostMemory::place() {
    if (options_.node < 0) return;
    const int r = system_->prefer_node(data_, bytes_, options_.node);
    if (r == 0) return;
    const std::string node = "the host tier is not placed on NUMA node " + std::to_string(options_.node);
    degraded_.push_back(node +
                        (r == -ENOSYS ? ": libnuma.so.1 is not installed, or the system has no NUMA" : ": " + error_text(r)));
}

Status HostMemory::touch(ThreadPool& threads) {
    std::atomic<int> error{0};
    const size_t steps = (bytes_ + kTouchStep - 1) / kTouchStep;
    const auto touch_all = [&] {
        threads.parallel_for(int64_t(steps), 1, [&](int64_t i, int) {
            if (error.load(std::memory_order_relaxed) != 0) return;
            const size_t begin = size_t(i) * kTouchStep;
            const int r = system_->populate(data_ + begin, std::min(kTouchStep, bytes_ - begin));
            if (r < 0) error.store(r);
        });
    };
    touch_all();
    if (error == 0) return {};
    if (pages_ == HostMemoryOptions::Pages::kHugeTlb) {
        // The huge pages were reserved, but perhaps on another node than wanted, or not for this control group.
        degraded_.push_back("the huge pages of the system's pool cannot be used for the host tier: " + error_text(error));
        system_->unmap(mapped_, mapped_bytes_);
        mapped_ = nullptr;
        error = 0;
        TA_RETURN_IF_ERROR(map(HostMemoryOptions::Pages::kTransparent));
        place();
        touch_all();
        if (error == 0) return {};
    }
    return fail(TA_E_MEMORY, "the system has no %zu bytes for the host tier: %s", bytes_, error_text(error).c_str())
        .tier(TA_TIER_HOST)
        .bytes(bytes_);
}

void HostMemory::look_where_it_is() {
    const size_t pages = bytes_ / kSmallPage, n = std::min(pages, kPagesLookedAt);
    std::vector<void*> list(n);
    std::vector<int> nodes(n, -1);
    for (size_t i = 0; i < n; ++i) list[i] = data_ + i * pages / n * kSmallPage;
    if (const int r = system_->nodes_of(list, nodes); r < 0) {
        if (options_.node >= 0) degraded_.push_back("where the host tier lies could not be verified: " + error_text(r));
        return;
    }
    size_t known = 0;
    for (const int node : nodes) {
        if (node < 0) continue;
        ++known;
        if (size_t(node) >= share_of_nodes_.size()) share_of_nodes_.resize(size_t(node) + 1);
        share_of_nodes_[size_t(node)] += 1;
    }
    for (double& share : share_of_nodes_) share /= double(std::max<size_t>(known, 1));
    if (options_.node < 0) return;
    const double there = size_t(options_.node) < share_of_nodes_.size() ? share_of_nodes_[size_t(options_.node)] : 0;
    if (there >= kWellPlaced) return;
    char text[128];
    std::snprintf(text, sizeof text, "%.1f%% of the host tier lies on NUMA node %d, which was asked for", 100 * there,
                  options_.node);
    degraded_.push_back(text);
}

Status HostMemory::register_all() {
    if (!options_.register_chunk) return {};
    while (registered_ < bytes_) {
        const auto n = size_t(std::min<uint64_t>(options_.chunk_bytes, bytes_ - registered_));
        Status s = options_.register_chunk(data_ + registered_, n);
        if (s.ok()) {
            registered_ += n;
            continue;
        }
        char text[sizeof ta_error::message + 96];
        std::snprintf(text, sizeof text, "the host tier is not registered with the GPU, at byte %zu: %s", registered_,
                      s.detail() ? s.detail()->message : "no reason given");
        unregister_all();
        if (options_.needs_registration) return fail(s.code(), "%s", text);
        degraded_.push_back(text);
        return {};
    }
    return {};
}

void HostMemory::unregister_all() {
    for (size_t done = 0; done < registered_;) {
        const auto n = size_t(std::min<uint64_t>(options_.chunk_bytes, bytes_ - done));
        if (options_.unregister_chunk) options_.unregister_chunk(data_ + done, n);
        done += n;
    }
    registered_ = 0;
}

}  // namespace ta
