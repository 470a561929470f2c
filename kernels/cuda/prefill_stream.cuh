// The order in which a CTA's pages come from memory.
#pragma once

#include <cstddef>

#include "kernels/cuda/prefill.h"
#include "kernels/cuda/wgmma.cuh"

namespace ta::cuda::prefill {

inline constexpr int kRawPages = 5;  // pages on their way from memory

// Position in a ring of `N` slots and the parity of its barrier's phase.
template <int N>
struct Ring {
    int slot = 0;
    uint32_t phase = 0;
    TA_DEVICE void next() {
        if (++slot == N) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// The pages that a CTA reads, tile after tile, as a stream of bulk copies. Run by one warp, whose lane n knows the address of page n
// of a batch of 32; what the next tile needs is loaded while the copies of this one are ordered. It lives in shared memory: the
// registers of its warp are for expanding pages.
template <int D>
class PageStream {
  public:
    TA_DEVICE void start(const PrefillTile* first, const PrefillTile* last, int lane) {
        tiles_ = reinterpret_cast<const int32_t*>(first);
        left_ = int(last - first);
        page_ = page_end_ = batch_ = issued_ = 0;
        ring_ = {};
        load_tile(lane);
        __syncwarp();
    }

    // Starts copies until `until` pages have been asked for since the beginning, or all of them.
    template <class Shared>
    TA_DEVICE void fill(const AttendArgs& args, int until, Shared& shared, int lane) {
        // All lanes read the state between two warp barriers, so that none sees another's change to it.
        while (true) {
            __syncwarp();
            const int issued = issued_, page = page_, page_end = page_end_, batch = batch_, left = left_;
            const bool has_entry = has_entry_;
            const Ring<kRawPages> at = ring_;
            __syncwarp();
            if (issued >= until) {
                if (left > 0 && !has_entry) {
                    next_entry_[lane] =
                        load_entry(args, word(offsetof(PrefillTile, first_entry)), word(offsetof(PrefillTile, page_begin)),
                                   word(offsetof(PrefillTile, page_end)), lane);
                    has_entry_ = true;
                }
                return;
            }
            if (page == page_end) {
                if (left == 0) return;
                start_tile(args, lane);
                continue;
            }
            if (page == batch + 32) {
                find_addresses(args, load_entry(args, first_entry_, page, page_end, lane), lane);
                continue;
            }
            sm90::barrier_wait(&shared.raw_empty[at.slot], at.phase ^ 1);
            if (lane == 0) {
                const uint64_t from = address_[page - batch];
                const uint32_t is_channel = uint32_t(from & kEntryChannel), bytes = is_channel ? channel_bytes_ : kTokenBytes;
                shared.raw_is_channel[at.slot] = is_channel;
                sm90::barrier_arrive_expecting(&shared.raw_full[at.slot], bytes);
                sm90::bulk_copy(shared.raw[at.slot], reinterpret_cast<const void*>(from - is_channel), bytes,
                                &shared.raw_full[at.slot]);
                ring_.next();
                page_ = page + 1;
                issued_ = issued + 1;
            }
        }
    }

  private:
    static constexpr int kWords = sizeof(PrefillTile) / 4;
    static constexpr uint32_t kTokenBytes = TokenLayout(D).bytes();

    TA_DEVICE int word(size_t offset) const { return words_[offset / 4]; }
    TA_DEVICE void load_tile(int lane) {
        if (left_ > 0 && lane < kWords) words_[lane] = __ldg(tiles_ + lane);
        has_entry_ = false;
    }
    TA_DEVICE static uint64_t load_entry(const AttendArgs& args, int first_entry, int page, int page_end, int lane) {
        return page + lane < page_end ? __ldg(args.table + first_entry + page + lane) : 0;
    }
    TA_DEVICE void start_tile(const AttendArgs& args, int lane) {
        __syncwarp();
        const int head = word(offsetof(PrefillTile, head)), first_entry = word(offsetof(PrefillTile, first_entry));
        const int page = word(offsetof(PrefillTile, page_begin)), page_end = word(offsetof(PrefillTile, page_end));
        const uint64_t entry = has_entry_ ? next_entry_[lane] : load_entry(args, first_entry, page, page_end, lane);
        const int left = left_ - 1;
        const int32_t* tiles = tiles_ + kWords;
        __syncwarp();
        head_ = head, first_entry_ = first_entry, page_ = page, page_end_ = page_end, left_ = left, tiles_ = tiles;
        find_addresses(args, entry, lane);
        load_tile(lane);
        __syncwarp();
    }
    TA_DEVICE void find_addresses(const AttendArgs& args, uint64_t entry, int lane) {
        const int head = head_;
        uint64_t address = entry & ~kEntryFlags;
        if (args.heads) {
            const HeadArgs h = args.heads[head];
            channel_bytes_ = uint32_t(ChannelLayout(D, h.k_bits, h.v_bits).bytes());
            if (entry & kEntryChannel)
                address += (entry & kEntrySingleLayer ? 0 : args.channel_layer_offset) + h.channel_offset + kEntryChannel;
        }
        if (!(entry & kEntryChannel))
            address += (entry & kEntrySingleLayer ? 0 : args.token_layer_offset) + uint64_t(head) * kTokenBytes;
        address_[lane] = address;
        batch_ = page_;
        __syncwarp();
    }

    uint64_t address_[32], next_entry_[32];  // bit 0 of an address: a channel page
    const int32_t* tiles_;                   // the next tile
    int32_t words_[kWords];                  // its words
    int left_;                               // tiles from there on
    bool has_entry_;                         // next_entry_ is that of the next tile
    int head_, first_entry_, page_, page_end_, batch_, issued_;
    uint32_t channel_bytes_;
    Ring<kRawPages> ring_;
};

}  // namespace ta::cuda::prefill
