// XXH3_64 with its default secret, unseeded, a CTA to a page. The sums of a 1024-byte block for the eight accumulators do not
// depend on the blocks before it: warps sum blocks, a lane one accumulator over every fourth stripe, and only the scrambling
// between blocks is serial, in one warp. The constants and the order of operations are those of the published XXH3 algorithm;
// the tests compare with the library.
#include <cuda_runtime_api.h>

#include <cstring>

#include "kernels/cuda/any/hash/page_hash.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/format/slot.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ta::cuda {
namespace {

constexpr uint32_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu, kPrime64_3 = 0x165667B19E3779F9u,
                   kPrime64_4 = 0x85EBCA77C2B2AE63u, kPrime64_5 = 0x27D4EB2F165667C5u;
constexpr int kStripe = 64, kStripesOfBlock = 16, kBlock = kStripe * kStripesOfBlock;
constexpr int kWarps = 8;
constexpr int kBlocksAtOnce = 128;  // whose sums are in shared memory
constexpr int kLoaded = 4;          // blocks that a warp has on their way

// The secret as 64-bit words: at multiples of 8, and where the algorithm reads it unaligned.
struct Secret {
    uint64_t words[24];
    uint64_t last[8];   // for the last stripe: from byte 121
    uint64_t merge[8];  // from byte 11
};

Secret default_secret() {
    Secret s;
    std::memcpy(s.words, XXH3_kSecret, sizeof s.words);
    std::memcpy(s.last, XXH3_kSecret + sizeof s.words - kStripe - 7, sizeof s.last);
    std::memcpy(s.merge, XXH3_kSecret + 11, sizeof s.merge);
    return s;
}

__device__ uint64_t fold(uint64_t a, uint64_t b) {
    return a * b ^ __umul64hi(a, b);
}
__device__ uint64_t avalanche(uint64_t h) {
    h ^= h >> 37;
    h *= 0x165667919E3779F9u;
    return h ^ h >> 32;
}

// Sum of what stripes add to accumulator i: the product of its own halves, and the data of its neighbour.
struct Addend {
    uint64_t product = 0, data = 0;
    __device__ void add(uint64_t x, uint64_t key) {
        const uint64_t keyed = x ^ key;
        product += uint64_t(uint32_t(keyed)) * uint32_t(keyed >> 32);
        data += x;
    }
    // Over the lanes that share an accumulator.
    __device__ uint64_t sum() const {
        uint64_t n = product + __shfl_xor_sync(~0u, data, 1);
        n += __shfl_xor_sync(~0u, n, 8);
        return n + __shfl_xor_sync(~0u, n, 16);
    }
};

// XXH3_64 of more than 240 bytes, a multiple of 64, at a multiple of 8. By a CTA; every lane of its first warp gets it.
__device__ uint64_t hash_long(const uint8_t* bytes, uint64_t n, const Secret& secret) {
    __shared__ uint64_t sums[kBlocksAtOnce][8];
    const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
    const int i = lane % 8, quarter = lane / 8;
    const uint64_t start[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
    uint64_t accumulator = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) accumulator = i == k ? start[k] : accumulator;
    uint64_t key[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) key[k] = secret.words[quarter + 4 * k + i];
    const uint64_t scramble = secret.words[16 + i], blocks = (n - 1) / kBlock;
    const auto* words = reinterpret_cast<const uint64_t*>(bytes) + lane;
    for (uint64_t first = 0; first < blocks; first += kBlocksAtOnce) {
        const int now = int(min(blocks - first, uint64_t(kBlocksAtOnce)));
        for (int b = warp; b < now; b += kWarps * kLoaded) {
            uint64_t x[kLoaded][4];
#pragma unroll
            for (int l = 0; l < kLoaded; ++l) {
                const int block = min(b + l * kWarps, now - 1);  // what is loaded twice is not used
#pragma unroll
                for (int k = 0; k < 4; ++k) x[l][k] = words[(first + block) * (kBlock / 8) + 32 * k];
            }
#pragma unroll
            for (int l = 0; l < kLoaded; ++l) {
                Addend addend;
#pragma unroll
                for (int k = 0; k < 4; ++k) addend.add(x[l][k], key[k]);
                const uint64_t sum = addend.sum();
                if (b + l * kWarps < now && quarter == 0) sums[b + l * kWarps][i] = sum;
            }
        }
        __syncthreads();
        if (warp == 0) {
            for (int b = 0; b < now; ++b) {
                accumulator += sums[b][i];
                accumulator = (accumulator ^ accumulator >> 47 ^ scramble) * kPrime32_1;
            }
        }
        __syncthreads();  // NOTES: the sums are those of the next blocks from here on
    }
    if (warp != 0) return 0;
    const int stripes = int((n - 1 - blocks * kBlock) / kStripe);
    Addend addend;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (quarter + 4 * k < stripes) addend.add(words[blocks * (kBlock / 8) + 32 * k], key[k]);
    }
    if (quarter == 0) addend.add(reinterpret_cast<const uint64_t*>(bytes + n - kStripe)[i], secret.last[i]);
    accumulator += addend.sum();
    const uint64_t mine = accumulator ^ secret.merge[i];
    uint64_t folded = fold(mine, __shfl_xor_sync(~0u, mine, 1));
    folded += __shfl_xor_sync(~0u, folded, 2);
    folded += __shfl_xor_sync(~0u, folded, 4);
    return avalanche(n * kPrime64_1 + folded);
}

