// Table 9 of the DistrAttention paper: 480 heads of 20480 tokens that lie on one GPU, attended to by one GPU and by several, which get
// their heads in rounds; beside it GPUs that have their heads already. Each result is compared with that of one call on one GPU.
// bench_scatter [--json] [--only TEXT]
#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "bench/gpu/fill.h"
#include "bench/gpu/support.h"

using namespace ta::bench;

namespace {

constexpr int64_t kTokens = 20480, kHeads = 480, kDim = 128;
constexpr int kRuns = 7;

struct Variant {
    const char* name;
    ta_dense_variant code;
};
constexpr Variant kVariants[] = {{"DistrAttention G* 2", TA_DENSE_DISTR}, {"INT8", TA_DENSE_INT8_PAGE}};

// F16 heads on the current GPU, [tokens, heads, d] or [heads, tokens, d].
struct Heads {
    Heads(int64_t heads, bool head_major) : array(size_t(kTokens * heads * kDim) * 2) {
        view = sized<ta_tensor>();
        view.dtype = TA_DTYPE_F16;
        view.data = array.data;
        view.tokens = kTokens;
        view.heads = heads;
        view.head_dim = kDim;
        view.stride_token = head_major ? kDim : heads * kDim;
        view.stride_head = head_major ? kTokens * kDim : kDim;
    }
    size_t elements() const { return size_t(kTokens * view.heads * kDim); }
    DeviceArray array;
    ta_tensor view{};
};

struct Inputs {
    Inputs(int64_t heads, bool head_major)
        : q(heads, head_major), k(heads, head_major), v(heads, head_major), out(heads, head_major) {
        uint64_t seed = 1;
        for (const Heads* h : {&q, &k, &v}) fill_uniform(h->array.data, h->elements(), seed++);
    }
    void clear() const { CUDA_OK(cudaMemset(out.array.data, 0xFF, out.elements() * 2)), CUDA_OK(cudaDeviceSynchronize()); }
    Heads q, k, v, out;
};

// One GPU.
struct Gpu {
    explicit Gpu(int device) : ordinal(device) {
        CUDA_OK(cudaSetDevice(device));
        CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        auto options = sized<ta_context_options>();
        options.device = TA_DEVICE_CUDA;
        options.device_ordinal = device;
        TA_OK_OR_DIE(ta_context_create(&options, &context, &error));
    }
    ~Gpu() {
        ta_context_destroy(context);
        cudaStreamDestroy(stream);
    }
    Gpu(const Gpu&) = delete;
    Gpu& operator=(const Gpu&) = delete;
    const int ordinal;
    cudaStream_t stream = nullptr;
    ta_context* context = nullptr;
};

struct Options {
    Options(const Variant& variant, cudaStream_t stream) {
        attend.mask = TA_MASK_FULL;
        dense.variant = variant.code;
        dense.group_size = variant.code == TA_DENSE_DISTR ? 2 : 0;
        dense.attend = &attend;
        dense.stream = stream;
    }
    ta_attend_options attend = sized<ta_attend_options>();
    ta_dense_options dense = sized<ta_dense_options>();
};

void attend(const Gpu& gpu, const Inputs& x, const Options& options) {
    ta_error err;
    if (ta_attend_dense(gpu.context, &x.q.view, &x.k.view, &x.v.view, &x.out.view, nullptr, &options.dense, &err) != TA_OK)
        die("ta_attend_dense", err.message);
}

double median_us(const std::function<void()>& run) {
    std::vector<double> us;
    for (int i = 0; i < kRuns + 1; ++i) {
        const auto started = std::chrono::steady_clock::now();
        run();
        const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - started;
        if (i > 0) us.push_back(took.count());  // the first one takes memory
    }
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
}

double tflops(double us) {
    return 4.0 * kHeads * kDim * double(kTokens) * double(kTokens) / us * 1e-6;  // as if all channels were multiplied
}

// Ranks of a local group, one for each GPU.
class Group {
  public:
    explicit Group(const std::vector<std::unique_ptr<Gpu>>& gpus) : groups_(gpus.size()) {
        ta_group_id id;
        TA_OK_OR_DIE(ta_group_make_id(TA_GROUP_LOCAL, &id, &error));
        for (uint32_t r = 0; r < groups_.size(); ++r) {
            auto options = sized<ta_group_options>();
            options.kind = TA_GROUP_LOCAL;
            options.id = &id;
            options.rank = r;
            options.ranks = uint32_t(groups_.size());
            TA_OK_OR_DIE(ta_group_create(gpus[r]->context, &options, &groups_[r], &error));
        }
        for (ta_group* g : groups_) {
            ta_group_state state = 0;
            TA_OK_OR_DIE(ta_group_poll(g, -1, &state, &error));
            if (state != TA_GROUP_READY) die("ta_group_poll", "the group did not become ready");
        }
    }
    ~Group() {
        for (ta_group* g : groups_) ta_group_destroy(g);
    }
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;

