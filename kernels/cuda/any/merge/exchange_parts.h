// Ranks of a group exchange their parts of a result and merge them, in one launch of each rank, if every GPU reaches the memory
// of every other. The host side; nothing here needs the CUDA language.
//
// Each rank has an area, which the others write to: slots [2, ranks] of kExchangeSlotBytes, then signals [2, ranks,
// kMaxExchangeCtas]. Exchange n of a step uses slots and signals n % 2. A rank that has begun exchange n + 2 has had all
// signals of exchange n + 1, and the senders of those had read its slots of n.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/merge_states.h"
#include "kernels/format/output_heads.h"

struct CUstream_st;

namespace ta::cuda {

inline constexpr size_t kExchangeSlotBytes = size_t{2} << 20;  // O [rows, head_dim], then LSE [rows], F32
inline constexpr int kMaxExchangeRows = 32;                    // of a tile
inline constexpr int kMaxExchangeCtas = 128;
// Rows of a tile, and number of CTAs, of an exchange of so many rows, at all ranks. Few rows take few CTAs: the next attention
// kernel may start on the other multiprocessors meanwhile.
inline constexpr int kFewExchangeCtas = 32;
TA_HD constexpr int exchange_tile_rows(int rows) {
    const int even = (rows + kFewExchangeCtas - 1) / kFewExchangeCtas;
    return even < kMaxExchangeRows ? even : kMaxExchangeRows;
}
TA_HD constexpr int exchange_ctas(int rows) {
    const int tiles = (rows + exchange_tile_rows(rows) - 1) / exchange_tile_rows(rows);
    const int most = rows <= 1024 ? kFewExchangeCtas : kMaxExchangeCtas;
    return tiles < most ? tiles : most;
}

struct ExchangeSignal {
    uint64_t arguments;  // of the call that the part is of
    uint64_t value;      // written last: of this exchange and no other
};

constexpr size_t exchange_area_bytes(int ranks) {
    return 2 * size_t(ranks) * (kExchangeSlotBytes + kMaxExchangeCtas * sizeof(ExchangeSignal));
}
constexpr int rows_per_exchange(int head_dim) {
    return int(kExchangeSlotBytes / (size_t(head_dim + 1) * sizeof(float)));
}

// In mapped host memory: what the host tells the exchanges of a step, and they it.
struct ExchangeNotes {
    uint64_t given_up;  // by the host: identity of the step that is given up
    uint64_t failed;    // by the first exchange that fails: identity of its step, written last
    enum Cause : uint32_t { kNone, kSilent, kOtherArguments, kGivenUp };
    uint32_t cause, rank;
};

// In device memory, written before the first exchange of a step.
struct ExchangeState {
    uint64_t identity;  // of the step, the same at all ranks; 0: there is none
    uint64_t patience;  // nanoseconds that an exchange waits
    ExchangeNotes* notes;
    uint8_t* areas[kMaxMergeParts];  // of each rank
    uint32_t failed;                 // an exchange of this step did
};

struct ExchangeArgs {
    ExchangeState* state;
    uint64_t number;     // of the exchange in its step, from 1
    uint64_t arguments;  // hash of what must be the same at all ranks
    int32_t rank, head_dim;
    OutputHeads outputs;
    int64_t first_token;  // of the first row
    int32_t first_head;
    int32_t rows;          // of [tokens, heads]; at most rows_per_exchange
    const float *o, *lse;  // this rank's part of them
    MergeState out;        // [tokens, heads]; lse may be nullptr
};

// Loads what a first launch would otherwise load while peers wait for it. Returns a cudaError_t.
int load_exchange_parts();

// Head_dim is a multiple of 8, `o` 16-byte aligned. If the exchange fails, it writes NaN to `out` and notes why. It depends
// only on its arguments, so it can be captured. Returns a cudaError_t.
int launch_exchange_parts(const ExchangeArgs& args, CUstream_st* stream);

}  // namespace ta::cuda
