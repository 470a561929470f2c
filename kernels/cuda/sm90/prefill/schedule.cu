// The host's part of prefill: which tiles there are, in which order, and which of them are split.
#include <algorithm>
#include <array>
#include <cstring>
#include <queue>

#include "kernels/cuda/sm90/prefill/parts.h"
#include "kernels/cuda/sm90/prefill/prefill.h"

namespace ta::cuda {
namespace {

// Costs in pages of a tile.
constexpr int kTileCost = 6;       // the start and the end of a tile, at 1.1 us a page
constexpr int kPartCost = 4;       // what a part leaves in memory; the join takes a page's time for each part
constexpr int kLeastPages = 8;     // of a part
constexpr int kRoundsToSplit = 6;  // with more items to a CTA the last round does not matter

int32_t pages_of(const PrefillTile& t) {
    return t.page_end - t.page_begin;
}

int32_t cost_of(int32_t pages, int parts) {
    return (pages + parts - 1) / parts + kTileCost + (parts > 1 ? kPartCost + parts : 0);
}

// Tiles in parts of some number.
struct Parts {
    std::vector<int32_t> of;  // each tile
    int64_t slots = 0;
    int64_t time = 0;  // until the last CTA is done
};

// When the last of `ctas` CTAs is done if each takes the largest item left.
int64_t time_of(std::span<const PrefillTile> tiles, std::span<const int32_t> parts, int kv_heads, int ctas) {
    struct Items {
        int64_t cost, n;
    };
    std::vector<Items> items;
    for (size_t t = 0; t < tiles.size(); ++t) {
        items.push_back({cost_of(pages_of(tiles[t]), parts[t]), int64_t(parts[t]) * kv_heads});
    }
    std::sort(items.begin(), items.end(), [](const Items& a, const Items& b) { return a.cost > b.cost; });
    struct Free {
        int64_t from, ctas;
        bool operator>(const Free& o) const { return from > o.from; }
    };
    std::priority_queue<Free, std::vector<Free>, std::greater<>> free;
    free.push({0, ctas});
    int64_t end = 0;
    for (Items& i : items) {
        while (i.n > 0) {
            const Free f = free.top();
            free.pop();
            const int64_t n = std::min(f.ctas, i.n);
            free.push({f.from + i.cost, n});
            end = std::max(end, f.from + i.cost);
            if (f.ctas > n) free.push({f.from, f.ctas - n});
            i.n -= n;
        }
    }
    return end;
}

// Parts that are done by `target`. Equal ones, or, if CTAs take the tiles one after the other, which come in order of their
// pages, parts as long as the time that is left.
Parts split_for(std::span<const PrefillTile> tiles, int kv_heads, int ctas, int64_t target, bool equal) {
    Parts parts;
    int64_t before = 0;
    for (const PrefillTile& t : tiles) {
        const int32_t pages = pages_of(t);
        const int64_t left = equal ? target : target - before / ctas;
        int32_t n = 1;
        if (cost_of(pages, 1) > left) {
            const int64_t length = std::max<int64_t>(left - kTileCost - kPartCost, kLeastPages);
            n = int32_t(std::clamp<int64_t>((pages + length - 1) / length, 1, std::max(1, pages / kLeastPages)));
        }
        parts.of.push_back(n);
        if (n > 1) parts.slots += int64_t(n) * kv_heads;
        before += int64_t(cost_of(pages, n)) * n * kv_heads;
    }
    return parts;
}

// The number of parts of each tile; empty: as they are.
std::vector<int32_t> choose_parts(std::span<const PrefillTile> tiles, int kv_heads, int ctas) {
    if (ctas <= 1 || int64_t(tiles.size()) * kv_heads > int64_t(kRoundsToSplit) * ctas) return {};
    int64_t work = 0;
    for (const PrefillTile& t : tiles) work += int64_t(cost_of(pages_of(t), 1)) * kv_heads;
    const std::vector<int32_t> whole(tiles.size(), 1);
    Parts best{{}, 0, time_of(tiles, whole, kv_heads, ctas)};
    const int64_t good_enough = work * 21 / 20 / ctas;
    for (const bool equal : {false, true}) {
        for (const int percent : {50, 65, 80, 100, 106, 112, 118, 125, 135, 150, 175, 200}) {
            if (best.time <= good_enough) return best.of;
            Parts parts = split_for(tiles, kv_heads, ctas, (work * percent / 100 + ctas - 1) / ctas, equal);
            if (parts.slots > prefill_slots(ctas)) continue;
            parts.time = time_of(tiles, parts.of, kv_heads, ctas);
            if (parts.time < best.time) best = std::move(parts);
        }
    }
    return best.of;
}

}  // namespace

PrefillPlan::PrefillPlan(std::span<const SequenceArgs> sequences, int group, bool causal, int window, int kv_heads, int ctas) {
    // A counting sort by pages: this runs once per step, and the rows may be hundreds of thousands.
    constexpr int kClasses = 1024;
    std::array<int32_t, kClasses> place{};
    int32_t most_pages = 1;
    for (const SequenceArgs& s : sequences) most_pages = std::max(most_pages, (s.n_keys + kPageTokens - 1) / kPageTokens);
    const auto class_of = [&](const PrefillTile& t) {
        return kClasses - 1 - int(int64_t(pages_of(t)) * (kClasses - 1) / most_pages);
    };
    const auto sort = [&](const std::vector<PrefillTile>& tiles) {
        place = {};
        for (const PrefillTile& t : tiles) ++place[size_t(class_of(t))];
        int32_t before = 0;
        for (int32_t& n : place) {
            before += n;
            n = before - n;
        }
        tiles_.resize(tiles.size());
        for (const PrefillTile& t : tiles) tiles_[size_t(place[size_t(class_of(t))]++)] = t;
    };
    std::vector<PrefillTile> tiles;
    for (size_t n = 0; n < sequences.size(); ++n) {
        const SequenceArgs& s = sequences[n];
        const int64_t rows = int64_t(s.n_query) * group;
        const int position = s.n_keys - s.n_query;
        for (int64_t row = 0; row < rows; row += kPrefillRows) {
            const int64_t last = std::min(row + kPrefillRows, rows) - 1;
            // Both ends of the visible range grow with the position.
            const KeyRange low = visible_keys(causal, window, s.n_keys, position + int(row / group));
            const KeyRange high = visible_keys(causal, window, s.n_keys, position + int(last / group));
            PrefillTile t{};
            t.first_row = int32_t(row);
            t.first_token = int32_t(row / group);
            t.page_begin = low.begin / kPageTokens;
            t.page_end = std::max(t.page_begin, (high.end + kPageTokens - 1) / kPageTokens);
            t.n_keys = s.n_keys, t.n_query = s.n_query, t.row = s.row, t.first_entry = s.first_entry;
            t.sequence = int32_t(n);
            t.parts = 1;
            tiles.push_back(t);
        }
    }
    sort(tiles);
    const std::vector<int32_t> parts = choose_parts(tiles_, kv_heads, ctas);
    if (parts.empty()) return;
    tiles.clear();
    for (size_t n = 0; n < tiles_.size(); ++n) {
        PrefillTile t = tiles_[n];
        const int32_t begin = t.page_begin, end = t.page_end, blocks = (end - begin + 1) / 2;
        t.parts = parts[n];
        if (t.parts > 1) {
            t.first_slot = slots_;
            slots_ += t.parts * kv_heads;
        }
        for (t.part = 0; t.part < t.parts; ++t.part) {
            // The kernel takes two pages at a time: what is behind them must not be another part's.
            t.page_begin = begin + int32_t(int64_t(blocks) * t.part / t.parts) * 2;
            t.page_end = std::min(end, begin + int32_t(int64_t(blocks) * (t.part + 1) / t.parts) * 2);
            tiles.push_back(t);
        }
    }
    sort(tiles);
}

size_t PrefillPlan::bytes() const {
    return sizeof(PrefillSchedule) + tiles_.size() * sizeof(PrefillTile) + size_t(slots_) * kPrefillWarps * sizeof(uint32_t);
}

void PrefillPlan::write(void* to) const {
    auto* header = static_cast<PrefillSchedule*>(to);
    *header = {0, 0, int32_t(tiles_.size()), 0};
    auto* out = reinterpret_cast<PrefillTile*>(header + 1);
    std::copy(tiles_.begin(), tiles_.end(), out);
    std::memset(out + tiles_.size(), 0, size_t(slots_) * kPrefillWarps * sizeof(uint32_t));
}

size_t prefill_workspace_bytes(int head_dim, int ctas) {
    return size_t(prefill_slots(ctas)) * kPrefillWarps * part_bytes(head_dim);
}

}  // namespace ta::cuda
