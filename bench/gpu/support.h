// Shared by the GPU benchmarks: F16 rows on the device, a pool filled with sequences that grew in turns, medians with a cold
// L2, the check of an output against float64 attention over the stored values, and the two forms of output. Through the public
// ABI alone.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "turboattention.h"
#include "turboattention_experimental.h"

namespace ta::bench {

[[noreturn]] void die(const char* what, const char* why);
void check(cudaError_t e, const char* what);
#define CUDA_OK(call) ::ta::bench::check((call), #call)
extern ta_error error;
#define TA_OK_OR_DIE(call) ((call) == TA_OK ? void() : ::ta::bench::die(#call, ::ta::bench::error.message))

// A struct of the ABI with its size set.
template <class T>
T sized() {
    T x{};
    x.struct_size = sizeof(T);
    return x;
}

struct DeviceArray {
    explicit DeviceArray(size_t bytes);
    ~DeviceArray() { cudaFree(data); }
    DeviceArray(const DeviceArray&) = delete;
    DeviceArray& operator=(const DeviceArray&) = delete;
    void* data = nullptr;
};

// F16 [tokens, heads, d], with random normal values or with 0xFF.
struct Rows {
    Rows(int64_t tokens, int heads, int d, bool random);
    void read();
    double at(int64_t token, int head, int channel) const;

    int heads, d;
    std::vector<uint16_t> host;
    DeviceArray device;
    ta_tensor view{};
};

struct Shape {
    int batch = 1, q_heads = 32, kv_heads = 8, d = 128;
    int64_t cached = 0, new_tokens = 1;  // per sequence
    int64_t stagger = 0;                 // tokens that each sequence has fewer than the next; the last one has `cached`
    uint32_t bits = 4;
    bool half_2_bits = false;  // of the kv heads, in place of `bits`
    bool causal = true;
    ta_profile profile = TA_PROFILE_ACCURATE;
    int layers = 1;
    bool page_scales = false;  // K and V where 64 tokens arrive together, in a pool of 8 bits too
    bool drafts = false;       // steps have ta_step_options.drafts
    bool observed = false;     // the attention that blocks get (TA_EVICT_ATTENTION)
    // Tokens behind the first 64 that are not there any more, and whether the gap is closed (by an embedding that turns nothing).
    int64_t taken_out = 0;
    bool shifted = false;
};

// A pool on a GPU whose sequences have `cached` tokens in every layer.
class Cache {
  public:
    explicit Cache(const Shape& shape);
    ~Cache();
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;

    void begin();  // a step of new_tokens for every sequence
    void append(const Rows& k, const Rows& v, uint32_t layer = 0);
    void attend(const Rows& q, Rows& out, uint32_t layer = 0);
    void abort();
    void end();
    uint64_t bytes_used() const;
    // Relative L2 error of the last sequence's last query, all query heads of its first kv head, in layer 0. The step's new
    // tokens are taken as given, the rest as stored.
    double error_of(const Rows& q, const Rows& new_k, const Rows& new_v, const Rows& out) const;

    // Appends the rows in a step that is ended; relative L2 error of what is stored of the last sequence's new tokens.
    double stored_error(const Rows& k, const Rows& v);

    cudaStream_t stream() const { return stream_; }
    int64_t rows() const { return shape_.batch * shape_.new_tokens; }

  private:
    Shape shape_;
    ta_context* context_ = nullptr;
    ta_kv_pool* pool_ = nullptr;
    ta_plan* plan_ = nullptr;
    cudaStream_t stream_ = nullptr;
    std::vector<ta_seq> seqs_;
    std::vector<int32_t> n_new_;
};

// Reads more than L2 holds, so that nothing else is in it, and nothing that must be written back.
void flush_l2(cudaStream_t stream);
// Median microseconds of `call`'s work on the stream, L2 flushed before each run. `before` comes before that, and is not timed.
double cold_us(cudaStream_t stream, const std::function<void()>& call, const std::function<void()>& before = {});
// Microseconds per call of many in a row.
double back_to_back_us(cudaStream_t stream, const std::function<void()>& call);
// Median microseconds that `call` takes of the host.
double host_us(const std::function<void()>& before, const std::function<void()>& call, const std::function<void()>& after);

// Rows of a table or, with --json, what Google Benchmark prints: {"context": ..., "benchmarks": [...]}. --only TEXT: names that
// contain it.
class Report {
  public:
    using Columns = std::vector<std::pair<const char*, double>>;
    // `sweep`: takes --sweep, for programs that go over context lengths.
    Report(int argc, char** argv, const char* title, bool* sweep = nullptr);
    ~Report();
    bool wants(const std::string& name) const { return name.find(only_) != std::string::npos; }
    // `us` is the time that Google Benchmark calls real_time.
    void add(const std::string& name, double us, const Columns& columns);
    void context(const char* key, double value);

  private:
    std::string only_;
    bool json_ = false;
    nlohmann::ordered_json context_ = nlohmann::ordered_json::object(), rows_ = nlohmann::ordered_json::array();
    std::string device_;
};

// Ceilings, measured now: bytes/s of reading, operations/s of INT8 wgmma (0 on other GPUs).
double measured_hbm_bytes_per_s();
double measured_int8_ops_per_s();

}  // namespace ta::bench
