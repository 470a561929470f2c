// group: a language model whose context is spread over the ranks of a group. Every rank is a thread with its own context, pool and
// model, and generates the same text; the program then does it with one rank alone and compares.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../tinylm/model.h"
#include "../tinylm/parallel.h"
#include "../tinylm/safetensors.h"
#include "attention_group.h"

namespace group_example {
namespace {

struct Options {
    std::string model, prompt, prompt_file;
    int bytes = 64;
    uint32_t ranks = 3;
};

struct Generated {
    std::string text;
    tinylm::KvStats cache;
    std::unique_ptr<tinylm::AttentionBackend> attention;  // until all ranks are done: the first that leaves ends the group
};

// The likeliest continuation. Chunks of 64 bytes: a block is full, and goes to its rank, after each.
Generated generate(const Options& options, const std::string& prompt, const Member& member) {
    tinylm::Workers workers(1);
    tinylm::Model model(options.model, workers);
    const std::size_t most = prompt.size() + std::size_t(options.bytes);
    if (most > std::size_t(model.config().max_positions))
        throw std::runtime_error("prompt and text are longer than the context");
    auto attention = make_group_attention(model.attention_shape(int(most)), member);
    std::vector<float> logits(tinylm::kVocab);
    int fed = 0;
    const auto feed = [&](const std::string& bytes) {
        constexpr std::size_t kChunk = 64;
        for (std::size_t at = 0; at < bytes.size(); at += kChunk) {
            const std::size_t n = std::min(kChunk, bytes.size() - at);
            const auto hidden = model.forward({reinterpret_cast<const uint8_t*>(bytes.data()) + at, n}, fed, *attention);
            fed += int(n);
            if (at + n == bytes.size()) model.logits(hidden.last(std::size_t(model.config().hidden)), logits.data());
        }
    };
    Generated g;
    feed(prompt);
    for (int i = 0; i < options.bytes; ++i) {
        g.text.push_back(char(std::max_element(logits.begin(), logits.end()) - logits.begin()));
        feed(g.text.substr(g.text.size() - 1));
    }
    g.cache = attention->stats();
    g.attention = std::move(attention);
    return g;
}

std::vector<Generated> generate_on(uint32_t ranks, const Options& options, const std::string& prompt) {
    Member member;
    member.ranks = ranks;
    ta_error err{};
    if (ta_group_make_id(TA_GROUP_LOCAL, &member.id, &err) != TA_OK) throw std::runtime_error(err.message);
    std::vector<Generated> all(ranks);
    std::vector<std::exception_ptr> failures(ranks);
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < ranks; ++r) {
        threads.emplace_back([&, r, member]() mutable {
            member.rank = r;
            try {
                all[r] = generate(options, prompt, member);
            } catch (...) {
                failures[r] = std::current_exception();
            }
        });
    }
    for (std::thread& t : threads) t.join();
    for (const std::exception_ptr& f : failures) {
        if (f) std::rethrow_exception(f);
    }
    return all;
}

int run(int argc, char** argv) {
    CLI::App app{"A language model whose context is spread over the ranks of a group"};
    Options o;
    app.add_option("--model", o.model, "folder with config.json and model.safetensors")->required();
    auto* prompt = app.add_option("--prompt", o.prompt, "the text to continue");
    auto* file = app.add_option("--prompt-file", o.prompt_file, "a file with it")->excludes(prompt);
    app.add_option("--bytes", o.bytes, "how many to add")->check(CLI::Range(1, 1 << 20))->capture_default_str();
    app.add_option("--ranks", o.ranks, "threads, each with a context of its own")
        ->check(CLI::Range(1, 64))
        ->capture_default_str();
    try {
        app.parse(argc, argv);
        if (!*prompt && !*file) throw CLI::RequiredError("--prompt or --prompt-file");
    } catch (const CLI::ParseError& e) {
        return app.exit(e);
    }
    const std::string text = *file ? tinylm::read_file(o.prompt_file, 1 << 24) : o.prompt;
    if (text.empty()) throw std::runtime_error("the prompt is empty");
    const std::vector<Generated> spread = generate_on(o.ranks, o, text);
    const std::vector<Generated> one = generate_on(1, o, text);
    const Generated& alone = one[0];
    std::printf("%s\n\n", spread[0].text.c_str());
    for (uint32_t r = 0; r < o.ranks; ++r) {
        std::printf("rank %u of %u: %llu of the %llu blocks, %llu bytes\n", r, o.ranks,
                    (unsigned long long)spread[r].cache.device_blocks, (unsigned long long)alone.cache.device_blocks,
                    (unsigned long long)spread[r].cache.bytes);
    }
    const bool same = std::all_of(spread.begin(), spread.end(), [&](const Generated& g) { return g.text == alone.text; });
    std::printf("one rank alone: %llu bytes, %s\n", (unsigned long long)alone.cache.bytes,
                same ? "the same text" : "ANOTHER TEXT");
    return same ? 0 : 1;
}

}  // namespace
}  // namespace group_example

int main(int argc, char** argv) {
    try {
        return group_example::run(argc, argv);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "group: %s\n", e.what());
        return 1;
    }
}
