// How one warp of the decode kernel walks its range of units and gets their pieces into shared memory.
#pragma once

#include "kernels/cuda/any/decode/cut.cuh"

namespace ta::cuda {

// A place in the flattened units; the same in all lanes.
struct DecodeCursor {
    SequenceArgs s;
    int32_t seq, head;
    int32_t page, pages;  // next page of `pages` that the sequence's queries see

    // What every lane has of the lengths before any place is looked for: with up to 32 sequences all of it, one each.
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

// The first page of a sequence's entries that its queries see.
__device__ __forceinline__ int32_t first_page(const AttendArgs& a, const SequenceArgs& s) {
    if (a.window == 0 || a.first_position) return 0;
    return visible_keys(a.causal, a.window, s.n_keys, s.n_keys - s.n_query).begin / kPageTokens;
}

// Pieces of a warp's range, in order, in a ring of bytes: token and channel pieces differ in size, and so do the bits of heads.
// Up to kDecodeMaxInFlight pieces are on their way or held. kTiered: entries may be of dropped or low pages.
template <int D, bool kTiered>
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
    // Brings what the next segment begins with into L1. Once pages have been asked for, each access waits in their queue.
    __device__ __forceinline__ void touch_next_segment() const {
        DecodeCursor next = at_;
        next.next_segment(p_);
        const uint64_t* entry = p_.a.table + next.s.first_entry + first_page(p_.a, next.s) + lane_;
        uint64_t unused;
        if (lane_ < next.pages) asm volatile("ld.global.ca.u64 %0, [%1];" : "=l"(unused) : "l"(entry));
    }

    // The pages may be read from now on: starts the first copies.
    __device__ __forceinline__ void start() {
        if (left_ == 0) return;
        open_batch();
        fill();
    }

    // Starts as many copies as there is room for.
    __device__ __forceinline__ void fill() {
        while (left_ > 0 && in_flight_ < most_in_flight_) {
            const bool channel = kinds_ >> in_batch_ & 1;
            uint32_t bytes = channel ? channel_bytes_ : uint32_t(TokenLayout(D).bytes());
            const bool dropped = kTiered && (dropped_ >> in_batch_ & 1), low = kTiered && (lows_ >> in_batch_ & 1);
            if (low) bytes = kBytes<2, 2>;
            if (dropped) bytes = kPieceAlignment;  // so that it has its turn in the ring
            uint32_t place = head_;
            if (in_flight_ == 0) {
                place = 0;
            } else if (head_ > tail()) {
                if (place + bytes > uint32_t(p_.ring_bytes)) place = 0;
                if (place == 0 && bytes > tail()) break;
            } else if (place + bytes > tail()) {
                break;
            }
            head_ = place + bytes;
            copy(dropped ? 0 : bytes, place);
            const uint32_t place_and_kind = place | channel | (dropped ? 2 : 0) | (low ? 4 : 0);
            if (in_flight_ == 0) oldest_ = place_and_kind;
            if (lane_ == int((taken_ + in_flight_) % kDecodeMaxInFlight)) place_ = place_and_kind;
            ++in_flight_;
            advance();
        }
    }

    // Waits for the oldest piece.
    __device__ __forceinline__ Piece take() {
#if __CUDA_ARCH__ >= 900
        if (p_.bulk) mbarrier_wait(barriers_ + 8 * (taken_ % kDecodeMaxInFlight), taken_ / kDecodeMaxInFlight & 1);
#endif
        if (!p_.bulk) {
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
        }
        return {ring_ + tail(), bool(oldest_ & 1), kTiered && (oldest_ & 2), kTiered && (oldest_ & 4)};
    }

    // The oldest piece has been read by all lanes: its bytes may be overwritten.
    __device__ __forceinline__ void release() {
        __syncwarp();
        ++taken_;
        --in_flight_;
        oldest_ = __shfl_sync(kAllLanes, place_, taken_ % kDecodeMaxInFlight);
    }

  private:
    template <int kKBits, int kVBits>
    static constexpr uint32_t kBytes = ChannelLayout(D, kKBits, kVBits).bytes();

    // Bytes [tail, head) of the ring are in use, around its end if head <= tail.
    __device__ __forceinline__ uint32_t tail() const {
        return oldest_ & ~(kTiered ? 7u : 1u);
    }

