#include "tiering/share/host_memory.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <unordered_map>

namespace ta::share {
namespace {

// Memory that ranks of this process share, by number: no process maps its own memory a second time.
struct Registry {
    std::mutex mutex;
    uint64_t numbers = 0;
    struct SharedMemory {
        uint64_t bytes;
        std::weak_ptr<uint8_t> memory;
    };
    std::unordered_map<uint64_t, SharedMemory> memories;
    Exports::List left;  // of ended transports; peers have some of it mapped
};
Registry& registry() {
    static Registry r;
    return r;
}

}  // namespace

uint64_t process_number() {
    static const uint64_t number = [] {
        std::random_device random;
        return (uint64_t(random()) << 32 | random()) | 1;
    }();
    return number;
}

Result<Transport::Shared> Exports::share(const std::shared_ptr<Exports>& exports, std::shared_ptr<uint8_t> memory,
                                         uint64_t bytes) {
    Exports& e = *exports;
    e.reap();
    Result<ExportedMemory> exported = e.device_.export_memory(memory.get());
    if (!exported.ok()) return std::move(exported).status();
    Transport::Shared shared;
    shared.name.offset = exported.value().offset;
    std::memcpy(shared.name.handle, exported.value().handle, sizeof shared.name.handle);
    {
        Registry& r = registry();
        const std::lock_guard lock(r.mutex);
        std::erase_if(r.memories, [](const auto& entry) { return entry.second.memory.expired(); });
        shared.name.number = ++r.numbers;
        r.memories.emplace(shared.name.number, Registry::SharedMemory{bytes, memory});
    }
    RankArea& mine = e.segment_->area(e.segment_->rank());
    SharedSlot* slot = nullptr;
    {
        const std::lock_guard lock(e.mutex_);
        slot = std::find_if(std::begin(mine.slots), std::end(mine.slots),
                            [](const SharedSlot& s) { return s.number.load() == 0; });
        if (slot == std::end(mine.slots))
            return fail(TA_E_LIMIT, "a rank shares at most %zu parts of its memory", kSharedSlots);
        e.shared_.emplace(slot, std::move(memory));
        slot->mapped.store(SharedSlot::kOpen);
        slot->number.store(shared.name.number);
    }
    // Not under the lock: if there is no memory for the control block, the deleter runs at once, and takes the lock.
    shared.lasts = std::shared_ptr<void>(slot, [exports](void* s) {
        static_cast<SharedSlot*>(s)->mapped.fetch_and(~SharedSlot::kOpen);
        exports->reap();
    });
    return shared;
}

void Exports::reap() noexcept {
    while (take_unused()) {
    }
}

std::shared_ptr<uint8_t> Exports::take_unused() noexcept {
    const std::lock_guard lock(mutex_);
    for (auto at = shared_.begin(); at != shared_.end(); ++at) {
        uint64_t holders = at->first->mapped.load();
        if ((holders & SharedSlot::kOpen) != 0) continue;  // it is still shared
        for (uint32_t r = 0; r < segment_->ranks(); ++r) {
            if ((holders >> r & 1) != 0 && !segment_->alive(r)) holders &= ~(uint64_t{1} << r);
        }
        if (holders != 0) continue;
        at->first->number.store(0);
        std::shared_ptr<uint8_t> unused = std::move(at->second);
        shared_.erase(at);
        return unused;
    }
    return nullptr;
}

bool Exports::empty() {
    const std::lock_guard lock(mutex_);
    return shared_.empty();
}

void Exports::leave(List&& exports) noexcept {
    Registry& r = registry();
    List left = std::move(exports);
    {
        const std::lock_guard lock(r.mutex);
        left.splice(left.end(), r.left);
    }
    for (const auto& e : left) e->reap();
    left.remove_if([](const auto& e) { return e->empty(); });
    const std::lock_guard lock(r.mutex);
    r.left.splice(r.left.end(), left);
}

SharedSlot* Imports::slot_of(uint32_t peer, uint64_t number) const {
    for (SharedSlot& s : segment_->area(peer).slots) {
        if (s.number.load() == number) return &s;
    }
    return nullptr;
}

// Marks the slot as mapped by this rank. nullptr: the memory is not shared any more.
SharedSlot* Imports::claim(uint32_t peer, uint64_t number) const {
    const uint64_t own = uint64_t{1} << segment_->rank();
    SharedSlot* const s = slot_of(peer, number);
    if (!s) return nullptr;
    if ((s->mapped.fetch_or(own) & SharedSlot::kOpen) != 0 && s->number.load() == number) return s;
    s->mapped.fetch_and(~own);
    segment_->ring_bell(peer);
    return nullptr;
}

Result<FoundMemory> Imports::find(const std::shared_ptr<Imports>& imports, uint32_t peer, const MemoryName& name) {
    Imports& i = *imports;
    if (name.number == 0) return FoundMemory{};
    if (i.segment_->area(peer).process == process_number()) {
        if (!i.slot_of(peer, name.number)) return FoundMemory{};  // the number is of another rank's memory
        Registry& r = registry();
        const std::lock_guard lock(r.mutex);
        const auto found = r.memories.find(name.number);
        if (found == r.memories.end()) return FoundMemory{};
        return FoundMemory{found->second.memory.lock(), found->second.bytes};
    }
    const std::lock_guard lock(i.mutex_);
    const Key key{peer, name.number};
    auto at = i.mapped_.find(key);
    if (at == i.mapped_.end()) {
        SharedSlot* const slot = i.claim(peer, name.number);
        if (!slot) return FoundMemory{};
        ExportedMemory exported{};
        exported.offset = name.offset;
        std::memcpy(exported.handle, name.handle, sizeof exported.handle);
        Result<ImportedMemory> memory = i.device_.import_memory(exported);
        if (!memory.ok()) {
            slot->mapped.fetch_and(~(uint64_t{1} << i.segment_->rank()));
            i.segment_->ring_bell(peer);
            return std::move(memory).status().rank(int32_t(peer));
        }
        at = i.mapped_.emplace(key, Mapping{slot, memory.take()}).first;
    }
    ++at->second.users;
    const ImportedMemory& mapped = at->second.memory;
    return FoundMemory{{mapped.memory.get(), [imports, key](uint8_t*) { imports->drop(key); }}, mapped.bytes};
}

void Imports::drop(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto at = mapped_.find(key);
    if (--at->second.users > 0) return;
    SharedSlot* const slot = at->second.slot;
    mapped_.erase(at);
    slot->mapped.fetch_and(~(uint64_t{1} << segment_->rank()));
    segment_->ring_bell(key.first);
}

}  // namespace ta::share
