// serve: replays a trace of requests against a small engine on tinylm, and reports how long they took and which had to wait.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <span>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "../tinylm/parallel.h"
#include "../tinylm/safetensors.h"
#include "engine.h"

namespace serve {
namespace {

struct Settings {
    std::vector<std::string> models{"examples/tinylm/model"};
    std::string trace = "examples/serve/trace.csv";
    int requests = 1000, device_blocks = 160, host_blocks = 640, check = 0;
    double speed = 1.0;
    bool fifo = false, no_drafts = false, no_prefixes = false;
    Options engine;
};

// Reads lines of arrival_ms,offset,prompt,output,cancel. A prompt is that many bytes of the model's sample text, from the
// offset on. cancel: after how many bytes the client leaves, or -1. Requests go to the models in turn.
std::vector<Request> read_trace(const Settings& s) {
    const std::string text = tinylm::read_file(s.models[0] + "/sample.txt", 1 << 20);
    std::ifstream file(s.trace);
    if (!file) throw std::runtime_error(s.trace + " cannot be read");
    std::vector<Request> requests;
    std::string line;
    std::getline(file, line);  // names of the columns
    while (int(requests.size()) < s.requests && std::getline(file, line)) {
        std::replace(line.begin(), line.end(), ',', ' ');
        std::istringstream in(line);
        double arrival_ms = 0;
        size_t offset = 0, prompt = 0;
        Request r;
        if (!(in >> arrival_ms >> offset >> prompt >> r.most >> r.cancel_after) || prompt == 0 || r.most < 1 ||
            offset + prompt > text.size()) {
            throw std::runtime_error(s.trace + ": line " + std::to_string(requests.size() + 2) + " is no request");
        }
        r.id = int(requests.size());
        r.model = requests.size() % s.models.size();
        r.arrival = arrival_ms / 1000 / s.speed;
        r.prompt = text.substr(offset, prompt);
        requests.push_back(std::move(r));
    }
    return requests;
}

double percentile(std::vector<double> x, double p) {
    if (x.empty()) return 0;
    std::sort(x.begin(), x.end());
    return x[std::min(x.size() - 1, size_t(p * double(x.size())))];
}

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

double replay(Engine& engine, std::vector<Request>& requests) {
    const Clock::time_point start = Clock::now();
    for (size_t next = 0; next < requests.size() || !engine.idle();) {
        while (next < requests.size() && requests[next].arrival <= seconds_since(start)) engine.add(requests[next++]);
        if (engine.step(start)) continue;
        if (next == requests.size()) throw std::runtime_error("a request does not fit the budgets, though nothing else runs");
        const double wait = requests[next].arrival - seconds_since(start);
        if (wait > 0) std::this_thread::sleep_for(std::chrono::duration<double>(wait));
    }
    return seconds_since(start);
}

void report(const std::vector<Request>& requests, const Counters& c, double seconds) {
    std::vector<double> first, between;
    int64_t tokens = 0, cancelled = 0;
    for (const Request& r : requests) {
        tokens += int64_t(r.times.size());
        cancelled += r.cancelled;
        if (!r.times.empty()) first.push_back(r.times[0] - r.arrival);
        for (size_t i = 1; i < r.times.size(); ++i) between.push_back(r.times[i] - r.times[i - 1]);
    }
    std::printf("%zu requests, %lld cancelled, in %.1f s: %.0f tokens/s in %lld steps\n", requests.size(), (long long)cancelled,
                seconds, double(tokens) / seconds, (long long)c.steps);
    std::printf("time to first token p50 %.3f p99 %.3f s; between tokens p50 %.1f p99 %.1f ms\n", percentile(first, 0.5),
                percentile(first, 0.99), 1e3 * percentile(between, 0.5), 1e3 * percentile(between, 0.99));
    std::printf(
        "no room: %lld times; preempted %lld, restarted %lld; %lld prompt tokens were there; %lld of %lld drafts stayed\n",
        (long long)c.refused, (long long)c.preempted, (long long)c.restarted, (long long)c.reused_tokens, (long long)c.accepted,
        (long long)c.drafted);
}

// Runs the first requests again, each alone in a pool with room for everything, and counts the texts that are the same.
void compare(std::span<tinylm::Model* const> models, const Settings& s, const std::vector<Request>& requests) {
    Options alone = s.engine;
    alone.device_bytes = uint64_t{1} << 28;
    alone.host_bytes = 0;
    alone.drafts = alone.prefixes = false;
    const auto n = size_t(std::min<int>(s.check, int(requests.size())));
    size_t same = 0, bytes = 0, equal_bytes = 0;
    for (size_t i = 0; i < n; ++i) {
        std::vector<Request> one{requests[i]};
        one[0].arrival = 0;
        one[0].text.clear();
        one[0].times.clear();
        one[0].cancelled = false;
        one[0].model = 0;
        Engine engine(models.subspan(requests[i].model, 1), alone);
        replay(engine, one);
        const std::string &a = one[0].text, &b = requests[i].text;
        same += a == b;
        bytes += a.size();
        equal_bytes += size_t(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
    }
    std::printf("alone: %zu of %zu texts are the same, %.2f%% of the bytes up to the first difference\n", same, n,
                bytes ? 100.0 * double(equal_bytes) / double(bytes) : 100.0);
}

int run(int argc, char** argv) {
    Settings s;
    s.engine.threads = std::max(1, int(std::thread::hardware_concurrency()));
    CLI::App app("Replays a trace of requests against a small serving engine on tinylm.");
    app.add_option("--model", s.models, "folder of a model; several, whose caches have one shape, share the budgets")
        ->capture_default_str();
    app.add_option("--trace", s.trace, "the requests")->capture_default_str();
    app.add_option("--requests", s.requests, "so many of them")->check(CLI::Range(1, 1000000))->capture_default_str();
    app.add_option("--speed", s.speed, "requests come so many times as fast")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    app.add_option("--device-blocks", s.device_blocks, "blocks of 64 tokens that the device tier holds")
        ->check(CLI::Range(8, 1 << 20))
        ->capture_default_str();
    app.add_option("--host-blocks", s.host_blocks, "and the host tier; 0: none")
        ->check(CLI::Range(0, 1 << 20))
        ->capture_default_str();
    app.add_option("--bits", s.engine.bits, "of the cache")->check(CLI::IsMember({8, 4, 2}))->capture_default_str();
    app.add_option("--running", s.engine.most_running, "requests in a step at most")
        ->check(CLI::Range(1, 1024))
        ->capture_default_str();
    app.add_option("--step-tokens", s.engine.step_tokens, "prompt tokens in a step at most")
        ->check(CLI::Range(64, 65536))
        ->capture_default_str();
    app.add_option("--threads", s.engine.threads, "for model and attention")->check(CLI::Range(1, 1024))->capture_default_str();
    app.add_option("--check", s.check, "then runs so many requests alone and compares")
        ->check(CLI::Range(0, 1000000))
        ->capture_default_str();
    app.add_flag("--gpu", s.engine.gpu, "cache and attention on GPU 0, the rest of the models on the CPU");
    app.add_flag("--fifo", s.fifo, "admits whoever comes, and restarts the last one when a begin finds no room");
    app.add_flag("--batch-invariant", s.engine.batch_invariant, "texts are those of each request alone, to the byte");
    app.add_flag("--no-drafts", s.no_drafts, "a token for each step and request");
    app.add_flag("--no-prefixes", s.no_prefixes, "no blocks are shared");
    CLI11_PARSE(app, argc, argv);
    s.engine.reserve = !s.fifo;
    s.engine.drafts = !s.no_drafts;
    s.engine.prefixes = !s.no_prefixes;
    tinylm::Workers workers(s.engine.threads);
    std::vector<std::unique_ptr<tinylm::Model>> loaded;
    std::vector<tinylm::Model*> models;
    for (const std::string& folder : s.models) {
        models.push_back(loaded.emplace_back(std::make_unique<tinylm::Model>(folder, workers)).get());
        if (s.engine.batch_invariant) models.back()->go_row_by_row();
    }
    std::vector<Request> requests = read_trace(s);
    s.engine.device_bytes = Engine::bytes_of_blocks(*models[0], s.engine.bits, s.device_blocks);
    s.engine.host_bytes = s.host_blocks > 0 ? Engine::bytes_of_blocks(*models[0], s.engine.bits, s.host_blocks) * 5 / 4 : 0;
    Engine engine(models, s.engine);
    const double seconds = replay(engine, requests);
    report(requests, engine.counters(), seconds);
    if (s.check > 0) compare(models, s, requests);
    return 0;
}

}  // namespace
}  // namespace serve

int main(int argc, char** argv) {
    try {
        return serve::run(argc, argv);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "serve: %s\n", e.what());
        return 1;
    }
}
