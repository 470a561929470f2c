#include "tools/ta/inspect.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "src/page/block_channels.h"
#include "tools/ta/stored_file.h"

namespace ta::tools {
namespace {

// Settings of the pool that a file shows only through its fingerprint.
struct Settings {
    uint32_t head_dim, v_head_dim;
    std::string text;
};

// Tries the most common settings of pools until one has the file's fingerprint; then shape, bits and profile are certain.
class Search {
  public:
    explicit Search(const StoredFile& file) : file_(file) {
        ta_context* context = nullptr;
        auto one_thread = sized<ta_context_options>();
        one_thread.threads = 1;
        TA_CHECK(ta_context_create(&one_thread, &context, &error));
        context_.reset(context);
    }

    // Nothing: the pool has other settings.
    std::optional<Settings> find() const {
        // The file shows the channels of blocks. The pool's K and V may have fewer.
        const uint32_t most = file_.shape.head_dim;
        std::vector<uint32_t> fitting;
        for (uint32_t d = most; d >= 16; d -= 8) fitting.push_back(d);
        const auto try_all = [&](auto&& is_tried) -> std::optional<Settings> {
            for (const uint32_t k : fitting) {
                for (const uint32_t v : fitting) {
                    if (block_channels(std::max(k, v)) != most || !is_tried(k, v)) continue;
                    const std::string text = settings_of(k, v);
                    if (!text.empty()) return Settings{k, v, text};
                }
            }
            return {};
        };
        std::optional<Settings> found = try_all([](uint32_t k, uint32_t v) { return k == v; });
        if (!found) found = try_all([](uint32_t k, uint32_t v) { return k != v; });
        return found;
    }

  private:
    std::string settings_of(uint32_t head_dim, uint32_t v_head_dim) const {
        for (const ta_profile profile : {TA_PROFILE_ACCURATE, TA_PROFILE_PAPER}) {
            for (const uint32_t bits : {4u, 8u, 2u}) {
                for (const bool falls : {false, true}) {
                    if (!may_have(bits, falls) ||
                        fingerprint_of(head_dim, v_head_dim, profile, bits, falls) != file_.fingerprint)
                        continue;
                    return std::to_string(bits) + " bits, profile " + (profile == TA_PROFILE_PAPER ? "paper" : "accurate") +
                           (falls ? ", falling precision" : "");
                }
            }
        }
        return "";
    }

    // Whether channel blocks of such a pool can have pages of the file's sizes.
    bool may_have(uint32_t bits, bool falls) const {
        const std::vector<uint64_t>& pages = file_.shape.pages;
        if (falls && bits == 2) return false;
        if (pages.empty()) return true;
        if (!std::ranges::all_of(pages, [&](uint64_t page) { return page == pages.front(); })) return false;
        if (bits == 8) return falls;
        return pages.front() == file_.shape.kv_heads * ChannelLayout(int(file_.shape.head_dim), int(bits), int(bits)).bytes();
    }

    // Nothing: the library makes no such pool.
    std::optional<uint64_t> fingerprint_of(uint32_t head_dim, uint32_t v_head_dim, ta_profile profile, uint32_t bits,
                                           bool falls) const {
        auto options = sized<ta_kv_pool_options>();
        auto numerics = sized<ta_numerics>();
        auto tiers = sized<ta_tier_options>();
        numerics.profile = profile;
        options.layers = file_.shape.layers;
        options.kv_heads = file_.shape.kv_heads;
        options.head_dim = head_dim;
        options.v_head_dim = v_head_dim;
        options.bits = bits;
        options.budget_bytes = std::max<uint64_t>(4 * file_.slot_bytes[0], 1 << 20);
        options.numerics = &numerics;
        if (falls) {
            tiers.host_bytes = options.budget_bytes;
            tiers.falling_precision = TA_ON;
            options.tiers = &tiers;
        }
        ta_kv_pool* made = nullptr;
        if (ta_kv_pool_create(context_.get(), &options, &made, &error) != TA_OK) return {};
        const std::unique_ptr<ta_kv_pool, decltype(&ta_kv_pool_destroy)> pool(made, ta_kv_pool_destroy);
        auto about = sized<ta_kv_pool_description>();
        TA_CHECK(ta_kv_pool_describe(made, &about, &error));
        return about.fingerprint;
    }

