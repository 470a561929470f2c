// group: a language model whose context is distributed over the ranks of a group. Every rank has its own context, pool and
// model, and all generate the same text. The program then generates it with one rank alone and compares. Ranks are threads of
// this process or, if mpirun, torchrun or srun started it, processes.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../tinylm/model.h"
#include "../tinylm/parallel.h"
#include "../tinylm/safetensors.h"
#include "attention_group.h"
#include "launched.h"

namespace group_example {
namespace {

struct Options {
    std::string model, prompt, prompt_file, id_file;
    int bytes = 64;
    uint32_t ranks = 3;
    bool gpu = false;
    ta_group_kind kind = 0;  // 0: chosen to suit the ranks
};

struct Generated {
    std::string text;
    tinylm::KvStats cache;
    std::unique_ptr<tinylm::AttentionBackend> attention;  // kept until all ranks are done, because the first that leaves ends
                                                          // the group
};

// Generates the most likely continuation. Prompts are fed in chunks of 64 bytes: each fills a block, which then goes to its
// rank.
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
            if (options.gpu) member.gpu = int(r);
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

void print_rank(uint32_t rank, uint32_t ranks, const Generated& spread, const Generated& alone) {
    std::printf("rank %u of %u: %llu of the %llu blocks, %llu bytes\n", rank, ranks,
                (unsigned long long)spread.cache.device_blocks, (unsigned long long)alone.cache.device_blocks,
                (unsigned long long)spread.cache.bytes);
}

int tell(bool same, const Generated& alone) {
    std::printf("one rank alone: %llu bytes, %s\n", (unsigned long long)alone.cache.bytes,
                same ? "the same text" : "ANOTHER TEXT");
    return same ? 0 : 1;
}

int run_threads(const Options& o, const std::string& text) {
    const std::vector<Generated> spread = generate_on(o.ranks, o, text);
    const Generated alone = std::move(generate_on(1, o, text)[0]);
    std::printf("%s\n\n", spread[0].text.c_str());
    for (uint32_t r = 0; r < o.ranks; ++r) print_rank(r, o.ranks, spread[r], alone);
    return tell(std::all_of(spread.begin(), spread.end(), [&](const Generated& g) { return g.text == alone.text; }), alone);
}

// Runs one rank. Its group lives until the process ends; by then the others have their text, since each also generates it
// alone.
int run_process(const Options& o, const std::string& text, const Place& place) {
    Member member;
    member.rank = place.rank, member.ranks = place.ranks;
    member.kind = o.kind != 0 ? o.kind : o.gpu ? TA_GROUP_NCCL : TA_GROUP_HOST;
    member.gpu = o.gpu ? place.local_rank : -1;
    const SharedId shared(place, member.kind, o.id_file);
    member.id = shared.id();
    const Generated spread = generate(o, text, member);
    Member one;
    one.gpu = member.gpu;
    ta_error err{};
    if (ta_group_make_id(one.kind, &one.id, &err) != TA_OK) throw std::runtime_error(err.message);
    const Generated alone = generate(o, text, one);
    if (place.rank == 0) std::printf("%s\n\n", spread.text.c_str());
    print_rank(place.rank, place.ranks, spread, alone);
    return tell(spread.text == alone.text, alone);
}

int run(int argc, char** argv) {
    CLI::App app{"A language model whose context is spread over the ranks of a group"};
    Options o;
    app.add_option("--model", o.model, "folder with config.json and model.safetensors")->required();
    auto* prompt = app.add_option("--prompt", o.prompt, "the text to continue");
    auto* file = app.add_option("--prompt-file", o.prompt_file, "a file with it")->excludes(prompt);
    app.add_option("--bytes", o.bytes, "how many to add")->check(CLI::Range(1, 1 << 20))->capture_default_str();
    app.add_option("--ranks", o.ranks,
                   "threads, each with a context of its own; mpirun, torchrun and srun say how many processes")
        ->check(CLI::Range(1, 64))
        ->capture_default_str();
    app.add_flag("--gpu", o.gpu, "each rank on a GPU of its own");
    app.add_option("--kind", o.kind, "of a group of processes: host, or nccl on several hosts; default: nccl with --gpu")
        ->transform(
            CLI::CheckedTransformer(std::map<std::string, ta_group_kind>{{"host", TA_GROUP_HOST}, {"nccl", TA_GROUP_NCCL}}));
    app.add_option("--id-file", o.id_file, "where all processes see the group's id; on several hosts a file that they share");
    try {
        app.parse(argc, argv);
        if (!*prompt && !*file) throw CLI::RequiredError("--prompt or --prompt-file");
    } catch (const CLI::ParseError& e) {
        return app.exit(e);
    }
    const std::string text = *file ? tinylm::read_file(o.prompt_file, 1 << 24) : o.prompt;
    if (text.empty()) throw std::runtime_error("the prompt is empty");
    const std::optional<Place> place = find_place();
    return place ? run_process(o, text, *place) : run_threads(o, text);
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
