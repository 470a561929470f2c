// The host's part of prefill: which tiles there are, in which order, and which of them are split.
#include <algorithm>
#include <array>
#include <cstring>
#include <queue>

#include "kernels/cuda/common/prefill/parts.h"
#include "kernels/cuda/common/prefill/schedule.h"

namespace ta::cuda {
namespace {

// Costs in pages of a tile.
constexpr int kTileCost = 6;        // the start and the end of a tile, at 1.1 us a page
constexpr int kPartCost = 4;        // what a part leaves in memory; the join takes a page's time for each part
constexpr int kLeastPages = 8;      // of a part
constexpr int kResidentCost = 3;    // of a resident tile beside its rows, in times of 32 rows
constexpr int kRoundsToSplit = 32;  // with more items to a CTA the last round does not matter

int32_t pages_of(const PrefillTile& t) {
    return t.page_end - t.page_begin;
}

// The places where the pages of a tile are cut: behind `first`, and behind each `length` more.
struct Cut {
    int32_t parts = 1, first = 0, length = 0;

    // A remainder that is too short for a part is the last one's.
    static Cut of(int32_t pages, int32_t first, int32_t length) {
        const int32_t behind = pages - first;
        if (behind < kLeastPages) return {};
        return {1 + std::max(1, behind / length + (behind % length >= kLeastPages)), first, length};
    }
    int32_t end(int32_t part, int32_t pages) const { return part + 1 == parts ? pages : first + part * length; }
    int32_t last(int32_t pages) const { return parts == 1 ? pages : pages - end(parts - 2, pages); }
    int32_t cost(int32_t pages_of_part) const { return pages_of_part + kTileCost + (parts > 1 ? kPartCost + parts : 0); }
};

struct Cuts {
    std::vector<Cut> of;  // each tile
    int64_t slots = 0;
    int64_t time = 0;  // until the last CTA is done

