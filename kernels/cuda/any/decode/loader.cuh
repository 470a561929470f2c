// How one warp of the decode kernel walks its range of units and gets their pieces into shared memory.
#pragma once

#include "kernels/cuda/any/decode/cut.cuh"
#include "kernels/cuda/common/block_walk.h"

namespace ta::cuda {

// A place in the flattened units; the same in all lanes.
struct DecodeCursor {
    SequenceArgs s;
    int32_t seq, head;
    int32_t page, pages;  // next page of `pages` that the sequence's queries see

    // The lengths that every lane has loaded before it looks for any place. With up to 32 sequences these are all lengths, one
    // in each lane.
    struct Probe {
        int32_t upto;
        SequenceArgs s;
        __device__ Probe(const DecodeParams& p, int lane)
            : upto(p.pages_before[min((lane + 1) * ((p.a.batch + 31) / 32), p.a.batch)]),
              s(p.a.sequences[min(lane, p.a.batch - 1)]) {}
        __device__ int32_t pages() const { return __shfl_sync(kAllLanes, upto, 31); }
    };

    // The place of unit u, which exists. Each round reads 32 entries of the prefix sums at once.
    __device__ void seek(const DecodeParams& p, int32_t u, const Probe& probe, int lane) {
        int32_t first = 0, n = p.a.batch, begin, end, upto = probe.upto;  // the sequence is among [first, first + n)
        for (;;) {
            const int32_t stride = (n + 31) / 32;
            if (first > 0 || n < p.a.batch) upto = p.pages_before[first + min((lane + 1) * stride, n)];
            const uint32_t before = __ballot_sync(kAllLanes, (lane + 1) * stride <= n && upto * p.a.kv_heads <= u);
            const int32_t skipped = __popc(before);
            first += skipped * stride;
            n = min(stride, n - skipped * stride);
            if (stride > 1) continue;
            seq = first;
            end = __shfl_sync(kAllLanes, upto, skipped);
            begin = skipped > 0 ? __shfl_sync(kAllLanes, upto, skipped - 1) : seq > 0 ? p.pages_before[seq] : 0;
            break;
        }
        if (p.a.batch <= 32) {
            s.n_keys = __shfl_sync(kAllLanes, probe.s.n_keys, seq);
            s.n_query = __shfl_sync(kAllLanes, probe.s.n_query, seq);
            s.row = __shfl_sync(kAllLanes, probe.s.row, seq);
            s.first_entry = __shfl_sync(kAllLanes, probe.s.first_entry, seq);
        } else {
            s = p.a.sequences[seq];
        }
        pages = end - begin;
        const int32_t rest = u - begin * p.a.kv_heads;
        head = rest / pages;
        page = rest - head * pages;
    }

    // The first unit of the next (sequence, head) that has any; there is one.
    __device__ void next_segment(const DecodeParams& p) {
        page = 0;
        if (++head < p.a.kv_heads) return;
        head = 0;
        do {
            ++seq;
            pages = p.pages_before[seq + 1] - p.pages_before[seq];
        } while (pages == 0);
        s = p.a.sequences[seq];
    }
};

// kTiered: a sequence's pages may not be all of its blocks.
template <bool kTiered>
__device__ __forceinline__ BlockWalk walk_of(const AttendArgs& a, int32_t seq) {
    if (kTiered && a.first_block) return {a.first_block[seq], a.block_stride};
    return {};
}

// The first page that a sequence's queries see.
__device__ __forceinline__ int32_t first_page(const AttendArgs& a, const SequenceArgs& s, const BlockWalk& walk) {
    if (a.window == 0 || a.first_position) return 0;
    return walk.pages(visible_keys(a.causal, a.window, s.n_keys, s.n_keys - s.n_query).begin / kPageTokens);
}

// Pieces of a warp's range, in order, in a ring of slots, up to kDecodeMaxInFlight on their way or held. All slots are of one
// size at a time, that of the pieces in flight: token and channel pieces, and those of heads of other bits, wait for each
// other. kTiered: entries may be of dropped or low pages. kAnyBits: heads of channel pages may have 8 bits.
template <int D, bool kTiered, bool kAnyBits>
class PieceLoader {
  public:
    struct Piece {
        const uint8_t* data;
        bool channel;
        bool dropped;  // nothing is there
        bool low;
    };

