#define XXH_INLINE_ALL
#include "tools/ta/stored_file.h"

#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <set>

#include "kernels/format/slot.h"

namespace ta::tools {
namespace {

constexpr uint32_t kSequenceMagic = 0x51455354, kPoolMagic = 0x4C4F5054, kBlockMagic = 0x4B4C4254;
constexpr uint32_t kDiskMagic = 0x46444154, kUnfinishedMagic = 0x4e444154, kRecordMagic = 0x52444154;
constexpr unsigned kFileVersion = 3, kDiskVersion = 1;
constexpr uint64_t kDiskPage = 4096;

// As in docs/FORMAT.md, sections 8 and 9; the structs of the disk tier are in tiering/disk/format.h.
struct SequenceHeader {
    uint32_t magic;
    uint16_t version, reserved0;
    uint64_t fingerprint;
    int64_t length;
    uint64_t blocks, reserved1, slot_bytes[2], index_hash, space, hash;
};
static_assert(sizeof(SequenceHeader) == 80);
struct PoolHeader {
    uint32_t magic;
    uint16_t version, reserved0;
    uint64_t fingerprint, sequences, references, entries, reserved1, blocks, slot_bytes[2], index_bytes, index_hash, hash;
};
static_assert(sizeof(PoolHeader) == 96);
struct IndexRecord {
    uint64_t content_id, hash, index;
    uint32_t tokens;
    uint8_t kind, reserved[3];
};
static_assert(sizeof(IndexRecord) == 32);
struct SequenceRecord {
    uint64_t id;
    int64_t length;
    uint64_t reserved, space;
};
struct EntryRecord {
    uint8_t key[32];
    uint64_t index, block, reserved;
};
struct BlockHeader {
    uint32_t magic;
    uint8_t kind, reserved0[3];
    uint32_t tokens, reserved1;
    uint64_t index, content_id, slot_hash, hash;
};
static_assert(sizeof(BlockHeader) == 48);
struct Superblock {
    uint32_t magic;
    uint16_t version, reserved0;
    uint64_t fingerprint, file[2], opens, regions, region_bytes, slot_bytes[3], boot, state, unread_before, hash;
    uint64_t passed_slot_bytes[2];
};
static_assert(sizeof(Superblock) == 128);
struct RecordHeader {
    uint32_t magic;
    uint16_t version;
    uint8_t slot_class, reserved0;
    uint64_t fingerprint, file[2], offset, generation, slot_bytes, payload_hash, block_index, content_id;
    uint32_t tokens, reserved1;
    uint8_t key[32];
    uint64_t more_keys, reserved2, hash;
};
static_assert(sizeof(RecordHeader) == 144);

uint64_t hash_of(const void* data, size_t bytes) {
    return XXH3_64bits(data, bytes);
}

template <class Header>
bool is_whole(const Header& h) {
    return h.hash == hash_of(&h, offsetof(Header, hash));
}

// Reads the header of a page. True if its hash matches: it covers the whole page, with the hash itself taken as 0.
template <class Header>
bool is_whole_page(std::span<const uint8_t> page, Header& h) {
    std::memcpy(&h, page.data(), sizeof h);
    std::vector<uint8_t> copy(page.begin(), page.end());
    std::memset(copy.data() + offsetof(Header, hash), 0, sizeof h.hash);
    return h.hash == hash_of(copy.data(), copy.size());
}

constexpr uint64_t round_up(uint64_t n, uint64_t to) {
    return (n + to - 1) / to * to;
}

constexpr uint64_t record_stride(uint64_t slot_bytes) {
    return slot_bytes == 0 ? 0 : kDiskPage + round_up(slot_bytes, kDiskPage);
}

// Finds the trailer of a slot that must have this kind and fingerprint. Payloads end on multiples of 128, and nothing else at
// such a place has the magic number and the pool's fingerprint behind it.
std::optional<uint64_t> find_trailer(std::span<const uint8_t> slot, PageKind kind, uint64_t fingerprint) {
    for (uint64_t at = slot.size() / kPieceAlignment * kPieceAlignment; at >= kPieceAlignment;) {
        at -= kPieceAlignment;
        SlotTrailer t;
        if (at + sizeof t > slot.size()) continue;
        std::memcpy(&t, slot.data() + at, sizeof t);
        if (t.magic != kSlotMagic || t.version != kFormatVersion || t.kind != uint8_t(kind) || t.fingerprint != fingerprint)
            continue;
        if (t.layers >= 1 && t.layers <= 4096 && t.layers * sizeof(uint64_t) <= slot.size() - at - sizeof t) return at;
    }
    return std::nullopt;
}

uint64_t identity_hash(const SlotTrailer& t, uint32_t layer, uint64_t page_bytes, uint64_t payload_hash) {
    struct {
        PageIdentity id{};
        uint64_t payload_hash = 0;
    } bound;
    bound.id.fingerprint = t.fingerprint;
    bound.id.block_index = t.block_index;
    bound.id.content_id = t.content_id;
    bound.id.layer = layer;
    bound.id.tokens = t.tokens;
    bound.id.magic = t.magic;
    bound.id.version = t.version;
    bound.id.kind = t.kind;
    bound.id.payload_bytes = page_bytes;
    bound.payload_hash = payload_hash;
    return hash_of(&bound, sizeof bound);
}

}  // namespace

const char* name_of(FileKind kind) {
    return kind == FileKind::kSequence ? "sequence" : kind == FileKind::kPool ? "pool" : "disk tier";
}
const char* name_of(PageKind kind) {
    static const char* const kNames[kPageKinds] = {"token", "channel", "low", "passed token", "passed channel"};
    return kNames[size_t(kind)];
}

StoredFile::StoredFile(const std::string& path) : path_(path) {
    // Pipes and devices could block for ever, or never end.
    struct stat st;
    if (::stat(path.c_str(), &st) != 0) throw WrongInput(path + ": " + std::strerror(errno));
    if (!S_ISREG(st.st_mode)) throw WrongInput(path + ": no regular file");
    in_.open(path, std::ios::binary);
    if (!in_) throw WrongInput(path + ": " + std::strerror(errno));
    bytes = uint64_t(st.st_size);
    uint32_t magic = 0;
    if (bytes >= sizeof magic) read(0, &magic, sizeof magic);
    // A disk tier has two superblocks, either of which may be damaged.
    uint32_t second = 0;
    if (bytes >= 2 * kDiskPage) read(kDiskPage, &second, sizeof second);
    if (magic == kUnfinishedMagic) throw WrongInput(path + ": the file of a disk tier that was never completed");
    if (magic == kSequenceMagic) {
        kind = FileKind::kSequence;
        open_sequence();
    } else if (magic == kPoolMagic) {
        kind = FileKind::kPool;
        open_pool();
    } else if (magic == kDiskMagic || second == kDiskMagic) {
        kind = FileKind::kDisk;
        open_disk();
    } else {
        throw WrongInput(path + ": no file of a sequence, a pool or a disk tier");
    }
    find_shape();
}

void StoredFile::read(uint64_t offset, void* to, uint64_t n) {
    in_.clear();
    in_.seekg(std::streamoff(offset));
    in_.read(static_cast<char*>(to), std::streamsize(n));
    if (!in_) throw WrongInput(path_ + ": cannot read " + std::to_string(n) + " bytes at " + std::to_string(offset));
}

void StoredFile::open_sequence() {
    SequenceHeader h;
    if (bytes < sizeof h) throw WrongInput(path_ + ": cut off in the header");
    read(0, &h, sizeof h);
    version = h.version;
    if (version != kFileVersion)
        throw WrongInput(path_ + ": version " + std::to_string(version) + ", this program reads version 3");
    if (!is_whole(h)) damage.push_back({"the header does not match its hash", -1, -1, 0});
    if (h.blocks > (bytes - sizeof h) / sizeof(IndexRecord))
        throw WrongInput(path_ + ": the header is damaged, or the file cut off");
    fingerprint = h.fingerprint;
    slot_bytes[0] = h.slot_bytes[0];
    slot_bytes[1] = h.slot_bytes[1];
    std::vector<IndexRecord> index(h.blocks);
    const uint64_t index_bytes = index.size() * sizeof(IndexRecord);
    read(sizeof h, index.data(), index_bytes);
    if (hash_of(index.data(), index_bytes) != h.index_hash)
        damage.push_back({"the index does not match its hash", -1, -1, sizeof h});
    StoredSequence s{0, h.length, h.space, {}};
    for (const IndexRecord& r : index) {
        s.blocks.push_back(blocks.size());
        blocks.push_back({r.index, r.tokens, PageKind(std::min<int>(r.kind, kPageKinds)), r.content_id, r.hash, 0, 0});
    }
    if (h.length < 0 || (uint64_t(h.length) + kPageTokens - 1) / kPageTokens != h.blocks)
        damage.push_back(
            {"the header says " + std::to_string(h.length) + " tokens in " + std::to_string(h.blocks) + " blocks", -1, -1, 16});
    sequences.push_back(std::move(s));
    place_blocks(sizeof h + index_bytes);
}

void StoredFile::open_pool() {
    PoolHeader h;
    if (bytes < sizeof h) throw WrongInput(path_ + ": cut off in the header");
    read(0, &h, sizeof h);
    version = h.version;
    if (version != kFileVersion)
        throw WrongInput(path_ + ": version " + std::to_string(version) + ", this program reads version 3");
    if (!is_whole(h)) damage.push_back({"the header does not match its hash", -1, -1, 0});
    const uint64_t rest = bytes - sizeof h;
    const auto fits = [&](uint64_t n, uint64_t size) { return n <= rest / size; };
    if (h.index_bytes > rest || !fits(h.blocks, sizeof(IndexRecord)) || !fits(h.sequences, sizeof(SequenceRecord)) ||
        !fits(h.references, sizeof(uint64_t)) || !fits(h.entries, sizeof(EntryRecord)) ||
        h.blocks * sizeof(IndexRecord) + h.sequences * sizeof(SequenceRecord) + h.references * sizeof(uint64_t) +
                h.entries * sizeof(EntryRecord) !=
            h.index_bytes)
        throw WrongInput(path_ + ": the header is damaged, or the file cut off");
    fingerprint = h.fingerprint;
    slot_bytes[0] = h.slot_bytes[0];
    slot_bytes[1] = h.slot_bytes[1];
    published = h.entries;
    std::vector<uint8_t> index(h.index_bytes);
    read(sizeof h, index.data(), index.size());
    if (hash_of(index.data(), index.size()) != h.index_hash)
        damage.push_back({"the index does not match its hash", -1, -1, sizeof h});
    const uint8_t* at = index.data();
    const auto take = [&](auto& value) {
        std::memcpy(&value, at, sizeof value);
        at += sizeof value;
    };
    for (uint64_t i = 0; i < h.blocks; ++i) {
        IndexRecord r;
        take(r);
        blocks.push_back({r.index, r.tokens, PageKind(std::min<int>(r.kind, kPageKinds)), r.content_id, r.hash, 0, 0});
    }
    uint64_t left = h.references;
    for (uint64_t i = 0; i < h.sequences; ++i) {
        SequenceRecord r;
        take(r);
        sequences.push_back({r.id, r.length, r.space, {}});
    }
    for (StoredSequence& s : sequences) {
        const uint64_t n = s.tokens < 0 ? UINT64_MAX : (uint64_t(s.tokens) + kPageTokens - 1) / kPageTokens;
        if (n > left) {
            damage.push_back({"the index says more blocks of a sequence than it has", -1, -1, sizeof h});
            break;
        }
        left -= n;
        for (uint64_t i = 0; i < n; ++i) {
            uint64_t number;
            take(number);
            s.blocks.push_back(number);
            if (number >= blocks.size())
                damage.push_back(
                    {"the index names block " + std::to_string(number) + ", which is not there", -1, -1, sizeof h});
        }
    }
    place_blocks(sizeof h + h.index_bytes);
}

// Finds the next block's header, or the end of the file, and returns its offset. Returns `offset` if neither is found.
uint64_t StoredFile::find_next_block(uint64_t offset) {
    const uint64_t most = std::max(slot_bytes[0], slot_bytes[1]);
    for (uint64_t n = kPieceAlignment; n < most && offset + n <= bytes; n += kPieceAlignment) {
        if (offset + n == bytes) return bytes;
        BlockHeader h;
        if (bytes - offset - n < sizeof h) break;
        read(offset + n, &h, sizeof h);
        if (h.magic == kBlockMagic && is_whole(h)) return offset + n;
    }
    return offset;
}

// Finds the blocks: slots follow one another, each behind a header that repeats its index entry.
void StoredFile::place_blocks(uint64_t offset) {
    for (uint64_t i = 0; i < blocks.size(); ++i) {
        StoredBlock& b = blocks[i];
        if (int(b.kind) >= kPageKinds) {
            damage.push_back({"the index says a kind that no block has, so no later block is found", int64_t(i), -1, -1});
            return;
        }
        BlockHeader h;
        if (offset > bytes || bytes - offset < sizeof h) {
            damage.push_back({"cut off here", int64_t(i), -1, int64_t(bytes)});
            return;
        }
        read(offset, &h, sizeof h);
        if (h.magic != kBlockMagic || !is_whole(h) || h.kind != uint8_t(b.kind) || h.tokens != b.tokens || h.index != b.index ||
            h.content_id != b.content_id || h.slot_hash != b.hash)
            damage.push_back({"the block's header is not what the index says", int64_t(i), -1, int64_t(offset)});
        offset += sizeof h;
        uint64_t& size = slot_bytes[int(b.kind)];
        // The file's header does not state the sizes of these kinds. They follow from where the next block begins.
        if (size == 0 && b.kind >= PageKind::kLow) size = find_next_block(offset) - offset;
        if (size == 0 || size > bytes - offset) {
            damage.push_back({size == 0 ? "no size is known, so no later block is found" : "cut off here", int64_t(i), -1,
                              int64_t(size == 0 ? offset : bytes)});
            return;
        }
        b.offset = offset;
        b.bytes = size;
        offset += size;
    }
    if (offset != bytes)
        damage.push_back({std::to_string(bytes - offset) + " bytes behind the last block", -1, -1, int64_t(offset)});
}

void StoredFile::open_disk() {
    std::optional<Superblock> present;
    for (const uint64_t offset : {uint64_t{0}, kDiskPage}) {
        std::vector<uint8_t> page(kDiskPage);
        if (bytes < offset + kDiskPage) throw WrongInput(path_ + ": cut off in the superblocks");
        read(offset, page.data(), page.size());
        Superblock s;
        // The second superblock is not written until the file is opened again.
        if (std::ranges::all_of(page, [](uint8_t b) { return b == 0; })) continue;
        if (s.magic = 0; !is_whole_page(page, s) || s.magic != kDiskMagic) {
            damage.push_back({"a superblock does not match its hash", -1, -1, int64_t(offset)});
            continue;
        }
        if (s.version != kDiskVersion)
            throw WrongInput(path_ + ": version " + std::to_string(s.version) + ", this program reads version 1");
        if (!present || s.opens > present->opens) present = s;
    }
    if (!present) throw WrongInput(path_ + ": both superblocks are damaged");
    const Superblock& s = *present;
    version = s.version;
    fingerprint = s.fingerprint;
    opened = s.opens;
    state = s.state == 0 ? "open, or its process was killed" : s.state == 1 ? "closed" : "a sync had failed";
    std::copy(std::begin(s.slot_bytes), std::end(s.slot_bytes), slot_bytes);
    std::copy(std::begin(s.passed_slot_bytes), std::end(s.passed_slot_bytes), slot_bytes + std::size(s.slot_bytes));
    const uint64_t first = 2 * kDiskPage;
    if (s.region_bytes == 0 || s.regions > (bytes - first) / s.region_bytes)
        throw WrongInput(path_ + ": cut off, or its superblock is of another file");
    for (const uint64_t size : slot_bytes) {
        const uint64_t stride = record_stride(std::min(size, bytes));
        if (stride > 0) room = std::max(room, s.regions * std::min<uint64_t>(64, s.region_bytes / stride));
    }
    std::vector<uint8_t> page(kDiskPage);
    for (uint64_t region = 0; region < s.regions; ++region) {
        // A region holds records of one kind. Bytes that look like headers at the places of another kind are content.
        std::vector<StoredBlock> best;
        std::vector<Damage> wrong;
        for (int c = 0; c < kPageKinds; ++c) {
            const uint64_t stride = record_stride(std::min(slot_bytes[c], bytes));
            if (stride == 0 || stride > s.region_bytes) continue;
            std::vector<StoredBlock> found;
            std::vector<Damage> suspects;
            for (uint64_t i = 0; i < std::min<uint64_t>(64, s.region_bytes / stride); ++i) {
                const uint64_t offset = first + region * s.region_bytes + i * stride;
                read(offset, page.data(), page.size());
                RecordHeader h;
                const bool whole = is_whole_page(page, h);
                const bool ours = std::equal(h.file, h.file + 2, s.file);
                if (whole && h.magic == kRecordMagic && h.slot_class == c && h.offset == offset && ours &&
                    h.fingerprint == fingerprint && h.slot_bytes == slot_bytes[c]) {
                    found.push_back({h.block_index, h.tokens, PageKind(c), h.content_id, h.payload_hash, offset + kDiskPage,
                                     slot_bytes[c]});
                    published += std::ranges::any_of(h.key, [](uint8_t b) { return b != 0; });
                } else if (h.magic == kRecordMagic && ours) {
                    suspects.push_back(
                        {whole ? "a record's header is of another place" : "a record's header does not match its hash", -1, -1,
                         int64_t(offset)});
                }
            }
            if (found.size() > best.size() || (best.empty() && suspects.size() > wrong.size())) {
                best = std::move(found);
                wrong = std::move(suspects);
            }
        }
        blocks.insert(blocks.end(), best.begin(), best.end());
        damage.insert(damage.end(), wrong.begin(), wrong.end());
    }
}

std::vector<uint8_t> StoredFile::slot_of(const StoredBlock& block) {
    std::vector<uint8_t> slot(block.bytes);
    read(block.offset, slot.data(), slot.size());
    return slot;
}

void StoredFile::find_shape() {
    bool learned = false, learned_tokens = false;
    for (const StoredBlock& b : blocks) {
        const bool is_new = b.kind == PageKind::kChannel ? !learned : b.kind == PageKind::kToken && !learned_tokens;
        if (b.offset == 0 || (shape.kv_heads > 0 && !is_new)) continue;
        const std::vector<uint8_t> slot = slot_of(b);
        const auto at = find_trailer(slot, b.kind, fingerprint);
        if (!at) continue;
        SlotTrailer t;
        std::memcpy(&t, slot.data() + *at, sizeof t);
        if (*at % t.layers != 0 && b.kind != PageKind::kChannel) continue;
        if (shape.layers == 0) shape.layers = t.layers;
        if (t.layers != shape.layers) continue;
        // If layers have several shapes, their pages have several sizes.
        if (b.kind == PageKind::kToken && !learned_tokens && b.tokens == uint32_t(kPageTokens) &&
            hash_of(slot.data(), slot.size()) == b.hash) {
            learned_tokens = true;
            std::vector<uint64_t> pages = learn_pages(slot, *at);
            if (std::adjacent_find(pages.begin(), pages.end(), std::not_equal_to<>()) != pages.end()) {
                shape.token_pages = std::move(pages);
                shape.kv_heads = shape.head_dim = 0;
            }
        }
        if (b.kind != PageKind::kChannel && shape.kv_heads == 0 && shape.token_pages.empty()) {
            for (const int d : {128, 64, 96, 256}) {
                const uint64_t piece = b.kind == PageKind::kToken ? TokenLayout(d).bytes() : ChannelLayout(d, 2, 2).bytes();
                if (*at / t.layers % piece != 0) continue;
                const uint64_t heads = *at / t.layers / piece;
                // Other dimensions fit only with 17 heads or more.
                const uint64_t own = uint64_t(t.layers) * heads * 2 * kPageTokens * sizeof(float);
                const uint64_t plain = ta::slot_bytes(*at, t.layers);
                if (b.bytes != plain && (b.kind != PageKind::kToken || b.bytes != plain + own)) continue;
                shape.kv_heads = uint32_t(heads);
                shape.head_dim = uint32_t(d);
                shape.own_scales = b.bytes != plain;
                break;
            }
        }
        if (b.kind == PageKind::kChannel && !learned && hash_of(slot.data(), slot.size()) == b.hash) {
            shape.pages = learn_pages(slot, *at);
            learned = !shape.pages.empty();
        }
    }
}

// Finds the sizes of pages, which no file states and which differ if heads have 4 and 2 bits or layers have several shapes. A
// page ends where its hash matches. Empty: unknown.
std::vector<uint64_t> StoredFile::learn_pages(std::span<const uint8_t> slot, uint64_t trailer) {
    SlotTrailer t;
    std::memcpy(&t, slot.data() + trailer, sizeof t);
    if (t.tokens != uint32_t(kPageTokens)) return {};
    std::vector<uint64_t> hashes(t.layers);
    std::memcpy(hashes.data(), slot.data() + trailer + sizeof t, hashes.size() * sizeof(uint64_t));
    std::vector<uint64_t> pages;
    uint64_t at = 0;
    for (uint32_t layer = 0; layer < t.layers; ++layer) {
        XXH3_state_t page_state;
        XXH3_64bits_reset(&page_state);
        uint64_t n = 0;
        bool found = false;
        while (!found && at + n + kPieceAlignment <= trailer) {
            XXH3_64bits_update(&page_state, slot.data() + at + n, kPieceAlignment);
            n += kPieceAlignment;
            // No page is smaller than a head of 64 channels at 2 bits.
            found = n >= ChannelLayout(64, 2, 2).bytes() &&
                    identity_hash(t, layer, n, XXH3_64bits_digest(&page_state)) == hashes[layer];
        }
        if (!found) return {};
        pages.push_back(n);
        at += n;
    }
    return at == trailer ? pages : std::vector<uint64_t>();
}

// The bytes of a layer's page; 0: unknown.
uint64_t StoredFile::page_bytes(PageKind of, uint32_t layer) const {
    if (is_passed(of)) return 0;
    if (of == PageKind::kChannel) return shape.pages.empty() ? 0 : shape.pages[layer];
    if (of == PageKind::kToken && !shape.token_pages.empty()) return shape.token_pages[layer];
    if (shape.kv_heads == 0) return 0;
    const int d = int(shape.head_dim);
    return shape.kv_heads * (of == PageKind::kToken ? TokenLayout(d).bytes() : ChannelLayout(d, 2, 2).bytes());
}

void StoredFile::check_slot(uint64_t number, std::span<const uint8_t> slot, std::vector<Damage>& found) {
    const StoredBlock& b = blocks[number];
    const bool whole = hash_of(slot.data(), slot.size()) == b.hash;
    const auto add = [&](const char* what, int64_t layer, uint64_t offset) {
        found.push_back({what, int64_t(number), layer, int64_t(b.offset + offset)});
    };
    const size_t before = found.size();
    // Pages lie where the shape says, even if the trailer is damaged.
    uint64_t trailer = 0;
    for (uint32_t layer = 0; layer < shape.layers; ++layer) trailer += page_bytes(b.kind, layer);
    const bool known =
        shape.layers > 0 && page_bytes(b.kind, 0) > 0 && trailer + sizeof(SlotTrailer) + 8 * shape.layers <= slot.size();
    if (known) {
        SlotTrailer t;
        std::memcpy(&t, slot.data() + trailer, sizeof t);
        if (t.magic != kSlotMagic || t.version != kFormatVersion || t.kind != uint8_t(b.kind) || t.fingerprint != fingerprint ||
            t.block_index != b.index || t.content_id != b.content_id || t.tokens != b.tokens || t.layers != shape.layers) {
            add("the trailer names another block", -1, trailer);
            t.magic = kSlotMagic, t.version = kFormatVersion, t.kind = uint8_t(b.kind), t.fingerprint = fingerprint;
            t.block_index = b.index, t.content_id = b.content_id, t.tokens = b.tokens, t.layers = shape.layers;
        }
        uint64_t at = 0;
        for (uint32_t layer = 0; layer < shape.layers && b.tokens == uint32_t(kPageTokens); ++layer) {
            const uint64_t n = page_bytes(b.kind, layer);
            uint64_t hash = identity_hash(t, layer, n, hash_of(slot.data() + at, n)), expected;
            std::memcpy(&expected, slot.data() + trailer + sizeof t + layer * sizeof expected, sizeof expected);
            if (b.kind == PageKind::kToken && shape.own_scales && layer + 1 == shape.layers) {
                const uint64_t own = ta::slot_bytes(trailer, shape.layers);
                hash ^= hash_of(slot.data() + own, slot.size() - own);
            }
            if (hash != expected) add("the page does not match its hash", layer, at);
            ++pages_checked;
            at += n;
        }
    }
    if (!whole && found.size() == before) {
        add(b.tokens < uint32_t(kPageTokens) ? "the open block does not match its hash"
            : known                          ? "the block does not match its hash; its pages do"
                                             : "the block does not match its hash; the shape is unknown, so is the layer",
            -1, 0);
    }
}

std::vector<Damage> StoredFile::verify(const std::function<void(uint64_t done, uint64_t total)>& progress) {
    std::vector<Damage> found = damage;
    for (uint64_t i = 0; i < blocks.size(); ++i) {
        progress(i, blocks.size());
        if (blocks[i].offset > 0) check_slot(i, slot_of(blocks[i]), found);
    }
    return found;
}

}  // namespace ta::tools
