// GPU memory that ranks of one host share: what this rank's peers may map, and what it has mapped of theirs.
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

// A number that no other process has, but for chance.
uint64_t process_number();

// Memory that this rank shares. It keeps memory that a peer has mapped, also when its transport is gone.
class Exports {
  public:
    Exports(std::shared_ptr<Segment> segment, Device& device) : segment_(std::move(segment)), device_(device) {}
    static Result<Transport::Shared> share(const std::shared_ptr<Exports>& exports, std::shared_ptr<uint8_t> memory);
    // Lets go of what nobody finds and nobody has mapped any more.
    void reap() noexcept;
    // Some of that, for the caller to let go of; nullptr: there is none.
    std::shared_ptr<uint8_t> take_unused() noexcept;
    // The transport goes.
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
    static Result<std::shared_ptr<uint8_t>> find(const std::shared_ptr<Imports>& imports, uint32_t peer,
                                                 const MemoryName& name);

  private:
    using Key = std::pair<uint32_t, uint64_t>;  // rank, number
    struct Mapping {
        SharedSlot* slot;
        std::shared_ptr<uint8_t> memory;
        size_t users = 0;
    };
    void drop(const Key& key);
    SharedSlot* claim(uint32_t peer, uint64_t number) const;

    const std::shared_ptr<Segment> segment_;
    Device& device_;
    std::mutex mutex_;
    std::map<Key, Mapping> mapped_;
};

}  // namespace ta::share