    // `units` from `at` on will be taken. Reads the block table, but no page.
    __device__ PieceLoader(const DecodeParams& p, const DecodeCursor& at, int32_t units, uint8_t* ring, uint64_t* barriers,
                           int lane)
        : p_(p), at_(at), left_(units), ring_(ring), barriers_(smem_address(barriers)), lane_(lane) {
        if (left_ > 0) find_segment();
    }
    // Brings the start of the next segment into L1. Once pages have been requested, each access waits in the queue behind them.
    __device__ __forceinline__ void touch_next_segment() const {
        DecodeCursor next = at_;
        next.next_segment(p_);
        const BlockWalk walk = walk_of<kTiered>(p_.a, next.seq);
        const uint64_t* entry = p_.a.table + next.s.first_entry + walk.block(first_page(p_.a, next.s, walk) + lane_);
        uint64_t unused;
        if (lane_ < next.pages) asm volatile("ld.global.ca.u64 %0, [%1];" : "=l"(unused) : "l"(entry));
    }

    // The pages may be read from now on: starts the first copies.
    __device__ __forceinline__ void start() {
        if (segment_left_ == 0) return;
        open_batch();
        resize_slots(kTokenBytes);
        fill();
    }

    // Starts as many copies as there is room for.
    __device__ __forceinline__ void fill() {
        while (batch_left_ > 0 && in_flight_ < slots_) {
            const bool dropped = kTiered && (dropped_ & 1), low = kTiered && (lows_ & 1);
            const uint32_t slot = kinds_ & 1 ? channel_bytes_ : kTokenBytes;
            if (slot != slot_bytes_ && !dropped) {
                if (in_flight_ > 0) break;
                resize_slots(slot);
            }
            copy(dropped ? 0 : low ? kBytes<2, 2> : slot);
            if constexpr (kTiered) states_ |= (dropped | low << 1) << 2 * in_flight_;
            put_ = slot_after(put_);
            ++in_flight_;
            next_piece();
        }
    }

    // Waits for the oldest piece.
    __device__ __forceinline__ Piece take() {
#if __CUDA_ARCH__ >= 900
        mbarrier_wait(barrier(taken_), taken_ / kDecodeMaxInFlight & 1);
#else
        switch (in_flight_) {  // the instruction takes a constant
            case 1:
                cp_async_wait<0>();
                break;
            case 2:
                cp_async_wait<1>();
                break;
            case 3:
                cp_async_wait<2>();
                break;
            default:
                cp_async_wait<3>();
        }
        __syncwarp();
#endif
        return {ring_ + take_, slot_bytes_ != kTokenBytes, kTiered && (states_ & 1), kTiered && (states_ & 2)};
    }

    // The oldest piece has been read by all lanes: its bytes may be overwritten.
    __device__ __forceinline__ void release() {
        __syncwarp();
        ++taken_;
        --in_flight_;
        take_ = slot_after(take_);
        if constexpr (kTiered) states_ >>= 2;
    }

  private:
    template <int kKBits, int kVBits>
    static constexpr uint32_t kBytes = ChannelLayout(D, kKBits, kVBits).bytes();
    static constexpr uint32_t kTokenBytes = TokenLayout(D).bytes();

    // No piece is in flight.
    __device__ void resize_slots(uint32_t bytes) {
        slot_bytes_ = bytes;
        slots_ = 1;
#pragma unroll
        for (uint32_t n = 2; n <= kDecodeMaxInFlight; ++n) slots_ += n * bytes <= uint32_t(p_.ring_bytes);
        end_ = slots_ * bytes;
        put_ = take_ = 0;
    }
    __device__ __forceinline__ uint32_t slot_after(uint32_t place) const {
        return place + slot_bytes_ == end_ ? 0 : place + slot_bytes_;
    }
    __device__ __forceinline__ uint32_t barrier(uint32_t piece) const {
        return barriers_ + piece % kDecodeMaxInFlight * 8;
    }

    __device__ void find_segment() {
        const HeadArgs h = p_.a.heads ? p_.a.heads[at_.head] : HeadArgs{0, 4, 4, 0};
        if (kAnyBits && p_.a.some_8_bits) {
            channel_bytes_ = min(uint32_t(ChannelLayout(D, h.k_bits, h.v_bits).bytes()), kTokenBytes);  // as a token page's
        } else {
            channel_bytes_ = h.k_bits == 4   ? h.v_bits == 4 ? kBytes<4, 4> : kBytes<4, 2>
                               : h.v_bits == 4 ? kBytes<2, 4>
                                             : kBytes<2, 2>;
        }
        channel_offset_ = h.channel_offset;
        segment_left_ = min(at_.pages - at_.page, left_);
        left_ -= segment_left_;
        const BlockWalk walk = walk_of<kTiered>(p_.a, at_.seq);
        next_entry_ = p_.a.table + at_.s.first_entry + walk.block(first_page(p_.a, at_.s, walk) + at_.page + lane_);
        following_ = load_entry(0);
    }

