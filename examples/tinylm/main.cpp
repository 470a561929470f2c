// tinylm: runs a small language model over bytes, with exact attention or with the library's compressed cache, and measures
// what the compression costs. This file has the command line, the commands, and what they print.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "attention_turbo.h"
#include "divergence.h"
#include "head_costs.h"
#include "model.h"
#include "parallel.h"
#include "safetensors.h"
#include "vector_math.h"

namespace tinylm {
namespace {

using json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;
using Bytes = std::span<const uint8_t>;

constexpr std::size_t kMaxTextBytes = 1 << 30;
constexpr int kWindow = 4096;

struct Options {
    std::string model;
    std::string prompt, prompt_file, text, prompts;
    int bytes = 64;
    int windows = 0;  // 0: all
    int limit = 0;    // 0: all
    bool exact = false;
    TurboOptions turbo;
    std::string head_map, calibration_text, save_head_map, save_costs;
    int bits_k = 0, bits_v = 0;  // 0: turbo.bits
    std::string exact_logits;
    bool complement = false;
    int low_heads = 1;
    int most_bits = 4;  // for calibrate: 8 or 4
    int chunk = 0;      // 0: default_chunk
    int context = 0;    // positions that attention keeps; 0: all
    int threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    bool json = false;
    bool logits = false;
};

Bytes as_bytes(const std::string& text) {
    return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// A line that overwrites itself, on terminals only.
class Progress {
  public:
    void show(const std::string& text) {
        if (terminal_) std::fprintf(stderr, "\r%s\033[K", text.c_str());
    }
    ~Progress() {
        if (terminal_) std::fprintf(stderr, "\r\033[K");
    }

  private:
    bool terminal_ = ::isatty(STDERR_FILENO) != 0;
};

// The size of chunks does not change what exact attention computes, and large ones are faster.
int default_chunk(const Options& options) {
    return options.exact && options.context == 0 ? 512 : 64;
}

// The model, its attention, and how much was fed so far.
class Session {
  public:
    explicit Session(const Options& options)
        : options_(options),
          chunk_(options.chunk > 0 ? options.chunk : default_chunk(options)),
          workers_(options.threads),
          model_(options.model, workers_) {}

    const ModelConfig& config() const { return model_.config(); }
    AttentionShape shape(int max_tokens) const { return model_.attention_shape(max_tokens); }

    // Makes the attention for sequences of up to max_tokens. Call it once, before feeding.
    void prepare(int max_tokens) {
        if (max_tokens > config().max_positions) {
            throw std::runtime_error(std::to_string(max_tokens) + " bytes are more than the model's context of " +
                                     std::to_string(config().max_positions));
        }
        const AttentionShape shape = model_.attention_shape(max_tokens);
        if (options_.exact) {
            attention_ = make_exact_attention(shape, workers_);
            return;
        }
        TurboOptions turbo = options_.turbo;
        turbo.threads = options_.threads;
        turbo.head_map = head_map(shape);
        attention_ = make_turbo_attention(shape, turbo);
    }

    // The same with the given map.
    void prepare(int max_tokens, const HeadMap& map) {
        TurboOptions turbo = options_.turbo;
        turbo.threads = options_.threads;
        turbo.head_map = map;
        attention_ = make_turbo_attention(model_.attention_shape(max_tokens), turbo);
    }

    // The map that the library ranks on the calibration text.
    HeadMap ranked_head_map() {
        std::filesystem::path path = options_.calibration_text;
        if (path.empty()) path = std::filesystem::path(options_.model) / "sample.txt";
        const std::string text = read_file(path, kMaxTextBytes);
        const int window = std::min({kWindow, config().max_positions, static_cast<int>(text.size())});
        return calibrate_head_map(model_, workers_, as_bytes(text).first(window), options_.low_heads);
    }

    void reset() {
        attention_->reset();
        kept_ = 0;
    }
    void rest() { attention_->rest(); }
    json tiers() const {
        const KvStats s = attention_->stats();
        return {{"device_blocks", s.device_blocks}, {"host_blocks", s.host_blocks},  {"disk_blocks", s.disk_blocks},
                {"evicted_bytes", s.evicted_bytes}, {"to_disk_bytes", s.disk_bytes}, {"returned_bytes", s.returned_bytes}};
    }

    // Feeds bytes after the `first` ones that were fed before, in chunks. seen(i, hidden) gets the hidden states [n, hidden] of
    // bytes i, ..., i + n - 1 of the span.
    template <typename Seen>
    void feed(Bytes bytes, int first, Seen seen) {
        const Clock::time_point start = Clock::now();
        for (std::size_t at = 0; at < bytes.size(); at += chunk_) {
            const Bytes part = bytes.subspan(at, std::min(chunk_, bytes.size() - at));
            make_place(static_cast<int>(part.size()));
            seen(at, model_.forward(part, first + static_cast<int>(at), *attention_));
        }
        seconds_ += seconds_since(start);
        fed_ += bytes.size();
    }

    std::span<float> logits(std::span<const float> hidden) {
        logits_.resize(hidden.size() / config().hidden * kVocab);
        model_.logits(hidden, logits_.data());
        return logits_;
    }

    // Call this at the end of each sequence: the reported sizes are an average over all sequences.
    void count_cache() {
        const KvStats stats = attention_->stats();
        cache_bytes_ += static_cast<double>(stats.bytes);
        cache_tokens_ += static_cast<double>(stats.tokens);
    }

    json report() const {
        const ModelConfig& c = config();
        const double per_token = cache_bytes_ / cache_tokens_;
        const double elements = 2.0 * c.layers * c.kv_heads * c.head_dim;
        json out;
        out["attention"] = attention_->stats().description;
        out["kv_bytes_per_token"] = per_token;
        out["compression_vs_fp16"] = 2.0 * elements / per_token;
        out["bits_per_element"] = 8.0 * per_token / elements;
        out["chunk"] = chunk_;
        out["threads"] = options_.threads;
        out["tokens"] = fed_;
        out["tokens_per_second"] = static_cast<double>(fed_) / seconds_;
        return out;
    }

  private:
    // Keeps the first bytes: attention relies on them.
    void make_place(int bytes) {
        constexpr int kFirst = 64;
        if (options_.context > 0 && kept_ + bytes > options_.context) {
            attention_->shift(kFirst, options_.context / 2);
            kept_ -= options_.context / 2;
        }
        kept_ += bytes;
    }

    HeadMap head_map(const AttentionShape& shape) {
        if (options_.head_map.empty()) {
            const int k = options_.bits_k > 0 ? options_.bits_k : options_.turbo.bits;
            const int v = options_.bits_v > 0 ? options_.bits_v : options_.turbo.bits;
            return options_.bits_k > 0 || options_.bits_v > 0 ? same_head_map(shape, k, v) : HeadMap{};
        }
        HeadMap map;
        if (options_.head_map == "rank") {
            map = ranked_head_map();
        } else if (options_.head_map.starts_with("random:")) {
            map = random_head_map(shape, options_.low_heads, options_.head_map.substr(7));
        } else {
            map = read_head_map(options_.head_map, shape);
        }
        return options_.complement ? complement_of(std::move(map)) : map;
    }

    const Options& options_;
    std::size_t chunk_;
    Workers workers_;
    Model model_;
    std::unique_ptr<AttentionBackend> attention_;
    std::vector<float> logits_;
    double cache_bytes_ = 0, cache_tokens_ = 0;
    double seconds_ = 0;
    uint64_t fed_ = 0;
    int kept_ = 0;  // bytes that attention still has
};

int argmax(std::span<const float> logits) {
    return static_cast<int>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

struct Score {
    double bits;    // -log2 p of the byte that came
    bool expected;  // the byte was the most likely one
};

Score score_byte(std::span<float> logits, uint8_t byte) {
    const int best = argmax(logits);
    const double behind = logits[best] - logits[byte];
    return {(std::log(exp_minus_max(logits.data(), logits.size())) + behind) / std::log(2.0), best == byte};
}

// Feeds a text into an empty cache. Calls seen(i, logits [kVocab]) for the predictions of bytes from, from + 1, ..., each from
// all bytes before it; i is the byte before the predicted one. from >= 1.
template <typename Seen>
void predict_text(Session& session, Bytes text, std::size_t from, Seen seen) {
    session.reset();
    session.feed(text, 0, [&](std::size_t at, std::span<const float> hidden) {
        const std::size_t width = session.config().hidden;
        const std::size_t end = std::min(at + hidden.size() / width, text.size() - 1);  // the last byte predicts nothing here
        const std::size_t begin = std::max(at, from - 1);
        if (begin >= end) return;
        const std::span<float> logits = session.logits(hidden.subspan((begin - at) * width, (end - begin) * width));
        for (std::size_t i = begin; i < end; ++i) seen(i, logits.subspan((i - begin) * kVocab, kVocab));
    });
    session.count_cache();
}

std::vector<Score> score_text(Session& session, Bytes text, std::size_t from) {
    std::vector<Score> scores;
    predict_text(session, text, from,
                 [&](std::size_t i, std::span<float> logits) { scores.push_back(score_byte(logits, text[i + 1])); });
    return scores;
}

double total_bits(const std::vector<Score>& scores) {
    double bits = 0;
    for (const Score& s : scores) bits += s.bits;
    return bits;
}

// Windows of a text and their loss.
struct Windows {
    std::string text;
    std::size_t size, count;

    Windows(const Options& options, const Session& session) : text(read_file(options.text, kMaxTextBytes)) {
        if (text.size() < 2) throw std::runtime_error(options.text + ": too short to score");
        size = std::min<std::size_t>({kWindow, text.size(), static_cast<std::size_t>(session.config().max_positions)});
        count = text.size() / size;
        if (options.windows > 0) count = std::min<std::size_t>(count, options.windows);
    }
    Bytes window(std::size_t w) const { return as_bytes(text).subspan(w * size, size); }
    Bytes whole() const { return as_bytes(text).first(count * size); }
    std::size_t scored_bytes() const { return count * (size - 1); }
};

// The predictions of exact attention for the windows, made by a session of its own.
class Reference {
  public:
    Reference(const Options& options, const Windows& windows)
        : options_(exact(options)),
          session_(options_),
          logits_(windows.whole(), windows.size, options.exact_logits, [this](Bytes bytes) { return compute(bytes); }) {}
    std::span<const float> logits(std::size_t w) { return logits_.window(w); }

  private:
    static Options exact(Options options) {
        options.exact = true;
        options.chunk = 0;
        return options;
    }
    std::vector<float> compute(Bytes bytes) {
        session_.prepare(static_cast<int>(bytes.size()));
        std::vector<float> out;
        predict_text(session_, bytes, 1,
                     [&](std::size_t, std::span<float> logits) { out.insert(out.end(), logits.begin(), logits.end()); });
        return out;
    }

    const Options options_;
    Session session_;
    ExactLogits logits_;
};

json run_eval(const Options& options) {
    Session session(options);
    const Windows windows(options, session);
    std::optional<Reference> reference;
    if (!options.exact || !options.exact_logits.empty()) reference.emplace(options, windows);
    session.prepare(static_cast<int>(windows.size));

    Progress progress;
    std::vector<double> per_window;
    double bits = 0;
    Divergence kl;
    for (std::size_t w = 0; w < windows.count; ++w) {
        const Bytes text = windows.window(w);
        const std::span<const float> exact = reference ? reference->logits(w) : std::span<const float>();
        double window_bits = 0;
        predict_text(session, text, 1, [&](std::size_t i, std::span<float> logits) {
            if (reference) kl.add(kl_bits(exact.subspan(i * kVocab, kVocab), logits));
            window_bits += score_byte(logits, text[i + 1]).bits;
        });
        kl.end_window();
        bits += window_bits;
        per_window.push_back(window_bits / static_cast<double>(windows.size - 1));
        progress.show("window " + std::to_string(w + 1) + " of " + std::to_string(windows.count) + ": " +
                      std::to_string(bits / static_cast<double>((w + 1) * (windows.size - 1))) + " bits per byte");
    }
    json out{{"bits_per_byte", bits / static_cast<double>(windows.scored_bytes())}};
    if (reference) {
        out["kl_bits_per_byte"] = kl.mean();
        out["kl_standard_error"] = kl.standard_error();
        if (options.json) out["kl_of_block"] = kl.blocks();
    }
    out["windows"] = windows.count;
    out["scored_bytes"] = windows.scored_bytes();
    out["bits_per_byte_of_window"] = per_window;
    out.update(session.report());
    return out;
}

void print_heads(const json& units) {
    std::printf("   layer  head  bits   kl_bits_per_byte  standard_error  bits_in_map   kept\n");
    for (const json& u : units) {
        std::printf("%s %6d %5d %5d %18.6f %15.6f %12d %5d%%\n", u["tensor"].get<std::string>().c_str(), u["layer"].get<int>(),
                    u["head"].get<int>(), u["bits"].get<int>(), u["kl_bits_per_byte"].get<double>(),
                    u["kl_standard_error"].get<double>(), u["bits_in_map"].get<int>(),
                    static_cast<int>(100 * u["kept"].get<double>()));
    }
    std::fflush(stdout);
}

// Measures K and V of each head alone, with each of kBitsOfCosts below options.most_bits, and prints each result. `divergence`:
// that of a map.
json measure_heads(const Options& options, const AttentionShape& shape,
                   const std::function<Divergence(const HeadMap&)>& divergence, MeasuredCosts& costs) {
    const HeadMap all_8 = same_head_map(shape, 8, 8);
    Progress progress;
    json units = json::array();
    const int heads = shape.layers * shape.kv_heads, all = (options.most_bits == 8 ? 4 : 2) * heads;
    for (const auto& [name, bits_of, cost, blocks] : {std::tuple{"k", &HeadMap::k_bits, &costs.mean.k, &costs.k_blocks},
                                                      {"v", &HeadMap::v_bits, &costs.mean.v, &costs.v_blocks}}) {
        for (int unit = 0; unit < heads; ++unit) {
            for (const uint8_t bits : kBitsOfCosts) {
                if (bits >= options.most_bits) {
                    cost->push_back(bits > options.most_bits ? std::numeric_limits<float>::infinity() : 0.0f);
                    blocks->emplace_back();
                    continue;
                }
                HeadMap map = all_8;
                (map.*bits_of)[static_cast<std::size_t>(unit)] = bits;
                const Divergence kl = divergence(map);
                cost->push_back(static_cast<float>(kl.mean()));
                blocks->push_back(kl.blocks());
                costs.positions = kl.positions();
                units.push_back({{"tensor", name},
                                 {"layer", unit / shape.kv_heads},
                                 {"head", unit % shape.kv_heads},
                                 {"bits", bits},
                                 {"kl_bits_per_byte", kl.mean()},
                                 {"kl_standard_error", kl.standard_error()}});
                progress.show(std::to_string(units.size()) + " of " + std::to_string(all) + " measured");
            }
        }
    }
    return units;
}

// Finds out which heads tolerate few bits. K and V of each head in turn get 2 bits while all others have 8; the cost is how far
// the predictions move from those of 8 bits. If the map may use 8 bits, 4 are measured, too; else they count as free, since
// they cost a tenth of 2. The map with the least sum is chosen. As the others have 8 bits, the costs of single heads add up.
json run_calibrate(const Options& options) {
    if (!options.save_costs.empty() && options.most_bits != 8)
        throw std::runtime_error("--save-costs needs --most-bits 8: without it 4 bits are not measured");
    Session session(options);
    const Windows windows(options, session);
    const AttentionShape shape = session.shape(static_cast<int>(windows.size));
    std::vector<std::vector<float>> of_8(windows.count);  // logits
    const auto predict = [&](const HeadMap& map, auto seen) {
        session.prepare(static_cast<int>(windows.size), map);
        for (std::size_t w = 0; w < windows.count; ++w)
            predict_text(session, windows.window(w), 1, [&](std::size_t i, std::span<float> logits) { seen(w, i, logits); });
    };
    predict(same_head_map(shape, 8, 8), [&](std::size_t w, std::size_t, std::span<float> logits) {
        of_8[w].insert(of_8[w].end(), logits.begin(), logits.end());
    });
    const auto divergence = [&](const HeadMap& map) {
        Divergence kl;
        predict(map, [&](std::size_t w, std::size_t i, std::span<float> logits) {
            kl.add(kl_bits(std::span<const float>(of_8[w]).subspan(i * kVocab, kVocab), logits));
            if (i + 2 == windows.size) kl.end_window();
        });
        return kl;
    };

    MeasuredCosts costs;
    json units = measure_heads(options, shape, divergence, costs);
    if (!options.save_costs.empty()) costs.write(options.save_costs, shape);
    const auto choose = [&](const std::vector<HeadCosts>& of) { return choose_head_maps(shape, of, options.low_heads); };
    const HeadMap map = choose({costs.mean}).front();
    const Certainty certainty = certainty_of(costs, map, choose);
    int certain = 0;
    for (const auto* kept : {&certainty.k_kept, &certainty.v_kept})
        certain += static_cast<int>(std::ranges::count_if(*kept, [](double share) { return share >= 0.95; }));
    for (json& unit : units) {
        const bool k = unit["tensor"] == "k";
        const std::size_t head = unit["layer"].get<std::size_t>() * shape.kv_heads + unit["head"].get<std::size_t>();
        unit["bits_in_map"] = (k ? map.k_bits : map.v_bits)[head];
        unit["kept"] = (k ? certainty.k_kept : certainty.v_kept)[head];
    }
    const Divergence kl = divergence(map);
    const std::vector<double> sums = costs.sum_of_blocks(map);
    std::vector<double> differences = kl.blocks();
    for (std::size_t b = 0; b < sums.size(); ++b) differences[b] -= sums[b];
    const std::string text = head_map_json(map, shape);
    std::ofstream file(options.save_head_map);
    file << text << '\n';
    if (!file.flush()) throw std::runtime_error(options.save_head_map + ": cannot be written");
    if (!options.json) print_heads(units);
    json out{{"kl_from_8_bits", kl.mean()},
             {"kl_standard_error", kl.standard_error()},
             {"sum_of_single_heads", costs.sum(map)},
             {"sum_standard_error", standard_error(sums, costs.positions)},
             {"kl_minus_sum", weighted_mean(differences, costs.positions)},
             {"difference_standard_error", standard_error(differences, costs.positions)},
             {"regret", certainty.regret},
             {"certain", certain},
             {"in_doubt", int(certainty.k_kept.size() + certainty.v_kept.size()) - certain},
             {"head_map", json::parse(text)}};
    if (options.json) out["heads"] = units;
    return out;
}

struct RetrievalCase {
    std::string prompt, answer, bucket;
    json id;
};

std::vector<RetrievalCase> read_cases(const std::string& path, int limit) {
    std::vector<RetrievalCase> cases;
    std::istringstream lines(read_file(path, kMaxTextBytes));
    for (std::string line; std::getline(lines, line) && (limit == 0 || static_cast<int>(cases.size()) < limit);) {
        try {
            const json entry = json::parse(line);
            const json& bucket = entry.at("bucket");
            cases.push_back({entry.at("prompt"), entry.at("answer"), bucket.is_string() ? std::string(bucket) : bucket.dump(),
                             entry.value("id", json(cases.size()))});
            if (cases.back().prompt.empty() || cases.back().answer.empty()) throw std::runtime_error("empty prompt or answer");
        } catch (const std::exception& e) {
            throw std::runtime_error(path + ", line " + std::to_string(cases.size() + 1) + ": " + e.what());
        }
    }
    if (cases.empty()) throw std::runtime_error(path + ": no prompts");
    return cases;
}

struct Tally {
    int prompts = 0, correct = 0;
    double bits = 0;
    std::size_t answer_bytes = 0;

    void add(const std::vector<Score>& scores) {
        ++prompts;
        correct += std::all_of(scores.begin(), scores.end(), [](const Score& s) { return s.expected; });
        bits += total_bits(scores);
        answer_bytes += scores.size();
    }
    json report() const {
        return {{"prompts", prompts},
                {"accuracy", static_cast<double>(correct) / prompts},
                {"bits_per_answer_byte", bits / static_cast<double>(answer_bytes)}};
    }
};

json run_retrieval(const Options& options) {
    const std::vector<RetrievalCase> cases = read_cases(options.prompts, options.limit);
    Session session(options);
    std::size_t longest = 0;
    for (const RetrievalCase& c : cases) longest = std::max(longest, c.prompt.size() + c.answer.size());
    session.prepare(static_cast<int>(std::min<std::size_t>(longest, INT32_MAX)));

    Progress progress;
    Tally all;
    std::map<std::pair<std::size_t, std::string>, Tally> buckets;  // by length first: 250 before 1000
    json wrong = json::array();
    for (const RetrievalCase& c : cases) {
        // Feeding the right answer and comparing it with each best guess is the same as decoding: up to the first wrong byte
        // the sequences agree, and after it the case is lost.
        const std::vector<Score> scores = score_text(session, as_bytes(c.prompt + c.answer), c.prompt.size());
        const int correct_before = all.correct;
        all.add(scores);
        buckets[{c.bucket.size(), c.bucket}].add(scores);
        if (all.correct == correct_before) wrong.push_back(c.id);
        progress.show(std::to_string(all.correct) + " of " + std::to_string(all.prompts) + " correct");
    }
    json out = all.report();
    for (const auto& [key, tally] : buckets) out["buckets"][key.second] = tally.report();
    out["wrong_ids"] = wrong;
    out.update(session.report());
    return out;
}

json run_generate(const Options& options) {
    const std::string prompt = options.prompt_file.empty() ? options.prompt : read_file(options.prompt_file, kMaxTextBytes);
    if (prompt.empty()) throw std::runtime_error("the prompt is empty");
    Session session(options);
    session.prepare(static_cast<int>(std::min<std::size_t>(prompt.size() + options.bytes, INT32_MAX)));

    std::vector<float> logits;
    const auto keep_last = [&](std::size_t, std::span<const float> hidden) {
        const std::span<const float> row = session.logits(hidden.last(session.config().hidden));
        logits.assign(row.begin(), row.end());
    };
    const Clock::time_point start = Clock::now();
    session.feed(as_bytes(prompt), 0, keep_last);
    const double prompt_seconds = seconds_since(start);
    const std::vector<float> prompt_logits = logits;

    const json after_prompt = session.tiers();
    session.rest();
    const json at_rest = session.tiers();

    const Clock::time_point decode_start = Clock::now();
    std::string text;
    while (static_cast<int>(text.size()) < options.bytes) {
        const auto byte = static_cast<uint8_t>(argmax(logits));
        text.push_back(static_cast<char>(byte));
        if (!options.json) std::cout << text.back() << std::flush;
        session.feed({&byte, 1}, static_cast<int>(prompt.size() + text.size()) - 1, keep_last);
    }
    const double decode_seconds = seconds_since(decode_start);
    if (!options.json) std::cout << '\n';

    session.count_cache();
    json out;
    if (options.json) out = {{"text", text}, {"bytes", std::vector<int>(as_bytes(text).begin(), as_bytes(text).end())}};
    if (options.logits) out["prompt_logits"] = prompt_logits;
    out["prompt_tokens_per_second"] = static_cast<double>(prompt.size()) / prompt_seconds;
    out["decode_tokens_per_second"] = static_cast<double>(text.size()) / decode_seconds;
    if (options.turbo.device_percent > 0) {
        out["tiers"] = {{"after_the_prompt", after_prompt}, {"at_rest", at_rest}, {"at_the_end", session.tiers()}};
    }
    out.update(session.report());
    return out;
}

// Prints a "name: value" line for each value. Names in nested objects are joined with dots.
void print_lines(std::ostream& out, const json& object, const std::string& prefix) {
    for (const auto& [name, value] : object.items()) {
        if (value.is_object()) {
            print_lines(out, value, prefix + name + ".");
        } else if (value.is_number_float()) {
            char text[32];
            std::snprintf(text, sizeof text, "%.6g", value.get<double>());
            out << prefix << name << ": " << text << '\n';
        } else {
            out << prefix << name << ": " << (value.is_string() ? std::string(value) : value.dump()) << '\n';
        }
    }
}

void add_map_options(CLI::App* command, Options& o) {
    command->add_option("--low-heads", o.low_heads, "kv heads of each layer that get 2 bits, the rest 4")
        ->capture_default_str();
    command->add_option("--calibration-text", o.calibration_text, "what the ranking looks at; default MODEL/sample.txt");
}

void add_run_options(CLI::App* command, Options& o) {
    command->add_option("--model", o.model, "folder with config.json and model.safetensors")->required();
    command->add_option("--threads", o.threads)->check(CLI::Range(1, 256))->capture_default_str();
    command->add_flag("--json", o.json, "print one JSON object");
    command->add_option("--chunk", o.chunk, "bytes fed at once; 1: token by token; default 64, with --exact 512")
        ->check(CLI::Range(1, 65536));
    command->add_option("--profile", o.turbo.profile, "numeric settings of the library")
        ->check(CLI::IsMember({"accurate", "paper"}))
        ->capture_default_str();
}

void add_attention_options(CLI::App* command, Options& o) {
    auto* exact = command->add_flag("--exact", o.exact, "plain fp32 attention, the reference");
    auto* bits = command->add_option("--bits", o.turbo.bits, "bits of K and V in every head")
                     ->check(CLI::IsMember({8, 4, 2}))
                     ->capture_default_str()
                     ->excludes(exact);
    auto* map = command->add_option("--head-map", o.head_map,
                                    "bits head by head: a file, 'rank' (the library's ranking) or 'random:SEED'");
    map->excludes(exact)->excludes(bits);
    auto* k = command->add_option("--bits-k", o.bits_k, "bits of K in every head; default: --bits");
    auto* v = command->add_option("--bits-v", o.bits_v, "bits of V in every head; default: --bits");
    for (CLI::Option* option : {k, v}) option->check(CLI::IsMember({8, 4, 2}))->excludes(exact)->excludes(map);
    command
        ->add_option("--q-bits", o.turbo.q_bits, "bits of queries against K of 8 bits, in small steps; default: the profile's")
        ->check(CLI::IsMember({8, 15}))
        ->excludes(exact);
    command->add_flag("--gpu", o.turbo.gpu, "attention on the first GPU")->excludes(exact);
    command->add_flag("--complement", o.complement, "2 bits where the map has 4 and the reverse")->needs(map);
    add_map_options(command, o);
}

int run(int argc, char** argv) {
    CLI::App app{"A small byte-level language model on a compressed KV cache"};
    Options o;
    app.require_subcommand(1);
    auto* generate = app.add_subcommand("generate", "continue a text, always with the likeliest byte");
    auto* prompt = generate->add_option("--prompt", o.prompt, "the text");
    auto* prompt_file = generate->add_option("--prompt-file", o.prompt_file, "a file with the text")->excludes(prompt);
    generate->add_option("--bytes", o.bytes, "how many to add")->check(CLI::Range(0, 1 << 24))->capture_default_str();
    generate
        ->add_option(
            "--device-percent", o.turbo.device_percent,
            "of the context that the device tier holds; the rest is evicted to host memory and, between prompt and answer, "
            "goes to disk")
        ->check(CLI::Range(1, 100));
    generate->add_flag("--logits", o.logits, "report the 256 logits after the prompt");
    auto* eval = app.add_subcommand(
        "eval", "bits per byte of a text and KL to exact attention, in windows of 4096 bytes, each from an empty cache");
    eval->add_option("--text", o.text, "the text")->required();
    eval->add_option("--windows", o.windows, "only the first N windows")->check(CLI::Range(1, 1 << 24));
    auto* logits_file =
        eval->add_option("--exact-logits", o.exact_logits,
                         "a file that keeps what exact attention predicts: read, or written where there is none");
    eval->add_option(
            "--context", o.context,
            "bytes that attention has, a multiple of 128: where it is full, half of it is taken out behind the first 64, and "
            "the gap is closed")
        ->check(CLI::Range(256, kWindow) &
                CLI::Validator(
                    [](std::string& n) { return std::stoi(n) % 128 == 0 ? std::string() : n + " is no multiple of 128"; },
                    "MULTIPLE OF 128"))
        ->excludes(logits_file);
    auto* keep = eval->add_option("--keep-percent", o.turbo.keep_percent, "of the context that is kept; the rest is dropped")
                     ->check(CLI::Range(1, 100));
    eval->add_option("--eviction", o.turbo.eviction, "what is dropped first")
        ->check(CLI::IsMember({"lru", "attention"}))
        ->capture_default_str()
        ->needs(keep);
    eval->add_option("--half-life", o.turbo.half_life, "steps in which attention halves; default: the library's")
        ->check(CLI::Range(1, 1 << 24))
        ->needs(keep);
    auto* retrieval = app.add_subcommand("retrieval", "how many answers are found in long prompts");
    retrieval->add_option("--prompts", o.prompts, "JSON lines with prompt, answer and bucket")->required();
    retrieval->add_option("--limit", o.limit, "only the first N prompts")->check(CLI::Range(1, 1 << 24));
    auto* calibrate =
        app.add_subcommand("calibrate", "find the heads that bear few bits: what each changes in a text's predictions");
    calibrate->add_option("--text", o.text, "the text")->required();
    calibrate->add_option("--windows", o.windows, "only the first N windows")->check(CLI::Range(1, 1 << 24));
    calibrate->add_option("--save-head-map", o.save_head_map, "where the map is written")->required();
    calibrate->add_option("--save-costs", o.save_costs, "where the costs are written, for ta calibrate");
    calibrate
        ->add_option("--most-bits", o.most_bits,
                     "the most that K or V of a head gets; 8: heads are tried with 4 bits, too, which takes twice as long")
        ->check(CLI::IsMember({8, 4}))
        ->capture_default_str();
    add_map_options(calibrate, o);
    for (CLI::App* command : {generate, eval, retrieval, calibrate}) add_run_options(command, o);
    for (CLI::App* command : {generate, eval, retrieval}) add_attention_options(command, o);

    try {
        app.parse(argc, argv);
        if (*generate && !*prompt && !*prompt_file) throw CLI::RequiredError("--prompt or --prompt-file");
        if (o.context > 0 && o.chunk > 0 && 64 % o.chunk != 0)
            throw CLI::ValidationError("--context", "needs a --chunk that divides 64");
    } catch (const CLI::ParseError& e) {
        return app.exit(e);
    }
    const json report = *generate ? run_generate(o) : *eval ? run_eval(o) : *retrieval ? run_retrieval(o) : run_calibrate(o);
    if (o.json) {
        std::cout << report.dump(2, ' ', false, json::error_handler_t::replace) << '\n';
    } else {
        print_lines(*generate ? std::cerr : std::cout, report, "");  // stdout of generate is only the text
    }
    return std::cout.flush() ? 0 : 1;
}

}  // namespace
}  // namespace tinylm

int main(int argc, char** argv) {
    try {
        return tinylm::run(argc, argv);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "tinylm: %s\n", e.what());
        return 1;
    }
}
