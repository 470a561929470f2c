#include "tiering/share/id.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "kernels/format/hash.h"

namespace ta::share {
namespace {

constexpr size_t kMarkBytes = 32;

const char* mark_of(GroupKind kind) {
    return kind == GroupKind::kLocal ? "turboattention local group" : "turboattention host group";
}

}  // namespace

GroupId make_id(GroupKind kind) {
    GroupId id{};
    std::memcpy(id.data(), mark_of(kind), std::strlen(mark_of(kind)));
    std::random_device random;
    for (size_t at = kMarkBytes; at < kMarkBytes + 24; at += sizeof(uint32_t)) {
        const uint32_t bits = random();
        std::memcpy(id.data() + at, &bits, sizeof bits);
    }
    return id;
}

bool is_of(const GroupId& id, GroupKind kind) {
    const auto is_marked = [&](GroupKind k) { return std::memcmp(id.data(), mark_of(k), std::strlen(mark_of(k)) + 1) == 0; };
    if (kind == GroupKind::kNccl) return !is_marked(GroupKind::kLocal) && !is_marked(GroupKind::kHost);
    return is_marked(kind);
}

uint64_t name_of(const GroupId& id) {
    return hash_bytes(id.data(), id.size());
}

EndedGroups& EndedGroups::of_this_process() {
    static EndedGroups groups;
    return groups;
}

void EndedGroups::add(uint64_t name) {
    const std::lock_guard lock(mutex_);
    names_[n_++ % kMost] = name;
}

bool EndedGroups::has(uint64_t name) const {
    const std::lock_guard lock(mutex_);
    return std::count(names_.begin(), names_.begin() + std::ptrdiff_t(std::min(n_, kMost)), name) > 0;
}

Status ended_group() {
    return fail(TA_E_STALE, "the group of this id has ended; make a new id");
}

}  // namespace ta::share
