// Reads the files that the library writes, as docs/FORMAT.md describes them, without a pool: for ta inspect and ta verify. A
// count in a file is never trusted beyond the bytes that the file has.
#pragma once

#include <cstdint>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kernels/format/layout.h"
#include "tools/ta/machine.h"

namespace ta::tools {

enum class FileKind { kSequence, kPool, kDisk };
const char* name_of(FileKind kind);
const char* name_of(PageKind kind);

struct StoredBlock {
    uint64_t index;  // in its sequences
    uint32_t tokens;
    PageKind kind;
    uint64_t content_id;
    uint64_t hash;    // of the slot
    uint64_t offset;  // of the slot in the file; 0: unknown, because of damage before it
    uint64_t bytes;   // of the slot
};

struct StoredSequence {
    uint64_t id;  // 0 in a sequence's file
    int64_t tokens;
    uint64_t space;                // the 8 bytes that identify its namespace; 0: none
    std::vector<uint64_t> blocks;  // numbers in the file
};

// A fault in a file and where it is; -1: that kind of place does not apply.
struct Damage {
    std::string what;
    int64_t block = -1;  // number in the file
    int64_t layer = -1;
    int64_t offset = -1;  // of the damaged part in the file
};

// The shape of a pool as far as its blocks show it. The file does not state it: the number of heads follows from sizes.
struct StoredShape {
    uint32_t layers = 0;  // 0: no block has a readable trailer
    uint32_t kv_heads = 0, head_dim = 0;
    bool own_scales = false;            // universal open scales
    std::vector<uint64_t> pages;        // by layer, bytes of a channel block's page; empty: unknown, or no such block
    std::vector<uint64_t> token_pages;  // likewise for token blocks, if layers have several shapes; kv_heads is then 0
};

class StoredFile {
  public:
    // Throws WrongInput: the file cannot be read, is not one of the library's, or is too damaged to find its blocks.
    explicit StoredFile(const std::string& path);

    FileKind kind;
    unsigned version = 0;
    uint64_t bytes = 0;
    uint64_t fingerprint = 0;
    uint64_t slot_bytes[kPageKinds] = {};  // by PageKind; 0: no such blocks, or none was found
    std::vector<StoredBlock> blocks;
    std::vector<StoredSequence> sequences;
    uint64_t published = 0;  // blocks that are published under keys
    uint64_t room = 0;       // of a disk tier: how many records of its smallest kind fit
    uint64_t opened = 0;     // of a disk tier: how often it was opened
    const char* state = "";  // of a disk tier
    StoredShape shape;
    std::vector<Damage> damage;  // found while opening, in header, index and headers of blocks

    // Reads every block and checks every hash. Returns all damage, including that found while opening.
    std::vector<Damage> verify(const std::function<void(uint64_t done, uint64_t total)>& progress);
    uint64_t pages_checked = 0;

  private:
    void read(uint64_t offset, void* to, uint64_t n);
    void open_sequence();
    void open_pool();
    void open_disk();
    uint64_t find_next_block(uint64_t offset);
    void place_blocks(uint64_t offset);
    void find_shape();
    std::vector<uint8_t> slot_of(const StoredBlock& block);
    std::vector<uint64_t> learn_pages(std::span<const uint8_t> slot, uint64_t trailer);
    uint64_t page_bytes(PageKind kind, uint32_t layer) const;
    void check_slot(uint64_t number, std::span<const uint8_t> slot, std::vector<Damage>& found);

    const std::string path_;
    std::ifstream in_;
};

}  // namespace ta::tools
