// Decode on a GPU through the ABI: one new token for every sequence, quantization of Q included. bench_decode [--json] [--only
// TEXT] [--sweep]: --sweep goes over context lengths, for bench/gpu/plot.py. bench/gpu/peers.py times other libraries on the
// same shapes.
#include "bench/gpu/support.h"

using namespace ta::bench;

namespace {

struct Bits {
    const char* name;
    uint32_t bits;
    bool half_2_bits;
    ta_profile profile = TA_PROFILE_ACCURATE;
};

void measure(Report& report, Shape shape, const Bits& bits, const std::string& name) {
    const std::string full = name + " " + bits.name;
    if (!report.wants(full)) return;
    shape.bits = bits.bits;
    shape.half_2_bits = bits.half_2_bits;
    shape.profile = bits.profile;
    Cache cache(shape);
    const Rows k(cache.rows(), shape.kv_heads, shape.d, true), v(cache.rows(), shape.kv_heads, shape.d, true),
        q(cache.rows(), shape.q_heads, shape.d, true);
    Rows out(cache.rows(), shape.q_heads, shape.d, false);
    const double bytes = double(cache.bytes_used());
    cache.begin();
    cache.append(k, v);
    const double us = cold_us(cache.stream(), [&] { cache.attend(q, out); });
    const double in_a_row = back_to_back_us(cache.stream(), [&] { cache.attend(q, out); });
    out.read();
    cache.abort();
    const double error = cache.error_of(q, k, v, out);
    const auto sync = [&] { CUDA_OK(cudaStreamSynchronize(cache.stream())); };
    const double begin_us = host_us(
        sync, [&] { cache.begin(); }, [&] { cache.abort(); });
    const double attend_us = host_us(
        [&] {
            cache.begin();
            cache.append(k, v);
            sync();
        },
        [&] { cache.attend(q, out); }, [&] { cache.abort(); });
    static const double hbm = measured_hbm_bytes_per_s();
    report.add(full, us,
               {{"in_a_row_us", in_a_row},
                {"percent_of_hbm", 100 * bytes / hbm / (us * 1e-6)},
                {"rel_l2", error},
                {"begin_host_us", begin_us},
                {"attend_host_us", attend_us},
                {"hbm_tb_s", hbm * 1e-12}});
}

Shape shape_of(int batch, int q_heads, int kv_heads, int64_t n) {
    Shape s;
    s.batch = batch;
    s.q_heads = q_heads;
    s.kv_heads = kv_heads;
    s.cached = n - 1;
    return s;
}

}  // namespace

int main(int argc, char** argv) {
    bool sweep = false;
    Report report(argc, argv, "Decode on a GPU through the ABI", &sweep);
    const Bits all[] = {{"INT4", 4, false},
                        {"INT4/2", 4, true},
                        {"INT2", 2, false},
                        {"INT8", 8, false},
                        {"INT4-paper", 4, false, TA_PROFILE_PAPER}};
    if (sweep) {
        for (int64_t n = 1024; n <= 131072; n *= 2) {
            for (const Bits& b : all) measure(report, shape_of(8, 32, 8, n), b, "decode b8 h32/8 n" + std::to_string(n));
        }
        return 0;
    }
    const int shapes[][4] = {{16, 32, 8, 32768}, {16, 32, 8, 8192},  {1, 32, 8, 131072},
                             {64, 32, 8, 4096},  {64, 40, 10, 1024}, {8, 32, 32, 8192}};
    for (const Bits& b : all) {
        for (const auto& [batch, q_heads, kv_heads, n] : shapes) {
            measure(report, shape_of(batch, q_heads, kv_heads, n), b,
                    "decode b" + std::to_string(batch) + " h" + std::to_string(q_heads) + "/" + std::to_string(kv_heads) +
                        " n" + std::to_string(n));
        }
    }
    // The same keys without a block, and with the gap closed.
    for (const auto& [batch, n] : {std::pair(16, 8192), {1, 131072}, {64, 1024}}) {
        for (const bool shifted : {false, true}) {
            Shape shape = shape_of(batch, 32, 8, n);
            shape.taken_out = 64;
            shape.shifted = shifted;
            const std::string name = "decode b" + std::to_string(batch) + " h32/8 n" + std::to_string(n);
            for (const Bits& b : {all[0], all[3]}) measure(report, shape, b, name + (shifted ? " shifted" : " forgotten"));
        }
    }
    return 0;
}
