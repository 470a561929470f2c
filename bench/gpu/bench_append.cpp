// Append on a GPU through the ABI: rotation, stage 1, and the closing of full pages in the same launch. bench_append [--json]
// [--only TEXT]. The written pages are checked: each row has the error of the stored K and V against what was given.
#include <cmath>

#include "bench/gpu/support.h"

using namespace ta::bench;

namespace {

void measure(Report& report, const Shape& shape, const std::string& name) {
    if (!report.wants(name)) return;
    Cache cache(shape);
    const Rows k(cache.rows(), shape.kv_heads, shape.d, true), v(cache.rows(), shape.kv_heads, shape.d, true);
    cache.begin();
    const double us = cold_us(
        cache.stream(), [&] { cache.append(k, v); },
        [&] {
            cache.abort();
            cache.begin();
        });
    cache.abort();
    const double bytes = 2.0 * double(cache.rows()) * shape.kv_heads * shape.d * 2;
    report.add(name, us, {{"input_gb_s", bytes / (us * 1e-6) * 1e-9}, {"rel_l2", cache.stored_error(k, v)}});
}

}  // namespace

int main(int argc, char** argv) {
    Report report(argc, argv, "Append on a GPU through the ABI");
    for (uint32_t bits : {4u, 2u, 8u}) {
        const std::string suffix = " INT" + std::to_string(bits);
        Shape s;
        s.bits = bits;
        s.batch = 64;
        s.cached = 640;
        measure(report, s, "append 64 x 1 token" + suffix);
        s.cached = 703;
        measure(report, s, "append 64 x 1 token, all pages close" + suffix);
        s.stagger = 1;
        measure(report, s, "append 64 x 1 token, one page closes" + suffix);
        s.stagger = 0;
        s.batch = 1;
        s.cached = 0;
        s.new_tokens = 16384;
        measure(report, s, "append 1 x 16384 tokens" + suffix);
    }
    return 0;
}
