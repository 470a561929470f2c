// A serving engine in small: requests come and go, their prompts are fed in chunks beside the tokens of others, and the library's
// pool decides who finds room. Everything here goes through the public ABI.
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

#include "../tinylm/model.h"

namespace serve {

using Clock = std::chrono::steady_clock;

struct Request {
    int id = 0;
    double arrival = 0;     // seconds from the start
    std::string prompt;     // bytes
    int most = 0;           // bytes to be generated
    int cancel_after = -1;  // the client goes away when it has so many; -1: it stays

    std::string text;           // generated
    std::vector<double> times;  // of its bytes
    bool cancelled = false;
};

struct Options {
    int threads = 1, bits = 4;
    uint64_t device_bytes = 0, host_bytes = 0;  // budgets
    int most_running = 16;
    int step_tokens = 256;  // of prompts, in a step
    bool reserve =
        true;  // admission by reservations, preemption by suspending; off: first come, first served, and begins that fail
    bool drafts = true;            // speculative decoding by what the text repeats, in trees
    bool prefixes = true;          // prompts that begin alike share blocks
    bool batch_invariant = false;  // texts do not depend on what else runs; drafts are chains
};

struct Counters {
    int64_t steps = 0, refused = 0, preempted = 0, restarted = 0, reused_tokens = 0, drafted = 0, accepted = 0;
};

class Engine final : private tinylm::AttentionBackend {
  public:
    Engine(tinylm::Model& model, const Options& options);
    ~Engine() override;

    void add(Request& request) { waiting_.emplace_back().request = &request; }
    bool idle() const { return waiting_.empty() && running_.empty(); }
    // One step of all that run. False: nothing could run, and only what arrives can change that.
    bool step(Clock::time_point start);
    const Counters& counters() const { return counters_; }
    // A budget in which so many blocks of 64 tokens fit.
    static uint64_t bytes_of_blocks(const tinylm::Model& model, int bits, int blocks);

  private:
    struct Node {
        uint8_t byte;
        int32_t parent;  // among the member's new tokens; -1: the sequence's last token
        int depth;
    };
    struct Member {
        Request* request = nullptr;
        ta_seq seq = 0;
        int fed = 0;              // tokens of prompt and text that the sequence has
        std::vector<Node> nodes;  // of this step
        size_t first_row = 0;
        int size() const { return int(request->prompt.size() + request->text.size()); }
        uint8_t at(int i) const {
            const int n = int(request->prompt.size());
            return uint8_t(i < n ? request->prompt[size_t(i)] : request->text[size_t(i - n)]);
        }
        bool feeds_prompt() const { return fed + 1 < size(); }
    };

    // The model's calls in a step that is open.
    void reset() override {}
    void begin(int) override {}
    void end() override {}
    void attend(int layer, const float* q, const float* k, const float* v, float* out) override;
    tinylm::KvStats stats() const override { return {}; }

    void admit();
    bool take_in(Member& member);
    bool make_way();
    void fill_nodes();
    void add_drafts(Member& member);
    bool open_step();
    void run_step(Clock::time_point start);
    int take_tokens(Member& member, const float* logits, double now);
    void publish(const Member& member);
    void finish(Member& member);
    std::vector<uint8_t> keys_of(const Member& member, int tokens) const;

    tinylm::Model& model_;
    const tinylm::AttentionShape shape_;
    const Options options_;
    ta_context* context_ = nullptr;
    ta_kv_pool* pool_ = nullptr;
    ta_plan* plan_ = nullptr;
    ta_namespace space_ = 0;
    std::deque<Member> waiting_;
    std::vector<Member> running_;  // in the order of their admission
    std::vector<Member*> batch_;
    size_t rows_ = 0;
    Counters counters_;
};

}  // namespace serve
