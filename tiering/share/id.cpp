#include "tiering/share/id.h"

#include <cstring>
#include <random>

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

}  // namespace ta::share