// XXH3_64 of the 56 bytes of a page's identity and its payload's hash.
__device__ uint64_t hash_bound(const PageIdentity& identity, uint64_t payload_hash, const Secret& secret) {
    uint64_t w[7];
    memcpy(w, &identity, sizeof identity);
    w[6] = payload_hash;
    const auto mix = [&](int word, int key) { return fold(w[word] ^ secret.words[key], w[word + 1] ^ secret.words[key + 1]); };
    return avalanche(sizeof w * kPrime64_1 + mix(2, 4) + mix(3, 6) + mix(0, 0) + mix(5, 2));
}

__device__ uint32_t pages_of(const HashArgs& a, PageKind kind) {
    return is_passed(kind) ? a.lasting_layers : a.layers;
}

// The offset of the page in a place; behind the last place that of the end.
__device__ uint64_t page_offset(const HashArgs& a, PageKind kind, uint32_t place) {
    const PageKind format = page_format(kind);
    return format == PageKind::kLow       ? place * a.low_page_bytes
           : format == PageKind::kChannel ? a.channel_page_offset[place]
                                          : a.token_page_offset[place];
}

__device__ uint64_t payload_bytes(const HashArgs& a, PageKind kind) {
    return page_offset(a, kind, pages_of(a, kind));
}

__device__ uint64_t own_scales_bytes(const HashArgs& a, PageKind kind) {
    return kind == PageKind::kToken ? a.own_scales_bytes : 0;
}

// Writes a task's trailer but for the hashes, which are there. By a warp.
__device__ void write_trailer(const HashArgs& a, const HashTask& task, uint64_t content_id) {
    const int lane = int(threadIdx.x % 32);
    auto* slot = reinterpret_cast<uint8_t*>(task.slot);
    auto* trailer = reinterpret_cast<SlotTrailer*>(slot + payload_bytes(a, task.kind));
    if (lane == 0) {
        SlotTrailer t{};
        t.magic = kSlotMagic;
        t.version = kFormatVersion;
        t.kind = uint8_t(page_format(task.kind));
        t.fingerprint = a.fingerprint;
        t.block_index = task.block_index;
        t.content_id = content_id;
        t.tokens = kPageTokens;
        t.layers = a.layers;
        *trailer = t;
    }
    auto* end = reinterpret_cast<uint64_t*>(slot + a.slot_bytes[size_t(task.kind)] - own_scales_bytes(a, task.kind));
    for (uint64_t* rest = reinterpret_cast<uint64_t*>(trailer + 1) + pages_of(a, task.kind) + lane; rest < end; rest += 32)
        *rest = 0;
}

// True if the trailer in the task's slot names the task's block.
__device__ bool is_named(const HashArgs& a, const HashTask& task) {
    const auto& t = *reinterpret_cast<const SlotTrailer*>(task.slot + payload_bytes(a, task.kind));
    return t.magic == kSlotMagic && t.version == kFormatVersion && t.kind == uint8_t(page_format(task.kind)) &&
           t.fingerprint == a.fingerprint && t.block_index == task.block_index && t.content_id == task.content_id &&
           t.tokens == kPageTokens && t.layers == a.layers;
}

