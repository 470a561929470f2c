// Attention with AVX-VNNI: the kernel of ../avx2 with vpdpbusd, which sums u8 x s8 in 32 bits. INT8 K is taken as K +
// 128, INT8 V as it is against the bytes of P.
#include "kernels/cpu/avx2/attend_impl.h"

namespace ta::cpu {
namespace {

inline __m256i dot_u8_s8(__m256i sum, __m256i unsigned_bytes, __m256i signed_bytes) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, unsigned_bytes, signed_bytes);
#else  // a build with -mavx512vnni -mavx512vl tests this file on processors that have the operation only there
    return _mm256_dpbusd_epi32(sum, unsigned_bytes, signed_bytes);
#endif
}

struct DotVnni {
    static constexpr int kMostDecodeRows = 6;
    static constexpr int kKVectors = 1;
    static constexpr bool kWordsOfQ = false;
    static constexpr PFormat kInt8P = PFormat::kBytes;
    static constexpr int kRunOfCodes = 16;
    static constexpr int kUnpackedShift = 3;

    static __m256i add_codes(__m256i sum, __m256i unsigned_bytes, __m256i signed_bytes) {
        return dot_u8_s8(sum, unsigned_bytes, signed_bytes);
    }
    static __m256i widen(__m256i sum) { return sum; }
    template <int SHIFT>
    static __m256i join(__m256i hi, __m256i lo) {
        return _mm256_add_epi32(_mm256_slli_epi32(hi, SHIFT), lo);
    }

    static __m256i plus_128(__m256i x) { return _mm256_xor_si256(x, _mm256_set1_epi8(-128)); }
    struct Bytes {
        __m256i value;
        explicit Bytes(__m256i x) : value(x) {}
        __m256i add_dot_q(__m256i sum, const uint8_t* q, int n) const {
            return dot_u8_s8(sum, plus_128(value), load_i(q + 32 * n));
        }
        __m256i add_dot_p(__m256i sum, const uint8_t* p, int digit, int n) const {
            return dot_u8_s8(sum, load_i(p + 128 * digit + 32 * n), value);
        }
        void store_k(uint8_t* out) const { store_i(out, plus_128(value)); }
    };
    static void store_q(__m256i spread, uint8_t* out) { store_i(out, spread); }
    static __m256i add_k(__m256i sum, __m256i k, __m256i q) { return dot_u8_s8(sum, k, q); }

    // Takes the 128 of every K back; on a channel page (steps != nullptr) the sum is in eighths, and the fractions
    // are added.
    static int32_t score_correction(int32_t q_sum, const uint8_t* steps, int bits, const uint8_t* q, int d) {
        if (!steps) return -128 * q_sum;
        __m256i sum = zero_i();
        for (int n = 0; n < d / 16; ++n) {
            const __m256i step = spread_channels(steps, d, n);
            const __m256i fraction = bits == 4 ? fraction_bytes<4>(step) : fraction_bytes<2>(step);
            sum = dot_u8_s8(sum, fraction, load_i(q + 32 * n));
        }
        return sum_i32(sum) / 2 - 8 * 128 * q_sum;  // every channel is there twice
    }

    // Unpacks codes of K to bytes step c + zero + 128.
    template <int BITS>
    struct Steps {
        __m256i step_even, step_odd, zero;
        Steps(__m256i steps, __m256i zeros) : zero(plus_128(zeros)) {
            const __m256i step = step_bytes<BITS>(steps);
            step_even = even_u8(step);
            step_odd = odd_u8(step);
        }
        void store_k(__m256i codes, uint8_t* out) const {
            const __m256i even = _mm256_mullo_epi16(even_u8(codes), step_even);
            const __m256i odd = _mm256_mullo_epi16(odd_u8(codes), step_odd);
            store_i(out, _mm256_add_epi8(_mm256_or_si256(even_u8(even), _mm256_slli_epi16(odd, 8)), zero));
        }
    };
};

}  // namespace

void attend_avxvnni(const AttendTask& task) {
    Attention<DotVnni>(task).run();
}

}  // namespace ta::cpu
