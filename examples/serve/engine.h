// A small serving engine. Requests come and go, their prompts are fed in chunks beside the tokens of other requests, and the
// library's pool decides which of them find room. It uses the public ABI only.
#pragma once

#include <turboattention.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "../tinylm/gpu_memory.h"
#include "../tinylm/model.h"

namespace serve {

using Clock = std::chrono::steady_clock;

struct Request {
    int id = 0;
    size_t model = 0;       // index of the engine's models
    double arrival = 0;     // seconds from the start
    std::string prompt;     // bytes
    int most = 0;           // bytes to be generated
    int cancel_after = -1;  // the client leaves after this many bytes; -1: it stays

    std::string text;           // generated
    std::vector<double> times;  // when each byte came
    bool cancelled = false;
};

struct Options {
    int threads = 1, bits = 4;
    bool gpu = false;                           // cache and attention on the GPU, the rest of the models on the CPU
    uint64_t device_bytes = 0, host_bytes = 0;  // budgets for all models together
    int most_running = 16;
    int step_tokens = 256;  // most prompt tokens in a step of one model
    bool reserve =
        true;  // on: admission by reservation, preemption by suspension; off: first come, first served, and begins that may
               // fail
    bool drafts = true;            // speculative decoding in trees, with drafts from repetitions in the text
    bool prefixes = true;          // prompts with a common begin share blocks
    bool batch_invariant = false;  // a text does not depend on what else runs; drafts are chains
};

struct Counters {
    int64_t steps = 0, refused = 0, preempted = 0, restarted = 0, reused_tokens = 0, drafted = 0, accepted = 0;
};

class Engine final : private tinylm::AttentionBackend {
  public:
    // Models whose caches have the same shape share one pool, with its budgets and its order of admission.
    Engine(std::span<tinylm::Model* const> models, const Options& options);
    ~Engine() override;

    void add(Request& request) { waiting_.emplace_back().request = &request; }
    bool idle() const { return waiting_.empty() && running_.empty(); }
    // Runs a step of each model that has running requests. False: nothing could run, and only a new request can change that.
    bool step(Clock::time_point start);
    const Counters& counters() const { return counters_; }
    // A budget that this many blocks of 64 tokens fit into.
    static uint64_t bytes_of_blocks(const tinylm::Model& model, int bits, int blocks);

  private:
    // Each model has its own namespace, since blocks of one model mean nothing to another.
    struct Served {
        tinylm::Model* model;
        tinylm::AttentionShape shape;
        ta_plan* plan = nullptr;
        ta_namespace space = 0;
    };
    struct Node {
        uint8_t byte;
        int32_t parent;  // index among the member's new tokens; -1: the sequence's last token
        int depth;
    };
    struct Member {
        Request* request = nullptr;
        ta_seq seq = 0;
        int fed = 0;              // tokens of prompt and text that are in the sequence
        std::vector<Node> nodes;  // of this step
        size_t first_row = 0;
        int size() const { return int(request->prompt.size() + request->text.size()); }
        uint8_t at(int i) const {
            const int n = int(request->prompt.size());
            return uint8_t(i < n ? request->prompt[size_t(i)] : request->text[size_t(i - n)]);
        }
        bool feeds_prompt() const { return fed + 1 < size(); }
    };

    // Called by the model during an open step.
    void reset() override {}
    void begin(int) override {}
    void end() override {}
    void attend(int layer, const float* q, const float* k, const float* v, float* out) override;
    void run_layer(int layer, const float* q, const float* k, const float* v, float* out);
    tinylm::KvStats stats() const override { return {}; }

    void admit();
    bool take_in(Member& member);
    bool make_way();
    void fill_nodes(size_t model);
    void add_drafts(Member& member);
    bool open_step();
    void run_step(Clock::time_point start);
    int take_tokens(Member& member, const float* logits, double now);
    void publish(const Member& member);
    void finish(Member& member);
    std::vector<uint8_t> keys_of(const Member& member, int tokens) const;

    const Options options_;
    std::unique_ptr<tinylm::GpuMemory> gpu_memory_;  // null on a CPU
    ta_context* context_ = nullptr;
    ta_kv_pool* pool_ = nullptr;
    std::vector<Served> models_;
    const Served* now_ = nullptr;  // the model whose step it is
    std::deque<Member> waiting_;
    std::vector<Member> running_;  // in the order of their admission
    std::vector<Member*> batch_;
    size_t rows_ = 0;
    Counters counters_;
};

}  // namespace serve