    // The batch of 32 entries that `following_` are; loads the one after it.
    __device__ void open_batch() {
        in_batch_ = 0;
        batch_left_ = min(segment_left_, 32);
        const bool channel = following_ & kEntryChannel;
        kinds_ = __ballot_sync(kAllLanes, channel);
        if constexpr (kTiered) {
            dropped_ = __ballot_sync(kAllLanes, bool(following_ & kEntryDropped));
            lows_ = __ballot_sync(kAllLanes, bool(following_ & kEntryLow));
        }
        source_ = source_of(following_, channel);
        following_ = load_entry(32);
    }

    // This lane's entry, `ahead` after the batch at hand.
    __device__ uint64_t load_entry(int ahead) const {
        return lane_ + ahead < segment_left_ ? next_entry_[ahead * stride()] : 0;
    }
    __device__ __forceinline__ int32_t stride() const {
        return kTiered ? p_.a.block_stride : 1;
    }

    __device__ __forceinline__ const uint8_t* source_of(uint64_t entry, bool channel) const {
        const uint64_t layer = entry & kEntrySingleLayer ? 0 : channel ? p_.a.channel_layer_offset : p_.a.token_layer_offset;
        const uint64_t head = channel ? channel_offset_ : at_.head * TokenLayout(D).bytes();
        const uint64_t of_low = (entry & kEntrySingleLayer ? 0 : p_.a.low_layer_offset) + uint64_t(at_.head) * kBytes<2, 2>;
        const bool low = kTiered && (entry & kEntryLow);
        return reinterpret_cast<const uint8_t*>((entry & ~kEntryFlags) + (low ? of_low : layer + head));
    }

    // The next piece of the batch, to `put_`.
    __device__ __forceinline__ void copy(uint32_t bytes) {
        const uint32_t target = smem_address(ring_) + put_;
#if __CUDA_ARCH__ >= 900
        if (lane_ == in_batch_) {  // the lane that has the entry
            const uint32_t full = barrier(taken_ + in_flight_);
            mbarrier_expect(full, bytes);
            if (!kTiered || bytes > 0) bulk_copy(target, source_, bytes, full);
        }
#else
        const auto* source =
            reinterpret_cast<const uint8_t*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(source_), in_batch_));
        for (uint32_t i = lane_ * 16; i < bytes; i += 512) cp_async_16(target + i, source + i);
        cp_async_commit();
#endif
    }

    __device__ __forceinline__ void next_piece() {
        ++in_batch_;
        kinds_ >>= 1;
        if constexpr (kTiered) dropped_ >>= 1, lows_ >>= 1;
        if (--batch_left_ == 0) next_batch();
    }

    // Leaves batch_left_ at 0 at the end of the range.
    __device__ void next_batch() {
        if (segment_left_ > 32) {
            segment_left_ -= 32;
            next_entry_ += 32 * stride();
        } else {
            if (left_ == 0) return;
            at_.next_segment(p_);
            find_segment();
        }
        open_batch();
    }

    const DecodeParams& p_;
    DecodeCursor at_;  // where the segment begins whose pieces are being copied
    int32_t left_;     // pieces of segments after it
    uint8_t* const ring_;
    const uint32_t barriers_;
    const int lane_;

    uint32_t slot_bytes_ = 0, slots_ = 0, end_ = 0;  // of slots
    uint32_t put_ = 0, take_ = 0;                    // slots of the next piece, and of the oldest in flight
    uint32_t in_flight_ = 0, taken_ = 0;
    uint32_t states_ = 0;  // 2 bits for each piece in flight, the oldest lowest: dropped, low

    // Lane k has the address of piece k of a batch of 32, and the entry of piece k of the next batch.
    const uint64_t* next_entry_;
    const uint8_t* source_;
    uint64_t following_;
    uint32_t kinds_;  // bit k: of a channel page, k pieces from here
    uint32_t dropped_, lows_;
    int32_t in_batch_, batch_left_ = 0;
    int32_t segment_left_ = 0;  // from the begin of the batch on
    uint32_t channel_bytes_, channel_offset_;
};

}  // namespace ta::cuda
