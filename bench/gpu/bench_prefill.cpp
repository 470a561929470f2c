// Prefill on a GPU through the ABI: the tokens of a chunk attend to themselves and to what is cached, quantization of Q
// included, that of K and V (append) beside it. bench_prefill [--json] [--only TEXT] [--sweep]
#include "bench/gpu/support.h"

using namespace ta::bench;

namespace {

void measure(Report& report, const Shape& shape, const std::string& name) {
    if (!report.wants(name)) return;
    Cache cache(shape);
    const Rows k(cache.rows(), shape.kv_heads, shape.d, true), v(cache.rows(), shape.kv_heads, shape.d, true),
        q(cache.rows(), shape.q_heads, shape.d, true);
    Rows out(cache.rows(), shape.q_heads, shape.d, false);
    cache.begin();
    const double append_us = cold_us(
        cache.stream(), [&] { cache.append(k, v); },
        [&] {
            cache.abort();
            cache.begin();
        });
    const double us = cold_us(cache.stream(), [&] { cache.attend(q, out); });
    const double in_a_row = back_to_back_us(cache.stream(), [&] { cache.attend(q, out); });
    out.read();
    cache.abort();
    const double error = cache.error_of(q, k, v, out);
    const double begin_us =
        host_us([&] { CUDA_OK(cudaStreamSynchronize(cache.stream())); }, [&] { cache.begin(); }, [&] { cache.abort(); });
    static const double peak = measured_int8_ops_per_s();
    const double n = double(shape.new_tokens), pairs = shape.causal ? n * (n + 1) / 2 + n * double(shape.cached)
                                                                    : n * double(shape.cached + shape.new_tokens);
    const double operations = 4.0 * shape.batch * shape.q_heads * shape.d * pairs, rate = operations / (us * 1e-6);
    report.add(name, us,
               {{"in_a_row_us", in_a_row},
                {"tops", rate * 1e-12},
                {"percent_of_int8", peak > 0 ? 100 * rate / peak : 0},
                {"rel_l2", error},
                {"append_us", append_us},
                {"begin_host_us", begin_us},
                {"int8_tops", peak * 1e-12}});
}

Shape shape_of(int batch, int64_t n, bool causal, uint32_t bits, ta_profile profile = TA_PROFILE_ACCURATE, int d = 128) {
    Shape s;
    s.batch = batch;
    s.new_tokens = n;
    s.causal = causal;
    s.bits = bits;
    s.profile = profile;
    s.d = d;
    return s;
}

}  // namespace

int main(int argc, char** argv) {
    bool sweep = false;
    Report report(argc, argv, "Prefill on a GPU through the ABI", &sweep);
    if (sweep) {
        for (int64_t n = 512; n <= 32768; n *= 2) {
            for (bool causal : {true, false}) {
                measure(report, shape_of(int(16384 / n > 0 ? 16384 / n : 1), n, causal, 4),
                        "prefill n" + std::to_string(n) + (causal ? " causal" : " full"));
            }
        }
        return 0;
    }
    measure(report, shape_of(1, 16384, false, 4), "prefill b1 h32/8 n16384 full");
    measure(report, shape_of(1, 16384, true, 4), "prefill b1 h32/8 n16384 causal");
    measure(report, shape_of(4, 4096, true, 4), "prefill b4 h32/8 n4096 causal");
    measure(report, shape_of(16, 1024, true, 4), "prefill b16 h32/8 n1024 causal");
    measure(report, shape_of(64, 512, true, 4), "prefill b64 h32/8 n512 causal");
    measure(report, shape_of(128, 256, true, 4), "prefill b128 h32/8 n256 causal");
    measure(report, shape_of(1, 16384, true, 4, TA_PROFILE_PAPER), "prefill b1 h32/8 n16384 causal, paper");
    measure(report, shape_of(1, 16384, false, 4, TA_PROFILE_PAPER), "prefill b1 h32/8 n16384 full, paper");
    for (int d : {64, 256}) {
        measure(report, shape_of(1, 16384, true, 4, TA_PROFILE_ACCURATE, d),
                "prefill b1 h32/8 d" + std::to_string(d) + " n16384 causal");
    }
    const auto chunk_of = [&](int64_t n, uint32_t bits) {
        Shape chunk = shape_of(1, n, true, bits);
        chunk.cached = 32768 - n;
        return chunk;
    };
    const auto measure_chunk = [&](int64_t n, uint32_t bits, bool page_scales = false) {
        Shape chunk = chunk_of(n, bits);
        chunk.page_scales = page_scales;
        measure(report, chunk,
                "chunk of " + std::to_string(n) + " over " + std::to_string(chunk.cached) + " INT" + std::to_string(bits) +
                    (page_scales ? ", page scales" : ""));
    };
    for (uint32_t bits : {4u, 2u, 8u}) measure_chunk(2048, bits);
    measure_chunk(2048, 8, true);
    for (int64_t n : {512, 64}) measure_chunk(n, 4);
    // Without the 64 tokens behind the first 64, and with the gap closed.
    for (const bool shifted : {false, true}) {
        Shape chunk = chunk_of(2048, 4);
        chunk.taken_out = 64;
        chunk.shifted = shifted;
        measure(report, chunk, std::string("chunk of 2048 over 30720 INT4 ") + (shifted ? "shifted" : "forgotten"));
    }
    return 0;
}
