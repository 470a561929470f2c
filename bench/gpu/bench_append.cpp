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

// Whole steps of a batch at all lengths, one of which closes a page, one step behind the other: appends and attends of all layers, and
// the end. `drafts`: pages close at the end.
void measure_steps(Report& report, Shape shape, const std::string& name) {
    if (!report.wants(name)) return;
    shape.stagger = 1;
    shape.layers = 32;
    Cache cache(shape);
    const Rows k(cache.rows(), shape.kv_heads, shape.d, true), v(cache.rows(), shape.kv_heads, shape.d, true);
    const Rows q(cache.rows(), shape.q_heads, shape.d, true);
    Rows out(cache.rows(), shape.q_heads, shape.d, false);
    const double us = back_to_back_us(cache.stream(), [&] {
        cache.begin();
        for (int layer = 0; layer < shape.layers; ++layer) {
            cache.append(k, v, uint32_t(layer));
            cache.attend(q, out, uint32_t(layer));
        }
        cache.end();
    });
    report.add(name, us, {{"us_of_layer", us / shape.layers}, {"rel_l2", cache.stored_error(k, v)}});
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
    for (const auto& [bits, batch] : {std::pair{4u, 64}, {2u, 64}, {4u, 1}}) {
        Shape s;
        s.bits = bits;
        s.batch = batch;
        s.cached = batch == 1 ? 32704 : 1024;  // a single sequence closes none in these steps
        for (const bool drafts : {false, true}) {
            s.drafts = drafts;
            measure_steps(report, s,
                          "step of " + std::to_string(batch) + " x 1 token" +
                              (batch == 1 ? ", none closes" : ", one page closes") + (drafts ? ", drafts" : "") + " INT" +
                              std::to_string(bits));
        }
    }
    return 0;
}
