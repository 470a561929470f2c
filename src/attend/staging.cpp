#include "src/attend/staging.h"

#include <algorithm>

#include "src/core/checked.h"

namespace ta {
namespace {

constexpr size_t kPlaceBytes = 4096;  // entries of block tables keep flags in the bits below

class SlotCutter {
  public:
    explicit SlotCutter(size_t slot_bytes) : slot_bytes_(slot_bytes) {}
    StagingRing::Place cut(size_t bytes) {
        if (used_ + bytes > slot_bytes_ || slots_ == 0) {
            ++slots_;
            used_ = 0;
        }
        const StagingRing::Place place{slots_ - 1, used_};
        used_ = round_up(used_ + bytes, kPlaceBytes);
        return place;
    }
    size_t slots() const { return slots_; }  // slots cut so far

  private:
    const size_t slot_bytes_;
    size_t slots_ = 0, used_ = 0;
};

}  // namespace

int64_t reads_of_page(int64_t n_query, int group, int64_t rows_at_once, int64_t window) {
    const auto passes = [&](int64_t tokens) { return (tokens * group + rows_at_once - 1) / rows_at_once; };
    if (window == 0) return passes(n_query);
    // The query tokens that see a key of the page; the page may begin anywhere within a pass.
    return std::min(passes(n_query), passes(window + kPageTokens - 1) + 1);
}

std::vector<uint32_t> choose_staged(std::span<const HostPages> sequences, StagingMode mode, double bytes_per_s) {
    // Per layer: a stream waits twice for another, and a batch of copies starts.
    constexpr double kStartSeconds = 15e-6;
    std::vector<uint32_t> chosen;
    if (mode == StagingMode::kNever) return chosen;
    const int64_t least = mode == StagingMode::kAlways ? 1 : 2;
    double in_place = 0, staged = kStartSeconds;
    for (size_t i = 0; i < sequences.size(); ++i) {
        const HostPages& s = sequences[i];
        if (s.reads < least || s.bytes == 0) continue;
        in_place += double(s.reads) * double(s.bytes) / bytes_per_s;
        staged += double(s.bytes) / bytes_per_s;
        chosen.push_back(uint32_t(i));
    }
    if (mode == StagingMode::kAuto && staged >= in_place) chosen.clear();
    std::stable_sort(chosen.begin(), chosen.end(),
                     [&](uint32_t a, uint32_t b) { return sequences[a].reads > sequences[b].reads; });
    return chosen;
}

size_t count_ring_slots(std::span<const uint32_t> page_bytes, int parts, size_t slot_bytes) {
    SlotCutter cutter(slot_bytes);
    for (int part = 0; part < parts; ++part) {
        for (const uint32_t bytes : page_bytes) (void)cutter.cut(bytes);
    }
    return cutter.slots();
}

StagingRing cut_ring(std::span<const uint32_t> page_bytes, size_t slots, size_t slot_bytes) {
    StagingRing ring;
    ring.parts = count_ring_slots(page_bytes, 2, slot_bytes) <= slots ? 2 : 1;
    SlotCutter cutter(slot_bytes);
    for (int part = 0; part < ring.parts; ++part) {
        for (const uint32_t bytes : page_bytes) {
            const StagingRing::Place place = cutter.cut(bytes);
            if (cutter.slots() > slots) break;
            ring.places.push_back(place);
        }
    }
    ring.pages = ring.places.size() / size_t(ring.parts);
    return ring;
}

}  // namespace ta
