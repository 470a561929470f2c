// The life of an engine in C++: docs/embedding.md explains it.
#include <cstdio>
#include <turboattention.hpp>

constexpr int layers = 2, q_heads = 4, kv_heads = 2, dim = 64, chunk = 128, prompt = 300, blocks = prompt / 64;
constexpr int answer = 256;

struct Engine {
    ta::Context context = ta::Context::create();
    ta::Pool pool = context.create_pool({.layers = layers,
                                         .kv_heads = kv_heads,
                                         .head_dim = dim,
                                         .bits = 4,
                                         .budget_bytes = 4 << 20,
                                         .tiers = ta::TierOptions{.host_bytes = 8 << 20}});
    ta::Plan plan = pool.create_plan();
    ta::Namespace space = pool.create_namespace({.salt = {1}});  // secret and random in earnest
    std::array<ta::Key, blocks> keys;
    std::vector<float> q = std::vector<float>(chunk * q_heads * dim), out = q;
    std::vector<float> k = std::vector<float>(chunk * kv_heads * dim), v = k;

    static void fill(std::vector<float>& x, int first, int n, int width, int salt) {
        for (int i = 0; i < n * width; ++i) x[i] = float((((first + i / width) * 131 + i % width) * salt) % 255 - 127) / 128;
    }
    void run(const ta::Step& step, int first, int n) {
        for (uint32_t layer = 0; layer < layers; ++layer) {
            fill(q, first, n, q_heads * dim, 79), fill(k, first, n, kv_heads * dim, 83), fill(v, first, n, kv_heads * dim, 89);
            step.append(layer, ta::View(k.data(), n, kv_heads, dim), ta::View(v.data(), n, kv_heads, dim));
            step.attend(layer, ta::View(q.data(), n, q_heads, dim), ta::View(out.data(), n, q_heads, dim));
        }
    }
    double step(const ta::Sequence& seq, int first, int n) {
        auto step = plan.begin(seq, n);
        run(step, first, n);
        step.end();
        return out[(n - 1) * q_heads * dim];
    }
    // The sequence of a request, or nothing: there is no room for it now.
    std::optional<ta::Sequence> admit(int longest, int& have) {
        auto [seq, length] = space.match(keys);
        have = int(length / chunk * chunk);
        seq.truncate(have);
        try {
            seq.reserve(prompt - have + longest, -1);
        } catch (const ta::Error& error) {
            if (error.status() != TA_E_TIER_FULL) throw;
            return {};  // the request stays in the queue: error.detail().bytes lack
        }
        return std::move(seq);
    }
    double prefill(const ta::Sequence& seq, int have) {
        double last = 0;
        for (int n; have < prompt; have += n) {
            n = std::min(chunk, prompt - have);
            last = step(seq, have, n);
        }
        seq.publish(space, keys);
        return last;
    }
};

int main() {
    Engine e;
    for (int i = 0; i < blocks * 32; ++i) e.keys[i / 32][i % 32] = uint8_t(i + 1);
    const auto fit = e.pool.fit(std::array<ta_seq, 1>{}, std::array{prompt + answer});
    std::printf("fits: %d, %d bytes\n", int(fit.now), int(fit.bytes_new));
    int have = 0;
    const auto cold = e.admit(answer, have).value();
    std::printf("cold: %d matched, prefill %.6f\n", have, e.prefill(cold, have));
    const auto seq = e.admit(answer, have).value();
    std::printf("warm: %d matched, prefill %.6f\n", have, e.prefill(seq, have));
    std::printf("too long: %s\n", e.admit(1 << 20, have) ? "admitted" : "queued");
    for (int t = prompt; t < prompt + 3; ++t) std::printf("decode: token %d, %.6f\n", t, e.step(seq, t, 1));
    const auto other = seq.fork();
    other.truncate(prompt);
    std::printf("fork: %.6f\n", e.step(other, prompt + 7, 1));
    {
        constexpr int drafts = 4, accepted = 2;
        auto step = e.plan.begin(other, drafts, drafts, {.drafts = TA_ON});
        e.run(step, prompt + 8, drafts);
        step.end(std::array{accepted});
    }
    const auto length = other.length();
    std::printf("verified: %lld tokens, next %.6f\n", (long long)length, e.step(other, prompt + 17, 1));
    {
        auto step = e.plan.begin(seq, 1);
        e.run(step, prompt + 3, 1);
    }  // a step that was not ended is aborted
    std::printf("cancelled: %lld tokens\n", (long long)seq.length());
    const auto info = seq.move(TA_TIER_HOST, 0, blocks).wait();
    std::printf("swapped out: %d blocks\n", int(info.moved));
    seq.move(TA_TIER_DEVICE, 0, blocks).wait();
    std::printf("swapped in: %.6f\n", e.step(seq, prompt + 3, 1));
    e.pool.close();
}
