// Decode of a model as large as Llama 3 8B, attention and append only: 32 layers, batch 16, 32k tokens each, a graph per step.
// Prints tokens/s, and how many such sequences fit into the GPU's memory against F16; "observed": under TA_EVICT_ATTENTION.
// bench_throughput [--json] [--only TEXT]
#include "bench/gpu/support.h"

using namespace ta::bench;

int main(int argc, char** argv) {
    Report report(argc, argv, "Decode of a model as large as Llama 3 8B, attention and append only");
    struct {
        const char* name;
        uint32_t bits;
        bool half_2_bits, observed;
    } const all[] = {{"INT4", 4, false, false},          {"INT4/2", 4, true, false}, {"INT8", 8, false, false},
                     {"INT4, observed", 4, false, true}, {"INT2", 2, false, false},  {"INT2, observed", 2, false, true}};
    for (const auto& b : all) {
        const std::string name = std::string("step of 32 layers b16 h32/8 n32768 ") + b.name;
        if (!report.wants(name)) continue;
        Shape shape;
        shape.batch = 16;
        shape.layers = 32;
        shape.cached = 32768 - 64;
        shape.bits = b.bits;
        shape.half_2_bits = b.half_2_bits;
        shape.observed = b.observed;
        Cache cache(shape);
        const Rows k(16, 8, 128, true), v(16, 8, 128, true), q(16, 32, 128, true);
        Rows out(16, 32, 128, false);
        const auto layers = [&] {
            for (uint32_t layer = 0; layer < 32; ++layer) {
                cache.append(k, v, layer);
                cache.attend(q, out, layer);
            }
        };
        cache.begin();
        layers();
        cache.end();
        cache.begin();
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CUDA_OK(cudaStreamBeginCapture(cache.stream(), cudaStreamCaptureModeThreadLocal));
        layers();
        CUDA_OK(cudaStreamEndCapture(cache.stream(), &graph));
        CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
        CUDA_OK(cudaGraphLaunch(exec, cache.stream()));
        cache.end();
        const double us = back_to_back_us(cache.stream(), [&] {
            cache.begin();
            CUDA_OK(cudaGraphLaunch(exec, cache.stream()));
            cache.end();
        });
        const double bytes = double(cache.bytes_used()), f16_bytes = 16.0 * 32768 * 32 * 8 * 128 * 2 * 2;
        CUDA_OK(cudaGraphExecDestroy(exec));
        CUDA_OK(cudaGraphDestroy(graph));
        report.add(name, us,
                   {{"tokens_per_s", 16 / (us * 1e-6)}, {"cache_gb", bytes * 1e-9}, {"batch_vs_f16", f16_bytes / bytes}});
    }
    return 0;
}
