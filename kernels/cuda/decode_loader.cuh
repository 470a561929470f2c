// How one warp of the decode kernel walks its range of units and gets their pieces into shared memory.
#pragma once

#include "kernels/cuda/decode_params.h"
#include "kernels/cuda/mma.cuh"

namespace ta::cuda {

inline constexpr uint32_t kAllLanes = 0xffffffffu;

// A place in the flattened units; the same in all lanes.
struct DecodeCursor {
    int32_t seq, head;
    int32_t page, pages;  // next page of `pages` that the sequence's queries see

    // The place of unit u, which exists. Each round reads 32 entries of the prefix sums at once: one round up to 32 sequences.
    __device__ void seek(const DecodeParams& p, int64_t u, int lane) {
        int32_t first = 0, n = p.a.batch;  // the sequence is among [first, first + n)
        while (n > 1) {
            const int32_t stride = (n + 31) / 32, probe = (lane + 1) * stride;
            const bool before = probe <= n && int64_t(p.pages_before[first + probe]) * p.a.kv_heads <= u;
            const int32_t skipped = __popc(__ballot_sync(kAllLanes, before)) * stride;
            first += skipped;
            n = min(stride, n - skipped);
            if (stride == 1) break;
        }
        seq = first;
        const int32_t begin = p.pages_before[seq];
        pages = p.pages_before[seq + 1] - begin;
        const int64_t rest = u - int64_t(begin) * p.a.kv_heads;
        head = int32_t(rest / pages);
        page = int32_t(rest - int64_t(head) * pages);
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
    }
};

// The first page of a sequence that its queries see.
__device__ __forceinline__ int32_t first_page(const AttendArgs& a, const SequenceArgs& s) {
    if (a.window == 0) return 0;
    return visible_keys(a.causal, a.window, s.n_keys, s.n_keys - s.n_query).begin / kPageTokens;
}

// Pieces of a warp's range, in order, in a ring of bytes: token and channel pieces differ in size, and so do the bits of heads.
// Up to kDecodeMaxInFlight pieces are on their way or held.
template <int D>
class PieceLoader {
  public:
    struct Piece {
        const uint8_t* data;
        bool channel;
    };

    // `units` from `at` on will be taken.
    __device__ PieceLoader(const DecodeParams& p, DecodeCursor at, int64_t units, uint8_t* ring, uint64_t* barriers, int lane)
        : p_(p), at_(at), left_(units), ring_(ring), barriers_(smem_address(barriers)), lane_(lane) {
        if (left_ > 0) open_segment();
    }

    // Starts as many copies as there is room for.
    __device__ void fill() {
        while (left_ > 0 && issued_ - taken_ < kDecodeMaxInFlight) {
            const uint64_t entry = __shfl_sync(kAllLanes, entries_, in_batch_);
            const bool channel = entry & kEntryChannel;
            const int bytes = channel ? channel_bytes_ : int(TokenLayout(D).bytes());
            int place = head_;
            if (issued_ == taken_) {
                place = tail_ = 0;
            } else if (head_ > tail_) {
                if (place + bytes > p_.ring_bytes) place = 0;
                if (place == 0 && bytes > tail_) break;
            } else if (place + bytes > tail_) {
                break;
            }
            head_ = place + bytes;
            copy(entry, channel, bytes, place);
            advance();
        }
    }

    // Waits for the oldest piece.
    __device__ Piece take() {
        const int stage = taken_ % kDecodeMaxInFlight;
#if __CUDA_ARCH__ >= 900
        if (p_.bulk) mbarrier_wait(barriers_ + 8 * stage, taken_ / kDecodeMaxInFlight & 1);
#endif
        if (!p_.bulk) {
            switch (issued_ - taken_) {  // the instruction takes a constant; any smaller one is right
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
        const uint32_t record = __shfl_sync(kAllLanes, record_, stage);
        tail_ = int(record & ~1u);
        return {ring_ + tail_, bool(record & 1)};
    }

    // The oldest piece has been read by all lanes: its bytes may be overwritten.
    __device__ void release() {
        __syncwarp();
        ++taken_;
        // A later piece keeps its bytes: they begin at its own place, which is the new end of what is free.
        tail_ = int(__shfl_sync(kAllLanes, record_, taken_ % kDecodeMaxInFlight) & ~1u);
    }

  private:
    __device__ void open_segment() {
        const SequenceArgs s = p_.a.sequences[at_.seq];
        const HeadArgs h = p_.a.heads ? p_.a.heads[at_.head] : HeadArgs{0, 4, 4, 0};
        channel_bytes_ = int(ChannelLayout(D, h.k_bits, h.v_bits).bytes());
        channel_offset_ = h.channel_offset;
        in_batch_ = 0;
        batch_left_ = int32_t(min(int64_t(at_.pages - at_.page), left_));
        next_entry_ = p_.a.table + s.first_entry + first_page(p_.a, s) + at_.page + lane_;
        entries_ = load_entries(0);
        following_ = load_entries(32);
    }

    // Of 32 entries, `ahead` after the batch at hand, this lane's.
    __device__ uint64_t load_entries(int ahead) const {
        return lane_ + ahead < batch_left_ ? next_entry_[ahead] : 0;
    }

    __device__ void copy(uint64_t entry, bool channel, int bytes, int place) {
        const uint64_t layer = entry & kEntrySingleLayer ? 0 : channel ? p_.a.channel_layer_offset : p_.a.token_layer_offset;
        const uint64_t head = channel ? channel_offset_ : at_.head * TokenLayout(D).bytes();
        const auto* source = reinterpret_cast<const uint8_t*>((entry & ~kEntryFlags) + layer + head);
        const int stage = issued_ % kDecodeMaxInFlight;
        if (lane_ == stage) record_ = uint32_t(place) | uint32_t(channel);
#if __CUDA_ARCH__ >= 900
        if (p_.bulk) {
            if (lane_ == 0) {
                mbarrier_expect(barriers_ + 8 * stage, uint32_t(bytes));
                bulk_copy(smem_address(ring_ + place), source, uint32_t(bytes), barriers_ + 8 * stage);
            }
            return;
        }
#endif
        const uint32_t target = smem_address(ring_ + place);
        for (int i = lane_ * 16; i < bytes; i += 512) cp_async_16(target + i, source + i);
        cp_async_commit();
    }

    __device__ void advance() {
        ++issued_;
        --left_;
        if (++at_.page == at_.pages) {
            if (left_ == 0) return;
            at_.next_segment(p_);
            open_segment();
        } else if (++in_batch_ == 32) {
            in_batch_ = 0;
            batch_left_ -= 32;
            next_entry_ += 32;
            entries_ = following_;
            following_ = load_entries(32);
        }
    }

    const DecodeParams& p_;
    DecodeCursor at_;  // of the next piece to be copied
    int64_t left_;
    uint8_t* const ring_;
    const uint32_t barriers_;
    const int lane_;

    // Bytes [tail, head) of the ring are in use, around its end if head <= tail. Lane k keeps the place and the kind of piece k of
    // those in flight.
    int head_ = 0, tail_ = 0, issued_ = 0, taken_ = 0;
    uint32_t record_ = 0;

    // Lane k holds entries k and k + 32 of the segment's next ones.
    const uint64_t* next_entry_;
    uint64_t entries_, following_;
    int32_t in_batch_, batch_left_;
    int32_t channel_bytes_;
    uint32_t channel_offset_;
};

}  // namespace ta::cuda