    // [ranks] what each did.
    std::vector<ta_x_scatter_info> attend(const Inputs& x, const Options& options, uint32_t heads_per_round) const {
        std::vector<ta_x_scatter_info> infos(groups_.size(), sized<ta_x_scatter_info>());
        std::vector<std::thread> threads;
        for (uint32_t r = 1; r < groups_.size(); ++r) {
            threads.emplace_back([&, r] {
                ta_error err;
                auto scatter = sized<ta_x_scatter_options>();
                scatter.workspace_bytes = uint64_t{8} << 30;
                if (ta_x_group_attend_dense(groups_[r], nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0, &scatter,
                                            &infos[r], &err) != TA_OK)
                    die("ta_x_group_attend_dense", err.message);
            });
        }
        ta_error err;
        auto scatter = sized<ta_x_scatter_options>();
        scatter.heads_per_round = heads_per_round;
        if (ta_x_group_attend_dense(groups_[0], &x.q.view, &x.k.view, &x.v.view, &x.out.view, nullptr, &options.dense, 0,
                                    &scatter, &infos[0], &err) != TA_OK)
            die("ta_x_group_attend_dense", err.message);
        for (std::thread& t : threads) t.join();
        return infos;
    }

  private:
    std::vector<ta_group*> groups_;
};

void add(Report& report, const std::string& name, double us, double alone_us,
         const std::vector<ta_x_scatter_info>& infos = {}) {
    const ta_x_scatter_info root = infos.empty() ? ta_x_scatter_info{} : infos[0],
                            last = infos.empty() ? ta_x_scatter_info{} : infos.back();
    double rounds = 0, wait = 0, first = 0;  // of the others: in all, and of the one that waited longest
    for (size_t r = 1; r < infos.size(); ++r) {
        rounds += infos[r].rounds;
        wait = std::max(wait, double(infos[r].wait_ns));
        first = std::max(first, double(infos[r].first_wait_ns));
    }
    const double sent = double(root.bytes_sent), send = double(root.send_ns), others = double(infos.size()) - 1;
    report.add(name, us,
               {{"tflops", tflops(us)},
                {"of_one_gpu", alone_us / us},
                {"heads_a_round", last.heads_per_round},
                {"rounds", last.rounds},
                {"send_us_a_round", rounds > 0 ? 1e-3 * send / rounds : 0},
                {"send_GB_s", send > 0 ? sent / send : 0},
                {"pack_us_a_round", rounds > 0 ? 1e-3 * double(root.pack_ns) / rounds : 0},
                {"first_wait_us", 1e-3 * first},
                {"later_waits_us", 1e-3 * wait},
                // Of the time in which rounds after the first went to a GPU, where it was not without work.
                {"overlap",
                 rounds > others && send > 0 ? 1 - std::min(1.0, wait / (send / others * (rounds - others) / rounds)) : 0}});
}

// By a call for each round of heads of each rank.
void attend_rounds(const Gpu& gpu, const Inputs& x, const Heads& out, const Options& options,
                   const std::vector<ta_x_scatter_info>& infos) {
    int64_t first = 0;
    for (const ta_x_scatter_info& info : infos) {
        for (int64_t done = 0; done < info.heads; done += info.heads_per_round) {
            const int64_t n = std::min<int64_t>(info.heads_per_round, info.heads - done);
            const auto part = [&](ta_tensor t) {
                t.data = static_cast<uint16_t*>(t.data) + (first + done) * t.stride_head;
                t.heads = n;
                return t;
            };
            const ta_tensor q = part(x.q.view), k = part(x.k.view), v = part(x.v.view), o = part(out.view);
            TA_OK_OR_DIE(ta_attend_dense(gpu.context, &q, &k, &v, &o, nullptr, &options.dense, &error));
        }
        first += info.heads;
    }
    CUDA_OK(cudaStreamSynchronize(gpu.stream));
}

void measure_scattered(Report& report, const std::vector<std::unique_ptr<Gpu>>& gpus, const Variant& variant,
                       const Inputs& inputs, const Heads& expected, uint32_t heads_per_round, const std::string& name,
                       double alone_us) {
    if (!report.wants(name)) return;
    const Group group(gpus);
    const Options options(variant, gpus[0]->stream);
    inputs.clear();
    std::vector<ta_x_scatter_info> infos;
    const double us = median_us([&] { infos = group.attend(inputs, options, heads_per_round); });
    CUDA_OK(cudaSetDevice(0));
    // INT8's keys are cut into parts by how much work a call has.
    if (variant.code != TA_DENSE_DISTR) attend_rounds(*gpus[0], inputs, expected, options, infos);
    if (count_differences(inputs.out.array.data, expected.array.data, expected.elements() * 2) != 0)
        die(name.c_str(), "the output differs from that of ta_attend_dense");
    add(report, name, us, alone_us, infos);
}

void measure(Report& report, const std::vector<std::unique_ptr<Gpu>>& gpus, const Variant& variant, bool head_major) {
    const std::string what = std::string(variant.name) + (head_major ? " [heads, tokens, d]" : " [tokens, heads, d]");
    CUDA_OK(cudaSetDevice(0));
    const Inputs inputs(kHeads, head_major);
    const Heads expected(kHeads, head_major);
    const Options options(variant, gpus[0]->stream);
    inputs.clear();
    const double alone = median_us([&] {
        attend(*gpus[0], inputs, options);
        CUDA_OK(cudaStreamSynchronize(gpus[0]->stream));
    });
    CUDA_OK(cudaMemcpy(expected.array.data, inputs.out.array.data, expected.elements() * 2, cudaMemcpyDeviceToDevice));
    CUDA_OK(cudaDeviceSynchronize());
    add(report, what + " 1 GPU resident", alone, alone);
    for (const uint32_t per_round : {0u, 10u, 20u, 60u}) {
        const std::string name = what + " " + std::to_string(gpus.size()) + " GPU" + (gpus.size() > 1 ? "s" : "") +
                                 " scattered" + (per_round ? ", " + std::to_string(per_round) + " heads a round" : "");
        measure_scattered(report, gpus, variant, inputs, expected, per_round, name, alone);
    }
    if (gpus.size() == 1) return;
    std::vector<std::unique_ptr<Inputs>> parts;
    std::vector<std::unique_ptr<Options>> part_options;
    for (const auto& gpu : gpus) {
        CUDA_OK(cudaSetDevice(gpu->ordinal));
        parts.push_back(std::make_unique<Inputs>(kHeads / int64_t(gpus.size()), head_major));
        part_options.push_back(std::make_unique<Options>(variant, gpu->stream));
    }
    const double us = median_us([&] {
        std::vector<std::thread> threads;
        for (size_t r = 0; r < gpus.size(); ++r) {
            threads.emplace_back([&, r] {
                CUDA_OK(cudaSetDevice(gpus[r]->ordinal));
                attend(*gpus[r], *parts[r], *part_options[r]);
                CUDA_OK(cudaStreamSynchronize(gpus[r]->stream));
            });
        }
        for (std::thread& t : threads) t.join();
    });
    add(report, what + " " + std::to_string(gpus.size()) + " GPUs resident", us, alone);
}

}  // namespace

int main(int argc, char** argv) {
    Report report(argc, argv, "Heads scattered from one GPU, h480 n20480 d128 full, F16");
    int devices = 0;
    CUDA_OK(cudaGetDeviceCount(&devices));
    for (const Variant& variant : kVariants) {
        for (const bool head_major : {false, true}) {
            std::vector<std::unique_ptr<Gpu>> gpus;
            for (int n = 0; n < devices; ++n) {
                gpus.push_back(std::make_unique<Gpu>(n));
                // One, two, four.
                if ((gpus.size() & (gpus.size() - 1)) == 0) measure(report, gpus, variant, head_major);
            }
        }
    }
    return 0;
}