enum class Job { kSeal, kVerify, kAdopt };

template <Job kJob>
__global__ void __launch_bounds__(32 * kWarps)
    page_hash_kernel(const __grid_constant__ HashArgs a, const __grid_constant__ Secret secret, uint32_t* mismatch) {
    const uint64_t page = blockIdx.x;
    const HashTask task = a.tasks[page / a.layers];
    const uint32_t place = uint32_t(page % a.layers);
    const PageKind format = page_format(task.kind);
    if (place >= pages_of(a, task.kind)) {
        // A passed block without any page still has a trailer.
        if (place > 0 || threadIdx.x >= 32) return;
        if (kJob == Job::kSeal) {
            write_trailer(a, task, task.content_id);
        } else if (threadIdx.x == 0 && !is_named(a, task)) {
            mismatch[page] = 2;
        }
        return;
    }
    const uint64_t begin = page_offset(a, task.kind, place), bytes = page_offset(a, task.kind, place + 1) - begin;
    auto* slot = reinterpret_cast<uint8_t*>(task.slot);
    PageIdentity identity{};
    identity.fingerprint = a.fingerprint;
    identity.block_index = task.block_index;
    identity.content_id = task.content_id;
    identity.layer = place;
    identity.tokens = kPageTokens;
    identity.magic = kSlotMagic;
    identity.version = kFormatVersion;
    identity.kind = uint8_t(format);
    identity.payload_bytes = bytes;
    const uint64_t payload_hash = hash_long(slot + begin, bytes, secret);
    const uint64_t own_bytes = own_scales_bytes(a, task.kind);
    uint64_t own_hash = 0;
    if (own_bytes > 0 && place + 1 == a.layers) {
        __syncthreads();  // with the hash before
        own_hash = hash_long(slot + a.slot_bytes[size_t(task.kind)] - own_bytes, own_bytes, secret);
    }
    if (threadIdx.x >= 32) return;
    const int lane = int(threadIdx.x);
    const uint64_t hash = hash_bound(identity, payload_hash, secret) ^ own_hash;
    auto* hashes = reinterpret_cast<uint64_t*>(slot + payload_bytes(a, task.kind) + sizeof(SlotTrailer));
    if (kJob == Job::kSeal) {
        if (lane == 0) hashes[place] = hash;
        if (place == 0) write_trailer(a, task, task.content_id);
        return;
    }
    if (lane != 0) return;
    const bool named = is_named(a, task);
    if (!named || hashes[place] != hash) mismatch[page] = named ? 1 : 2;
    if (kJob == Job::kAdopt) {
        identity.content_id = task.adopted_id;
        hashes[place] = hash_bound(identity, payload_hash, secret) ^ own_hash;
    }
}

// Behind the hashes of all pages: their CTAs read the trailers.
__global__ void __launch_bounds__(32) adopted_trailer_kernel(const __grid_constant__ HashArgs a) {
    const HashTask task = a.tasks[blockIdx.x];
    write_trailer(a, task, task.adopted_id);
}

template <Job kJob>
int launch(const HashArgs& args, uint32_t* mismatch, CUstream_st* stream) {
    const uint64_t pages = uint64_t(args.n_tasks) * args.layers;
    if (pages == 0) return cudaSuccess;
    return launch_kernel(page_hash_kernel<kJob>, unsigned(pages), 32 * kWarps, 0, stream, args, default_secret(), mismatch);
}

}  // namespace

int launch_seal(const HashArgs& args, CUstream_st* stream) {
    return launch<Job::kSeal>(args, nullptr, stream);
}

int launch_verify(const HashArgs& args, uint32_t* mismatch, CUstream_st* stream) {
    return launch<Job::kVerify>(args, mismatch, stream);
}

int launch_adopt(const HashArgs& args, uint32_t* mismatch, CUstream_st* stream) {
    if (args.n_tasks == 0) return cudaSuccess;
    if (const int e = launch<Job::kAdopt>(args, mismatch, stream); e != cudaSuccess) return e;
    return launch_kernel(adopted_trailer_kernel, args.n_tasks, 32, 0, stream, args);
}

}  // namespace ta::cuda