    __device__ void find_segment() {
        const HeadArgs h = p_.a.heads ? p_.a.heads[at_.head] : HeadArgs{0, 4, 4, 0};
        channel_bytes_ = h.k_bits == 4   ? h.v_bits == 4 ? kBytes<4, 4> : kBytes<4, 2>
                           : h.v_bits == 4 ? kBytes<2, 4>
                                         : kBytes<2, 2>;
        channel_offset_ = h.channel_offset;
        // Of channel pieces, so that mostly nothing else needs to be looked at to see that there is no room.
        most_in_flight_ = 1;
#pragma unroll
        for (uint32_t n = 2; n <= kDecodeMaxInFlight; ++n) most_in_flight_ += n * channel_bytes_ <= uint32_t(p_.ring_bytes);
        batch_left_ = min(at_.pages - at_.page, left_);
        next_entry_ = p_.a.table + at_.s.first_entry + first_page(p_.a, at_.s) + at_.page + lane_;
        following_ = load_entry(0);
    }

    // The batch of 32 entries that `following_` are; loads the one after it.
    __device__ void open_batch() {
        in_batch_ = 0;
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
        return lane_ + ahead < batch_left_ ? next_entry_[ahead] : 0;
    }

    __device__ __forceinline__ const uint8_t* source_of(uint64_t entry, bool channel) const {
        const uint64_t layer = entry & kEntrySingleLayer ? 0 : channel ? p_.a.channel_layer_offset : p_.a.token_layer_offset;
        const uint64_t head = channel ? channel_offset_ : at_.head * TokenLayout(D).bytes();
        const uint64_t of_low = (entry & kEntrySingleLayer ? 0 : p_.a.low_layer_offset) + uint64_t(at_.head) * kBytes<2, 2>;
        const bool low = kTiered && (entry & kEntryLow);
        return reinterpret_cast<const uint8_t*>((entry & ~kEntryFlags) + (low ? of_low : layer + head));
    }

    __device__ __forceinline__ void copy(uint32_t bytes, uint32_t place) {
#if __CUDA_ARCH__ >= 900
        if (p_.bulk) {
            if (lane_ == in_batch_) {  // the lane that has the entry
                const uint32_t barrier = barriers_ + 8 * ((taken_ + in_flight_) % kDecodeMaxInFlight);
                mbarrier_expect(barrier, bytes);
                if (!kTiered || bytes > 0) bulk_copy(smem_address(ring_ + place), source_, bytes, barrier);
            }
            return;
        }
#endif
        const auto* source =
            reinterpret_cast<const uint8_t*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(source_), in_batch_));
        const uint32_t target = smem_address(ring_ + place);
        for (uint32_t i = lane_ * 16; i < bytes; i += 512) cp_async_16(target + i, source + i);
        cp_async_commit();
    }

    __device__ __forceinline__ void advance() {
        --left_;
        if (++at_.page == at_.pages) {
            if (left_ == 0) return;
            at_.next_segment(p_);
            find_segment();
            open_batch();
        } else if (++in_batch_ == 32) {
            batch_left_ -= 32;
            next_entry_ += 32;
            open_batch();
        }
    }

    const DecodeParams& p_;
    DecodeCursor at_;  // of the next piece to be copied
    int32_t left_;
    uint8_t* const ring_;
    const uint32_t barriers_;
    const int lane_;

    // The place in the ring of the oldest piece in flight, in the lowest bits whether it is of a channel page, of a dropped
    // one, of a low one; lane k has that of the piece whose barrier is k.
    uint32_t oldest_ = 0, place_ = 0;
    uint32_t head_ = 0, in_flight_ = 0, taken_ = 0;

    // Lane k has the address of piece k of a batch of 32, and the entry of piece k of the next batch.
    const uint64_t* next_entry_;
    const uint8_t* source_;
    uint64_t following_;
    uint32_t kinds_;  // bit k: entry k is of a channel page
    uint32_t dropped_, lows_;
    int32_t in_batch_, batch_left_;
    uint32_t channel_bytes_, channel_offset_, most_in_flight_ = 0;
};

}  // namespace ta::cuda