    const StoredFile& file_;
    std::unique_ptr<ta_context, decltype(&ta_context_destroy)> context_{nullptr, ta_context_destroy};
};

Json json_of(const Damage& d) {
    Json j = {{"what", d.what}};
    if (d.block >= 0) j["block"] = d.block;
    if (d.layer >= 0) j["layer"] = d.layer;
    if (d.offset >= 0) j["offset"] = d.offset;
    return j;
}

std::string text_of(const Json& d) {
    std::string text;
    if (d.contains("block")) text += "block " + d["block"].dump();
    if (d.contains("layer")) text += ", layer " + d["layer"].dump();
    if (!text.empty()) text += ": ";
    text += d["what"].get<std::string>();
    if (d.contains("offset")) text += " (byte " + d["offset"].dump() + ")";
    return text;
}

std::string space_text(uint64_t space) {
    return space == 0 ? "none" : space == UINT64_MAX ? "one that had ended" : hex_text(space);
}

}  // namespace

Json inspect(const std::string& path, bool blocks) {
    const StoredFile file(path);
    const StoredShape& s = file.shape;
    Json j = {{"file", path},
              {"kind", name_of(file.kind)},
              {"version", file.version},
              {"bytes", file.bytes},
              {"fingerprint", hex_text(file.fingerprint)}};
    if (s.kv_heads > 0) {
        const std::optional<Settings> settings = Search(file).find();
        j["shape"] = {{"layers", s.layers}, {"kv_heads", s.kv_heads}, {"head_dim", settings ? settings->head_dim : s.head_dim}};
        if (settings && settings->v_head_dim != settings->head_dim) j["shape"]["v_head_dim"] = settings->v_head_dim;
        if (settings) j["settings"] = settings->text;
    }
    std::map<uint64_t, uint64_t> sizes;
    for (const uint64_t page : s.pages) ++sizes[page];
    if (!s.pages.empty()) {
        j["channel_page_bytes"] = s.pages;
        uint64_t sum = 0;
        for (const uint64_t page : s.pages) sum += page;
        if (s.kv_heads > 0)
            j["channel_bits_per_value"] = 8.0 * double(sum) / (2.0 * kPageTokens * s.layers * s.kv_heads * s.head_dim);
    }
    Json kinds = Json::array();
    for (int k = 0; k < kPageKinds; ++k) {
        uint64_t full = 0, open = 0;
        for (const StoredBlock& b : file.blocks) {
            if (int(b.kind) == k) (b.tokens < uint32_t(kPageTokens) ? open : full) += 1;
        }
        if (full + open > 0)
            kinds.push_back(
                {{"kind", name_of(PageKind(k))}, {"full", full}, {"open", open}, {"block_bytes", file.slot_bytes[k]}});
    }
    j["blocks"] = file.blocks.size();
    j["block_kinds"] = std::move(kinds);
    j["published"] = file.published;
    if (file.kind == FileKind::kDisk) {
        j["room_blocks"] = file.room;
        j["opened"] = file.opened;
        j["state"] = file.state;
    }
    Json sequences = Json::array();
    for (const StoredSequence& q : file.sequences) {
        Json one;
        if (file.kind == FileKind::kPool) one["id"] = hex_text(q.id);
        one["tokens"] = q.tokens;
        one["blocks"] = q.blocks.size();
        one["namespace"] = space_text(q.space);
        sequences.push_back(std::move(one));
    }
    if (file.kind != FileKind::kDisk) j["sequences"] = std::move(sequences);
    j["damage"] = Json::array();
    for (const Damage& d : file.damage) j["damage"].push_back(json_of(d));
    if (blocks) {
        Json list = Json::array();
        for (size_t i = 0; i < file.blocks.size(); ++i) {
            const StoredBlock& b = file.blocks[i];
            list.push_back({{"block", i},
                            {"index", b.index},
                            {"kind", int(b.kind) < kPageKinds ? name_of(b.kind) : "?"},
                            {"tokens", b.tokens},
                            {"bytes", b.bytes},
                            {"offset", b.offset},
                            {"content_id", b.content_id},
                            {"hash", hex_text(b.hash)}});
        }
        j["block_list"] = std::move(list);
    }
    return j;
}

void print_inspection(const Json& file, uint64_t most_blocks) {
    const auto line = [](std::string label, const std::string& text) {
        label.resize(13, ' ');
        print_wrapped(label, text);
    };
    const std::string kind = file["kind"];
    std::printf("%s: file of a %s, version %u, %s\n", file["file"].get<std::string>().c_str(), kind.c_str(),
                file["version"].get<unsigned>(), bytes_text(file["bytes"]).c_str());
    if (file.contains("shape")) {
        const Json& s = file["shape"];
        const std::string v = s.contains("v_head_dim") ? ", V of " + s["v_head_dim"].dump() : std::string();
        line("shape", s["layers"].dump() + " layers, " + s["kv_heads"].dump() +
                          (file.contains("settings") ? " kv heads of " : " kv heads in blocks of ") + s["head_dim"].dump() + v);
    } else {
        line("shape", "unknown: no block has a readable trailer");
    }
    line("settings", file.value("settings", std::string("not those of a profile with one number of bits for all heads")));
    if (file.contains("channel_bits_per_value")) {
        char text[64];
        std::snprintf(text, sizeof text, "%.2f a value in channel blocks, scales included",
                      file["channel_bits_per_value"].get<double>());
        line("bits", text);
    }
    line("fingerprint", file["fingerprint"]);
    std::string blocks = file["blocks"].dump();
    for (const Json& k : file["block_kinds"]) {
        blocks += (&k == &file["block_kinds"].front() ? ": " : ", ") +
                  std::to_string(k["full"].get<uint64_t>() + k["open"].get<uint64_t>()) + " " + k["kind"].get<std::string>() +
                  " of " + bytes_text(k["block_bytes"]);
        if (k["open"] != 0) blocks += " (" + k["open"].dump() + " open)";
    }
    line("blocks", blocks);
    if (file["published"] != 0) line("published", file["published"].dump() + " blocks");
    if (kind == "disk tier")
        line("state", file["state"].get<std::string>() + "; opened " + file["opened"].dump() + " times; room for " +
                          file["room_blocks"].dump() + " blocks");
    if (kind == "sequence") {
        line("tokens", file["sequences"][0]["tokens"].dump());
        line("namespace", file["sequences"][0]["namespace"]);
    }
    for (const Json& d : file["damage"]) line("damaged", text_of(d));
    if (kind == "pool" && !file["sequences"].empty()) {
        std::printf("\n");
        const std::vector<Json> rows(file["sequences"].begin(), file["sequences"].end());
        print_table(rows, {{"id", "sequence"}, {"tokens", "tokens"}, {"blocks", "blocks"}, {"namespace", "namespace"}});
    }
    if (!file.contains("block_list") || file["block_list"].empty()) return;
    std::vector<Json> rows(file["block_list"].begin(), file["block_list"].end());
    const size_t all = rows.size();
    if (rows.size() > most_blocks) rows.resize(most_blocks);
    std::printf("\n");
    print_table(rows, {{"block", "block"},
                       {"index", "index"},
                       {"kind", "kind"},
                       {"tokens", "tokens"},
                       {"bytes", "size", true},
                       {"offset", "at byte"},
                       {"content_id", "content id"},
                       {"hash", "XXH3 of the block"}});
    if (rows.size() < all) std::printf("... and %zu more; --all lists them\n", all - rows.size());
}

Json verify(const std::string& path) {
    StoredFile file(path);
    Progress progress;
    const std::vector<Damage> found = file.verify([&](uint64_t done, uint64_t total) {
        progress.show(std::to_string(done) + " of " + std::to_string(total) + " blocks");
    });
    progress.clear();
    Json j = {{"file", path},
              {"kind", name_of(file.kind)},
              {"bytes", file.bytes},
              {"blocks", file.blocks.size()},
              {"pages", file.pages_checked},
              {"good", found.empty()},
              {"damage", Json::array()}};
    for (const Damage& d : found) j["damage"].push_back(json_of(d));
    return j;
}

void print_verification(const Json& result) {
    const std::string path = result["file"];
    for (const Json& d : result["damage"]) std::printf("%s: %s\n", path.c_str(), text_of(d).c_str());
    const std::string what = "file of a " + result["kind"].get<std::string>() + ", " + result["blocks"].dump() + " blocks, " +
                             result["pages"].dump() + " full pages, " + bytes_text(result["bytes"]);
    std::printf("%s: %s: %s\n", path.c_str(), what.c_str(), result["good"] == true ? "every hash matches" : "DAMAGED");
}

}  // namespace ta::tools
