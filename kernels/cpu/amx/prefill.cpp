// The products of many rows by AMX: a tile has 16 rows of 64 bytes, one instruction multiplies 16 tokens (or channels) by 16 query rows
// over 64 channels (or tokens). q and P lie as a B tile wants them, [unit][row][4]. K and V of a page are put in order once, in place:
// unpack.h has the dwords of two tokens in turn, an A tile those of one.
#include "kernels/cpu/amx/paths.h"
#include "kernels/cpu/avx512/prefill_impl.h"
#include "kernels/cpu/avx512/vnni_products.h"

namespace ta::cpu::amx {
namespace {

constexpr int kTileBytes = 1024;

// Operand of ldtilecfg: palette 1, eight tiles of 16 rows of 64 bytes.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// The tiles, while in scope.
class Tiles {
  public:
    Tiles() {
        const TileConfig config;
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_release(); }
};

// Before tiles are loaded: GCC 12 does not know that they read memory.
[[gnu::always_inline]] inline void stores_are_done() {
    asm volatile("" ::: "memory");
}

// Reorders 16 rows of two load steps, 1 KB: from [step][r][2 u + w] to [w][r][step][u].
void put_in_order(uint8_t* tile) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    for (int r = 0; r < 8; ++r, tile += 64) {
        const __m512i a = load_i(tile), b = load_i(tile + kStepBytes);
        store_i(tile, _mm512_permutex2var_epi32(a, even, b));
        store_i(tile + kStepBytes, _mm512_permutex2var_epi32(a, odd, b));
    }
}

// K of a head_dim of an odd number of steps (96) stays as it is, for the other product.
bool k_takes_tiles(int d) {
    return d % 64 == 0;
}

// Tiles 0 to 2: sums. 3: K or V. 4 to 6: q or P.
template <int VECTORS>
[[gnu::always_inline]] inline void load_b(const uint8_t* const* b, ptrdiff_t offset, int stride) {
    _tile_loadd(4, b[0] + offset, stride);
    if constexpr (VECTORS > 1) _tile_loadd(5, b[1] + offset, stride);
    if constexpr (VECTORS > 2) _tile_loadd(6, b[2] + offset, stride);
}
template <int VECTORS>
[[gnu::always_inline]] inline void start_sums(const Lanes* lanes) {
    _tile_loadd(0, lanes[0].q_start, 0);
    if constexpr (VECTORS > 1) _tile_loadd(1, lanes[1].q_start, 0);
    if constexpr (VECTORS > 2) _tile_loadd(2, lanes[2].q_start, 0);
}
template <int VECTORS>
[[gnu::always_inline]] inline void zero_sums() {
    _tile_zero(0);
    if constexpr (VECTORS > 1) _tile_zero(1);
    if constexpr (VECTORS > 2) _tile_zero(2);
}
// As [row of A][vector][row of B].
template <int VECTORS>
[[gnu::always_inline]] inline void store_sums(int32_t* to) {
    constexpr int kStride = VECTORS * 64;
    _tile_stored(0, to, kStride);
    if constexpr (VECTORS > 1) _tile_stored(1, to + kLanes, kStride);
    if constexpr (VECTORS > 2) _tile_stored(2, to + 2 * kLanes, kStride);
}
// K + 128 is u8 and q s8.
template <int VECTORS>
[[gnu::always_inline]] inline void multiply_k() {
    _tile_dpbusd(0, 3, 4);
    if constexpr (VECTORS > 1) _tile_dpbusd(1, 3, 5);
    if constexpr (VECTORS > 2) _tile_dpbusd(2, 3, 6);
}
// V is s8 and P u8.
template <int VECTORS>
[[gnu::always_inline]] inline void multiply_v() {
    _tile_dpbsud(0, 3, 4);
    if constexpr (VECTORS > 1) _tile_dpbsud(1, 3, 5);
    if constexpr (VECTORS > 2) _tile_dpbsud(2, 3, 6);
}

struct AmxProducts {
    static void arrange(int d, int v_stored, bool with_v, Block& block) {
        for (int tile = 0; k_takes_tiles(d) && tile < kPageTokens / 16 * (d / 64); ++tile)
            put_in_order(block.k + tile * kTileBytes);
        for (int tile = 0; with_v && tile < v_stored / 16; ++tile) put_in_order(block.v + tile * kTileBytes);
    }

    template <int VECTORS>
    static void scores(int d, const uint8_t* const* q, const Lanes* lanes, Block& block) {
        if (!k_takes_tiles(d)) return VnniProducts::scores<VECTORS>(d, q, lanes, block);
        stores_are_done();
        const uint8_t* k = block.k;
        for (int tile = 0; tile < kPageTokens / 16; ++tile) {
            start_sums<VECTORS>(lanes);
            for (int c = 0; c < d; c += 64, k += kTileBytes) {
                _tile_loadd(3, k, 64);
                load_b<VECTORS>(q, c * kLanes, 64);
                multiply_k<VECTORS>();
            }
            store_sums<VECTORS>(block.scores + tile * 16 * VECTORS * kLanes);
        }
    }

    template <int VECTORS, int PLANES>
    static void values(int d, int stored, OOrder order, Block& block, float* o) {
        constexpr int kSums = kPass * VECTORS * kLanes;  // of a pass
        const auto finish = finish_of<VECTORS, PLANES>(block);
        const uint8_t* p[VECTORS];
        for (int v = 0; v < VECTORS; ++v) p[v] = block.p[0] + 64 * v;
        const int per_r = stored / 8;
        stores_are_done();
        if constexpr (PLANES == 1) load_b<VECTORS>(p, 0, 64 * VECTORS);
        for (int tile = 0; tile < per_r / 2; ++tile) {
            _tile_loadd(3, block.v + tile * kTileBytes, 64);
            for (int plane = PLANES - 1; plane >= 0; --plane) {
                if constexpr (PLANES > 1) load_b<VECTORS>(p, plane * ptrdiff_t(sizeof block.p[0]), 64 * VECTORS);
                zero_sums<VECTORS>();
                multiply_v<VECTORS>();
                store_sums<VECTORS>(block.sums[plane]);
            }
            for (int i = 0; PLANES > 1 && i < 2 * kSums; i += kLanes) {
                const __m512i high = _mm512_slli_epi32(load_i(block.sums[1] + i), 8);
                store_i(block.sums[0] + i, _mm512_add_epi32(load_i(block.sums[0] + i), high));
            }
            for (int w = 0; w < 2; ++w) {
                const int pass = 2 * tile + w, held = (d - pass + per_r - 1) / per_r;
                finish(block.sums[0] + w * kSums, block.update, held, block.v_fraction8 + pass, per_r,
                       o + order.place(pass) * VECTORS * kLanes, (order.natural ? per_r : 1) * VECTORS * kLanes);
            }
        }
    }
};

}  // namespace

void attend_tiles(const AttendTask& task) {
    const Tiles tiles;
    attend_tiles_by<AmxProducts>(task);
}

}  // namespace ta::cpu::amx
