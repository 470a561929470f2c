// Attention with AVX2 and FMA. Codes (at most 15) times signed bytes go through vpmaddubsw, which adds pairs in 16
// bits; INT8 by INT8 would saturate there and goes through words.
#include "kernels/cpu/avx2/attend_impl.h"
#include "kernels/cpu/join.h"

namespace ta::cpu {
namespace {

struct DotMaddubs {
    static constexpr int kMostDecodeRows = 8;
    static constexpr int kKVectors = 2;      // vectors of words for 32 bytes of K
    static constexpr bool kWordsOfQ = true;  // of INT8 products: q has room for its rest
    static constexpr PFormat kInt8P = PFormat::kWords;
    // A sum of codes is 16 lanes of 16 bits. P times 4-bit codes: 4 * 2 * 255 * 15 = 30600. Folded q times codes: 16
    // * 2 * 62 * 15 at 4 bits with any step byte, 16 * 2 * 127 * 3 at 2 bits.
    static constexpr int kRunOfCodes = 4;
    static constexpr int kUnpackedShift = 0;

    static __m256i add_codes(__m256i sum, __m256i unsigned_bytes, __m256i signed_bytes) {
        return _mm256_add_epi16(sum, _mm256_maddubs_epi16(unsigned_bytes, signed_bytes));
    }
    static __m256i widen(__m256i sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
    template <int SHIFT>
    static __m256i join(__m256i hi, __m256i lo) {
        return _mm256_add_epi32(_mm256_madd_epi16(hi, _mm256_set1_epi16(1 << SHIFT)), widen(lo));
    }

    // 32 INT8 values of K or V.
    struct Bytes {
        __m256i even, odd;
        explicit Bytes(__m256i x) : even(even_s8(x)), odd(odd_s8(x)) {}
        __m256i add_dot_q(__m256i sum, const uint8_t* q, int n) const { return add(sum, q + 64 * n, q + 64 * n + 32); }
        __m256i add_dot_p(__m256i sum, const uint8_t* p, int, int n) const { return add(sum, p + 32 * n, p + 128 + 32 * n); }
        void store_k(uint8_t* out) const {
            store_i(out, even);
            store_i(out + 32, odd);
        }

      private:
        __m256i add(__m256i sum, const uint8_t* with_even, const uint8_t* with_odd) const {
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, load_i(with_even)));
            return _mm256_add_epi32(sum, _mm256_madd_epi16(odd, load_i(with_odd)));
        }
    };
    static void store_q(__m256i spread, uint8_t* out) { Bytes(spread).store_k(out); }
    static void store_q(__m256i spread, __m256i rest, uint8_t* out) {
        static_assert(kRestUnits == 1 << 7);
        const Bytes q(spread), low(rest);
        store_i(out, _mm256_add_epi16(_mm256_slli_epi16(q.even, 7), low.even));
        store_i(out + 32, _mm256_add_epi16(_mm256_slli_epi16(q.odd, 7), low.odd));
    }
    static __m256i add_k(__m256i sum, __m256i k, __m256i q) { return _mm256_add_epi32(sum, _mm256_madd_epi16(k, q)); }
    static int32_t score_correction(int32_t, const uint8_t*, int, const uint8_t*, int) { return 0; }

    // Unpacks codes of K to words in eighths: 8 (step c + zero) + fraction.
    template <int BITS>
    struct Steps {
        __m256i step_even, step_odd, zero_even, zero_odd;
        Steps(__m256i steps, __m256i zeros) {
            const __m256i step = step_bytes<BITS>(steps), fraction = fraction_bytes<BITS>(steps);
            step_even = _mm256_slli_epi16(even_u8(step), 3);
            step_odd = _mm256_slli_epi16(odd_u8(step), 3);
            zero_even = _mm256_add_epi16(_mm256_slli_epi16(even_s8(zeros), 3), even_u8(fraction));
            zero_odd = _mm256_add_epi16(_mm256_slli_epi16(odd_s8(zeros), 3), odd_u8(fraction));
        }
        void store_k(__m256i codes, uint8_t* out) const {
            store_i(out, _mm256_add_epi16(_mm256_mullo_epi16(even_u8(codes), step_even), zero_even));
            store_i(out + 32, _mm256_add_epi16(_mm256_mullo_epi16(odd_u8(codes), step_odd), zero_odd));
        }
    };
};

}  // namespace

void attend_avx2(const AttendTask& task) {
    Attention<DotMaddubs>(task).run();
}

void join_avx2(const JoinTask& task) {
    join_rows(task);
}

}  // namespace ta::cpu