    void add(const Cut& cut, int kv_heads) {
        of.push_back(cut);
        if (cut.parts > 1) slots += int64_t(cut.parts) * kv_heads;
    }
};

// When the last of `ctas` CTAs is done if each takes the largest item left.
int64_t time_of(std::span<const PrefillTile> tiles, std::span<const Cut> cuts, int kv_heads, int ctas) {
    struct Items {
        int64_t cost, n;
    };
    std::vector<Items> items;
    for (size_t t = 0; t < tiles.size(); ++t) {
        const Cut& cut = cuts[t];
        const int32_t pages = pages_of(tiles[t]);
        items.push_back({cut.cost(cut.last(pages)), kv_heads});
        if (cut.parts > 1) items.push_back({cut.cost(cut.first), kv_heads});
        if (cut.parts > 2) items.push_back({cut.cost(cut.length), int64_t(cut.parts - 2) * kv_heads});
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

// The launch for which tiles are cut.
struct Shape {
    int kv_heads, ctas;
    int32_t step;  // pages: parts end at multiples of it
    int32_t round(int64_t pages) const { return int32_t(std::max<int64_t>((pages + step - 1) / step, 1)) * step; }
};

// The first `whole` tiles stay; the pages of the others, one tile's behind another's, are cut into equal lengths.
Cuts cut_the_rest(std::span<const PrefillTile> tiles, size_t whole, int32_t length, const Shape& shape) {
    Cuts cuts;
    int32_t at = 0;  // pages of the length that tiles before had
    for (size_t t = 0; t < tiles.size(); ++t) {
        if (t < whole) {
            cuts.add({}, shape.kv_heads);
            continue;
        }
        const int32_t left = (length - at) / shape.step * shape.step, first = left < kLeastPages ? length : left;
        const int32_t pages = pages_of(tiles[t]);
        const Cut cut = Cut::of(pages, first, length);
        cuts.add(cut, shape.kv_heads);
        at = cut.last(pages) + (cut.parts == 1 ? length - first : 0);
        if (at >= length) at = 0;
    }
    return cuts;
}

// Each tile that would not be done by `target` into equal parts that are.
Cuts cut_equally(std::span<const PrefillTile> tiles, int64_t target, const Shape& shape) {
    Cuts cuts;
    for (const PrefillTile& t : tiles) {
        const int32_t pages = pages_of(t);
        Cut cut;
        if (cut.cost(pages) > target) {
            const int64_t longest = std::max<int64_t>(target - kTileCost - kPartCost, kLeastPages);
            const int32_t parts =
                int32_t(std::clamp<int64_t>((pages + longest - 1) / longest, 1, std::max(1, pages / kLeastPages)));
            const int32_t length = shape.round((pages + parts - 1) / parts);
            cut = Cut::of(pages, length, length);
        }
        cuts.add(cut, shape.kv_heads);
    }
    return cuts;
}

// Empty: tiles stay as they are.
std::vector<Cut> choose_cuts(std::span<const PrefillTile> tiles, const Shape& shape) {
    const int ctas = shape.ctas;
    const int64_t n_items = int64_t(tiles.size()) * shape.kv_heads;
    if (ctas <= 1 || n_items > int64_t(kRoundsToSplit) * ctas) return {};
    int64_t work = 0;
    for (const PrefillTile& t : tiles) work += int64_t(Cut{}.cost(pages_of(t))) * shape.kv_heads;
    const int64_t good_enough = work * 103 / 100 / ctas;
    Cuts best;
    const std::vector<Cut> whole(tiles.size());
    best.time = time_of(tiles, whole, shape.kv_heads, ctas);
    const auto consider = [&](Cuts cuts) {
        if (cuts.slots > prefill_slots(ctas)) return;
        cuts.time = time_of(tiles, cuts.of, shape.kv_heads, ctas);
        if (cuts.time < best.time) best = std::move(cuts);
    };
    // As many tiles whole as all CTAs take equally many of, or none.
    const size_t in_full_rounds = size_t(n_items / ctas * ctas / shape.kv_heads);
    for (const size_t n : {in_full_rounds, size_t{0}}) {
        int64_t pages = 0;
        for (const PrefillTile& t : tiles.subspan(n)) pages += pages_of(t);
        for (const int percent : {100, 104}) {
            if (best.time <= good_enough) return best.of;
            const int64_t length = pages * shape.kv_heads * percent / 100 / ctas + 1;
            consider(cut_the_rest(tiles, n, shape.round(std::max<int64_t>(length, kLeastPages)), shape));
        }
        if (in_full_rounds == 0) break;
    }
    if (in_full_rounds > tiles.size() / 2) return best.of;
    for (const int percent : {50, 65, 80, 100, 106, 112, 118, 125, 135, 150, 175, 200}) {
        if (best.time <= good_enough) return best.of;
        consider(cut_equally(tiles, (work * percent / 100 + ctas - 1) / ctas, shape));
    }
    return best.of;
}

}  // namespace

PrefillPlan::PrefillPlan(std::span<const SequenceArgs> sequences, const PrefillShape& shape, std::span<const BlockWalk> walks)
    : rows_(shape.rows) {
    const int group = shape.group, window = shape.window, kv_heads = shape.kv_heads;
    const bool causal = shape.causal;
    // A counting sort by pages: this runs once per step, and the rows may be hundreds of thousands.
    constexpr int kClasses = 1024;
    std::array<int32_t, kClasses> place{};
    const auto pages_for = [](int32_t keys) { return (keys + kPageTokens - 1) / kPageTokens; };
    const auto walk_of = [&](size_t n) { return walks.empty() ? BlockWalk{} : walks[n]; };
    int32_t most_pages = 1;
    for (size_t n = 0; n < sequences.size(); ++n)
        most_pages = std::max(most_pages, pages_for(walk_of(n).keys(sequences[n].n_keys)));
    const auto class_of = [&](const PrefillTile& t) {
        return kClasses - 1 - int(int64_t(pages_of(t)) * (kClasses - 1) / most_pages);
    };
    const auto sort = [&](const std::vector<PrefillTile>& tiles) {
        place = {};
        pages_ = 0;
        for (const PrefillTile& t : tiles) ++place[size_t(class_of(t))], pages_ += pages_of(t);
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
        const BlockWalk walk = walk_of(n);
        const int64_t rows = int64_t(s.n_query) * group;
        const int position = s.n_keys - s.n_query;
        for (int64_t row = 0; row < rows; row += shape.rows) {
            const int64_t last = std::min(row + shape.rows, rows) - 1;
            // Both ends of the visible range grow with the position.
            const KeyRange low = visible_keys(causal, window, s.n_keys, position + int(row / group));
            const KeyRange high = visible_keys(causal, window, s.n_keys, position + int(last / group));
            PrefillTile t{};
            t.first_row = int32_t(row);
            t.first_token = int32_t(row / group);
            t.page_begin = walk.keys(low.begin) / kPageTokens;
            t.page_end = std::max(t.page_begin, pages_for(walk.keys(high.end)));
            t.walk = walk, t.own_keys = walk.keys(s.n_keys);
            t.n_keys = s.n_keys, t.n_query = s.n_query, t.row = s.row, t.first_entry = s.first_entry;
            t.sequence = int32_t(n);
            t.parts = 1;
            tiles.push_back(t);
        }
    }
    sort(tiles);
    const std::vector<Cut> cuts = choose_cuts(tiles_, {kv_heads, shape.ctas, shape.cut_every});
    if (cuts.empty()) return;
    tiles.clear();
    for (size_t n = 0; n < tiles_.size(); ++n) {
        PrefillTile t = tiles_[n];
        const int32_t begin = t.page_begin, pages = pages_of(t);
        t.parts = cuts[n].parts;
        if (t.parts > 1) {
            t.first_slot = slots_;
            slots_ += t.parts * kv_heads;
        }
        for (t.part = 0, t.page_end = begin; t.part < t.parts; ++t.part) {
            t.page_begin = t.page_end;
            t.page_end = begin + cuts[n].end(t.part, pages);
            tiles.push_back(t);
        }
    }
    sort(tiles);
}

PrefillPlan PrefillPlan::resident(std::span<const SequenceArgs> sequences, PrefillShape shape, int keys, int ctas,
                                  std::span<const BlockWalk> walks) {
    int64_t most = 0;
    for (size_t n = 0; n < sequences.size(); ++n) {
        const SequenceArgs& s = sequences[n];
        if (s.n_query == 0) continue;
        if ((walks.empty() ? s.n_keys : walks[n].keys(s.n_keys)) > keys) return {};
        most = std::max(most, int64_t(s.n_query) * shape.group);
    }
    if (most == 0) return {};
    int64_t best = INT64_MAX;  // time of the CTA that has most to do
    for (int64_t parts = 1; parts <= 16; ++parts) {
        const int64_t rows = std::min<int64_t>(((most + parts - 1) / parts + 63) / 64 * 64, kMostTileRows);
        int64_t tiles = 0;
        for (const SequenceArgs& s : sequences) tiles += (int64_t(s.n_query) * shape.group + rows - 1) / rows;
        const int64_t rounds = (tiles * shape.kv_heads + ctas - 1) / ctas, time = rounds * (2 * rows / 64 + kResidentCost);
        if (time < best) best = time, shape.rows = int(rows);
    }
    shape.ctas = 0;
    return PrefillPlan(sequences, shape, walks);
}

std::vector<uint32_t> PrefillPlan::entries() const {
    struct Range {
        int32_t first_entry, begin, end;
        BlockWalk walk;
    };
    int32_t sequences = 0;
    for (const PrefillTile& t : tiles_) sequences = std::max(sequences, t.sequence + 1);
    std::vector<Range> ranges(size_t(sequences), Range{});
    for (const PrefillTile& t : tiles_) {
        Range& r = ranges[size_t(t.sequence)];
        const bool first = r.begin == r.end;
        r = {t.first_entry, first ? t.page_begin : std::min(r.begin, t.page_begin), std::max(r.end, t.page_end), t.walk};
    }
    // The queries of a sequence may be several here, with the same entries.
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
        return a.first_entry != b.first_entry ? a.first_entry < b.first_entry : a.begin < b.begin;
    });
    std::vector<uint32_t> entries;
    int32_t end = 0;  // of the pages of this sequence so far
    for (size_t n = 0; n < ranges.size(); ++n) {
        const Range& r = ranges[n];
        if (n > 0 && r.first_entry != ranges[n - 1].first_entry) end = 0;
        for (int32_t page = std::max(r.begin, end); page < r.end; ++page)
            entries.push_back(uint32_t(r.first_entry + r.walk.block(page)));
        end = std::max(end, r.end);
    }
    return entries;
}

size_t PrefillPlan::bytes() const {
    return sizeof(PrefillSchedule) + tiles_.size() * sizeof(PrefillTile) +
           size_t(slots_) * size_t(rows_ / 16) * sizeof(uint32_t);
}

void PrefillPlan::write(void* to) const {
    auto* header = static_cast<PrefillSchedule*>(to);
    *header = {0, 0, int32_t(tiles_.size()), rows_};
    auto* out = reinterpret_cast<PrefillTile*>(header + 1);
    std::copy(tiles_.begin(), tiles_.end(), out);
    std::memset(out + tiles_.size(), 0, size_t(slots_) * size_t(rows_ / 16) * sizeof(uint32_t));
}

size_t prefill_workspace_bytes(int rows, int head_dim, int ctas) {
    return size_t(prefill_slots(ctas)) * size_t(rows / 16) * part_bytes(head_dim);
}

}  // namespace ta::cuda
