// GPU memory shared by ranks of one host: what this rank offers to its peers, and what it has mapped of theirs.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "src/core/device.h"
#include "tiering/share/segment.h"

namespace ta::share {

// A random number that no other process has (but for chance).
uint64_t process_number();

// Memory that this rank shares. Keeps memory alive while a peer has it mapped, even after this rank's transport is gone.
class Exports {
  public:
    Exports(std::shared_ptr<Segment> segment, Device& device) : segment_(std::move(segment)), device_(device) {}
    static Result<Transport::Shared> share(const std::shared_ptr<Exports>& exports, std::shared_ptr<uint8_t> memory,
                                           uint64_t bytes);
    // Frees memory that no peer has mapped and none can find any more.
    void reap() noexcept;
    // Takes one such piece out, for the caller to free; nullptr: there is none.
    std::shared_ptr<uint8_t> take_unused() noexcept;
    // Called when the transport ends: keeps what peers have still mapped.
    using List = std::list<std::shared_ptr<Exports>>;
    static void leave(List&& exports) noexcept;

  private:
    bool empty();

    const std::shared_ptr<Segment> segment_;
    Device& device_;
    std::mutex mutex_;
    std::map<SharedSlot*, std::shared_ptr<uint8_t>> shared_;
};

// Memory of peers that this rank has mapped.
class Imports {
  public:
    Imports(std::shared_ptr<Segment> segment, Device& device) : segment_(std::move(segment)), device_(device) {}
    // Finds or maps the memory. A result without memory: the peer does not share it any more.
    static Result<FoundMemory> find(const std::shared_ptr<Imports>& imports, uint32_t peer, const MemoryName& name);

  private:
    using Key = std::pair<uint32_t, uint64_t>;  // rank, number
    struct Mapping {
        SharedSlot* slot;
        ImportedMemory memory;
        size_t users = 0;
    };
    void drop(const Key& key);
    SharedSlot* slot_of(uint32_t peer, uint64_t number) const;
    SharedSlot* claim(uint32_t peer, uint64_t number) const;

    const std::shared_ptr<Segment> segment_;
    Device& device_;
    std::mutex mutex_;
    std::map<Key, Mapping> mapped_;
};

}  // namespace ta::share
