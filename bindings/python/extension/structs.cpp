// The structs that the library fills in, as read-only objects of Python.
#include <nanobind/stl/string.h>

#include <cstring>

#include "common.h"

namespace {

// Binds a struct that the library fills in: its fields are read-only attributes, listed in _fields.
template <class T>
class Struct {
  public:
    Struct(nb::module_& m, const char* name, const char* doc) : class_(m, name, doc) {
        class_.def("__repr__", [](nb::handle self) {
            nb::list fields;
            for (nb::handle name : self.attr("_fields")) fields.append(nb::str("{}={!r}").format(name, self.attr(name)));
            return nb::str("{}({})").format(self.type().attr("__name__"), nb::str(", ").attr("join")(fields));
        });
        class_.def(
            "asdict",
            [](nb::handle self) {
                nb::dict fields;
                for (nb::handle name : self.attr("_fields")) fields[name] = self.attr(name);
                return fields;
            },
            nb::sig("def asdict(self) -> dict[str, typing.Any]"), "All fields.");
    }
    ~Struct() { class_.attr("_fields") = nb::tuple(names_); }

    template <class U>
    Struct& field(const char* name, U T::*member, const char* doc = "") {
        if constexpr (std::is_array_v<U>)
            class_.def_prop_ro(
                name, [member](const T& self) { return std::string(self.*member); }, doc);
        else
            class_.def_ro(name, member, doc);
        names_.append(name);
        return *this;
    }
    // Of type turboattention.<type>.
    Struct& choice(const char* name, int32_t T::*member, const char* type, const char* doc = "") {
        const std::string signature = std::string("def ") + name + "(self) -> " + type;
        class_.def_prop_ro(
            name, [member, type](const T& self) { return package("turboattention._enums", type)(self.*member); },
            nb::sig(signature.c_str()), doc);
        names_.append(name);
        return *this;
    }
    template <class F>
    Struct& made(const char* name, F&& f, const char* doc = "") {
        class_.def_prop_ro(name, std::forward<F>(f), doc);
        names_.append(name);
        return *this;
    }

  private:
    nb::class_<T> class_;
    nb::list names_;
};

// Facts about a context.
void bind_context_info(nb::module_& m) {
    Struct<ta_context_info>(m, "ContextInfo", "What a context is and has.")
        .choice("device", &ta_context_info::device, "Device")
        .field("threads", &ta_context_info::threads)
        .choice("cpu_isa", &ta_context_info::cpu_isa, "CpuIsa", "the kernels in use")
        .choice("cpu_isa_best", &ta_context_info::cpu_isa_best, "CpuIsa", "the best this CPU has")
        .field("bytes_in_use", &ta_context_info::bytes_in_use,
               "got from the allocator and not given back: pages, and workspaces of plans (docs/threading.md)")
        .field("bytes_peak", &ta_context_info::bytes_peak)
        .field("device_name", &ta_context_info::device_name)
        .field("degraded", &ta_context_info::degraded, "what is missing here and why; empty when nothing is")
        .field("device_ordinal", &ta_context_info::device_ordinal, "the GPU; 0 on a CPU")
        .field("compute_capability", &ta_context_info::compute_capability, "90: sm_90; 0 on a CPU")
        .field("device_bytes_in_use", &ta_context_info::device_bytes_in_use,
               "GPU memory of the context's pools, plans and dense calls")
        .field("device_bytes_peak", &ta_context_info::device_bytes_peak);
}

// Statistics of a pool.
void bind_pool_structs(nb::module_& m) {
    Struct<ta_kv_pool_stats>(m, "PoolStats", "What a pool holds; counters are since creation.")
        .field("sequences", &ta_kv_pool_stats::sequences, "alive now")
        .field("tokens", &ta_kv_pool_stats::tokens, "sum of their lengths; a shared block counts once for each sequence")
        .field("bytes_budget", &ta_kv_pool_stats::bytes_budget)
        .field("bytes_used", &ta_kv_pool_stats::bytes_used, "blocks in use")
        .field("bytes_cached", &ta_kv_pool_stats::bytes_cached,
               "freed blocks kept for reuse; given back before the budget is exceeded")
        .field("bytes_peak", &ta_kv_pool_stats::bytes_peak, "highest bytes_used")
        .field("token_blocks", &ta_kv_pool_stats::token_blocks, "in use")
        .field("channel_blocks", &ta_kv_pool_stats::channel_blocks, "in use")
        .field("shared_blocks", &ta_kv_pool_stats::shared_blocks, "blocks with more than one owner")
        .field("token_block_bytes", &ta_kv_pool_stats::token_block_bytes,
               "size of one, all layers, metadata and trailer included")
        .field("channel_block_bytes", &ta_kv_pool_stats::channel_block_bytes,
               "likewise; 0 in an 8-bit pool without falling_precision")
        .field("token_bits_per_element", &ta_kv_pool_stats::token_bits_per_element,
               "true size over 64 * kv_heads * (head_dim + v_head_dim), summed over layers")
        .field("channel_bits_per_element", &ta_kv_pool_stats::channel_bits_per_element)
        .field("appended_tokens", &ta_kv_pool_stats::appended_tokens, "since creation, as the next ones")
        .field("closed_pages", &ta_kv_pool_stats::closed_pages, "pages encoded to 4/2 bits")
        .field("reopened_blocks", &ta_kv_pool_stats::reopened_blocks,
               "closed blocks turned back into open ones after a truncate")
        .field("copied_blocks", &ta_kv_pool_stats::copied_blocks, "copy-on-write after a fork")
        .field("saturated_values", &ta_kv_pool_stats::saturated_values,
               "non-finite inputs replaced under TA_NONFINITE_SATURATE")
        .field("clamped_values", &ta_kv_pool_stats::clamped_values, "values cut off by a universal open scale")
        .field("low_blocks", &ta_kv_pool_stats::low_blocks,
               "under falling_precision, blocks of 2 bits in use; in the device tier, as the others")
        .field("low_block_bytes", &ta_kv_pool_stats::low_block_bytes, "size of one; 0 without")
        .field("bytes_free", &ta_kv_pool_stats::bytes_free, "of the device tier: a step's new blocks take these at once")
        .field("bytes_reclaimable", &ta_kv_pool_stats::bytes_reclaimable,
               "and these after blocks have been demoted and published ones that nobody uses are dropped")
        .field("bytes_promised", &ta_kv_pool_stats::bytes_promised, "neither: Sequence.reserve gave them away")
        .field("passed_blocks", &ta_kv_pool_stats::passed_blocks,
               "in use, beside token, channel and low blocks: without the pages of layers whose window has passed");
    Struct<ta_fit>(m, "Fit", "Whether a step would find room in the device tier.")
        .made(
            "now", [](const ta_fit& self) { return self.now != 0; },
            "it finds room at once: nothing leaves the device tier for it and nothing comes from disk")
        .made(
            "after_eviction", [](const ta_fit& self) { return self.after_eviction != 0; },
            "now or after others have left; if not, only other sequences that end can make room")
        .field("first_lacking", &ta_fit::first_lacking,
               "index of the first sequence that does not fit, with those before it, after eviction; -1: all fit")
        .field("bytes_lacking", &ta_fit::bytes_lacking, "of the device tier after eviction; 0: all fit")
        .field("bytes_new", &ta_fit::bytes_new, "of blocks that the step adds, without what is promised to its sequences")
        .field("blocks_from_disk", &ta_fit::blocks_from_disk, "that come to memory first")
        .field("bytes_from_disk", &ta_fit::bytes_from_disk);
}

// Statistics of a namespace and of its store.
void bind_namespace_structs(nb::module_& m) {
    Struct<ta_namespace_stats>(m, "NamespaceStats", "What is published in a namespace; counters are since creation.")
        .field("entries", &ta_namespace_stats::entries, "published blocks")
        .field("bytes", &ta_namespace_stats::bytes)
        .field("bytes_quota", &ta_namespace_stats::bytes_quota, "0: no limit")
        .field("bytes_shared", &ta_namespace_stats::bytes_shared, "of entries that sequences have, too")
        .field("hits", &ta_namespace_stats::hits, "keys found, since creation, as the next ones")
        .field("misses", &ta_namespace_stats::misses, "keys asked for and not found, those behind the first one included")
        .field("published", &ta_namespace_stats::published, "blocks; not those whose key was there already")
        .field("evicted", &ta_namespace_stats::evicted, "entries dropped for room or quota");
    Struct<ta_store_stats>(m, "StoreStats", "Of the store of a namespace, since it was attached.")
        .field("pausing", &ta_store_stats::pausing, "1: it failed, and is asked again after a pause")
        .field("puts", &ta_store_stats::puts, "blocks that were put")
        .field("puts_present", &ta_store_stats::puts_present, "that were there already")
        .field("put_failures", &ta_store_stats::put_failures)
        .field("hits", &ta_store_stats::hits, "blocks that loads brought")
        .field("misses", &ta_store_stats::misses, "that they did not get")
        .field("refused", &ta_store_stats::refused, "values that were not what they should be")
        .field("bytes_put", &ta_store_stats::bytes_put)
        .field("bytes_got", &ta_store_stats::bytes_got)
        .field("calls", &ta_store_stats::calls, "of its functions")
        .field("calls_failed", &ta_store_stats::calls_failed, "that raised")
        .field("timeouts", &ta_store_stats::timeouts, "that did not return in time")
        .field("waiting", &ta_store_stats::waiting, "published blocks that are still to be put")
        .field("failed_unix_ms", &ta_store_stats::failed_unix_ms,
               "when something last failed or was refused, in milliseconds since 1970; 0: never")
        .field("failure", &ta_store_stats::failure, "what that was");
}

// Moves of blocks, and the places of blocks.
void bind_block_structs(nb::module_& m) {
    Struct<ta_move_info>(m, "MoveInfo", "How far moves of blocks are.")
        .choice("state", &ta_move_info::state, "MoveState",
                "FAILED: some block failed; the others moved, unless it was cancelled, too")
        .field("blocks", &ta_move_info::blocks, "asked for")
        .field("moved", &ta_move_info::moved)
        .field("present", &ta_move_info::present, "were there already")
        .field("skipped", &ta_move_info::skipped, "not full, pinned, released, or on another move; of a prefetch also: no room")
        .field("failed", &ta_move_info::failed)
        .choice("status", &ta_move_info::status, "Status", "of the first block that failed")
        .field("block", &ta_move_info::block, "its index in the sequence, -1: none");
    Struct<ta_residency>(m, "Residency", "Where the blocks of a sequence are.")
        .field("pinned_blocks", &ta_residency::pinned_blocks)
        .field("device_blocks", &ta_residency::device_blocks)
        .field("host_blocks", &ta_residency::host_blocks)
        .field("disk_blocks", &ta_residency::disk_blocks)
        .field("device_bytes", &ta_residency::device_bytes)
        .field("host_bytes", &ta_residency::host_bytes)
        .field("disk_bytes", &ta_residency::disk_bytes)
        .field("dropped_blocks", &ta_residency::dropped_blocks, "by Tiers.drop_coldest or Sequence.forget; in no tier")
        .field("peer_blocks", &ta_residency::peer_blocks)
        .field("peer_bytes", &ta_residency::peer_bytes);
    Struct<ta_block_info>(m, "BlockInfo", "A block of a sequence.")
        .choice("tier", &ta_block_info::tier, "Tier", "of a block that has owners")
        .choice("flags", &ta_block_info::flags, "BlockFlags")
        .field("bytes", &ta_block_info::bytes, "in its tier, all layers, trailer included")
        .field("owners", &ta_block_info::owners, "sequences that have it, and keys under which it is published; 0: in no tier")
        .field("pins", &ta_block_info::pins, "not taken back")
        .field("priority", &ta_block_info::priority, "now")
        .field("retained_ms", &ta_block_info::retained_ms, "milliseconds for which it keeps that; -1: for ever");
}

// Statistics of tiers.
void bind_tier_structs(nb::module_& m) {
    Struct<ta_tier_stats>(m, "TierStats", "One tier; counters are since creation.")
        .choice("state", &ta_tier_stats::state, "TierState")
        .field("bytes_budget", &ta_tier_stats::bytes_budget)
        .field("bytes_used", &ta_tier_stats::bytes_used, "by blocks")
        .field("bytes_free", &ta_tier_stats::bytes_free, "that no block has, whether one fits there or not")
        .field("largest_free", &ta_tier_stats::largest_free,
               "longest run of them that blocks can have; 0: no block fits, or not known (device tier)")
        .field("fragmentation", &ta_tier_stats::fragmentation,
               "share of the free bytes that the block size which fits worst cannot use; 0 where that is not known")
        .field("blocks", &ta_tier_stats::blocks)
        .field("token_blocks", &ta_tier_stats::token_blocks)
        .field("channel_blocks", &ta_tier_stats::channel_blocks)
        .field("low_blocks", &ta_tier_stats::low_blocks)
        .field("passed_blocks", &ta_tier_stats::passed_blocks)
        .field("reason", &ta_tier_stats::reason, "of the state, and what the tier lacks here; empty when nothing is missing")
        .field("blocks_in", &ta_tier_stats::blocks_in)
        .field("blocks_out", &ta_tier_stats::blocks_out)
        .field("bytes_in", &ta_tier_stats::bytes_in)
        .field("bytes_out", &ta_tier_stats::bytes_out)
        .field("fallen_blocks", &ta_tier_stats::fallen_blocks, "that came here with fewer bits than they had")
        .field("hits", &ta_tier_stats::hits, "blocks of steps that were here when the step began")
        .field("misses", &ta_tier_stats::misses, "that were not here but in a slower tier")
        .field("misses_failed", &ta_tier_stats::misses_failed,
               "that were here but could not be brought to where the step reads them")
        .field("evicted_blocks", &ta_tier_stats::evicted_blocks, "that left this tier to make room")
        .field("evicted_age_seconds", &ta_tier_stats::evicted_age_seconds, "since the last step of their sequences, summed")
        .field("requests_queued", &ta_tier_stats::requests_queued,
               "reads and writes of a disk that are not finished now; 0 elsewhere")
        .field("requests_failed", &ta_tier_stats::requests_failed, "that failed, or did not end in time")
        .field("requests_corrupt", &ta_tier_stats::requests_corrupt,
               "that read what does not match its hash, records refused at opening included");
    Struct<ta_memory_range>(m, "MemoryRange", "Memory that a tier has blocks in.")
        .field("device_ordinal", &ta_memory_range::device_ordinal, "of the GPU whose memory it is; -1: the host's")
        .made(
            "data", [](const ta_memory_range& self) { return reinterpret_cast<uintptr_t>(self.data); }, "its address")
        .field("bytes", &ta_memory_range::bytes);
    Struct<ta_move_stats>(m, "MoveStats", "What moved and why, what steps waited for and staged; counters are since creation.")
        .field("queued_tickets", &ta_move_stats::queued_tickets, "that are not finished now")
        .field("bytes_asked", &ta_move_stats::bytes_asked)
        .field("bytes_prefetched", &ta_move_stats::bytes_prefetched)
        .field("bytes_needed", &ta_move_stats::bytes_needed)
        .field("bytes_evicted", &ta_move_stats::bytes_evicted)
        .field("failed_blocks", &ta_move_stats::failed_blocks, "that could not move, but for lack of room")
        .field("corrupt_blocks", &ta_move_stats::corrupt_blocks, "that did not match their hashes where they lay")
        .field("prefetch_used", &ta_move_stats::prefetch_used, "prefetched blocks that a step then found")
        .field("prefetch_late", &ta_move_stats::prefetch_late, "that a step wanted before they came")
        .field("prefetch_wasted", &ta_move_stats::prefetch_wasted, "that left again, or were released, before a step used them")
        .field("waits_for_room", &ta_move_stats::waits_for_room)
        .field("waits_for_blocks", &ta_move_stats::waits_for_blocks, "begins that waited for blocks to come from disk")
        .field("wait_seconds", &ta_move_stats::wait_seconds, "of these, summed")
        .field("dropped_blocks", &ta_move_stats::dropped_blocks, "lost because no tier had room: Tiers.drop_coldest")
        .field("host_steps", &ta_move_stats::host_steps, "steps that read blocks in host memory")
        .field("staged_steps", &ta_move_stats::staged_steps, "those of them that staged some of these: Tiers.staging")
        .field("staged_pages", &ta_move_stats::staged_pages, "that they copied; a page is what a block has of one layer")
        .field("staged_bytes", &ta_move_stats::staged_bytes)
        .field("bytes_by_copy_engine", &ta_move_stats::bytes_by_copy_engine)
        .field("bytes_by_kernel", &ta_move_stats::bytes_by_kernel)
        .field("copy_engine_from_down", &ta_move_stats::copy_engine_from_down)
        .field("copy_engine_from_up", &ta_move_stats::copy_engine_from_up);
}

// Groups, their ranks and transfers.
void bind_group_structs(nb::module_& m) {
    Struct<ta_group_info>(m, "GroupInfo", "A rank and its group.")
        .choice("state", &ta_group_info::state, "GroupState")
        .field("rank", &ta_group_info::rank)
        .field("ranks", &ta_group_info::ranks)
        .choice("kind", &ta_group_info::kind, "GroupKind")
        .field("nccl_version", &ta_group_info::nccl_version, "22809: 2.28.9; 0: not of TA_GROUP_NCCL")
        .field("generation", &ta_group_info::generation, "differs from group to group; the same at all ranks")
        .field("reason", &ta_group_info::reason, "why the group has ended; else empty");
    Struct<ta_group_peer>(m, "PeerInfo", "What lies between this rank and another.")
        .field("rank", &ta_group_peer::rank)
        .choice("route", &ta_group_peer::route, "PeerRoute")
        .field("bytes_per_s", &ta_group_peer::bytes_per_s,
               "at which the memory of its GPU was read when the group was made; 0: not measured")
        .field("why", &ta_group_peer::why, "why no faster route is taken; else empty");
    Struct<ta_transfer_info>(m, "TransferInfo", "How far a transfer is.")
        .choice("state", &ta_transfer_info::state, "MoveState", "QUEUED: no other rank has answered yet")
        .field("peer", &ta_transfer_info::peer, "rank")
        .choice("status", &ta_transfer_info::status, "Status", "of a transfer that failed or was cancelled")
        .field("tag", &ta_transfer_info::tag)
        .field("blocks", &ta_transfer_info::blocks,
               "of the sequence; 0 at a destination that has no offer yet. Of a fetch: keys")
        .field("blocks_moved", &ta_transfer_info::blocks_moved, "written, at the destination checked")
        .field("blocks_shared", &ta_transfer_info::blocks_shared, "at the destination: were there already")
        .field("bytes_moved", &ta_transfer_info::bytes_moved)
        .field("seq", &ta_transfer_info::seq, "DONE at the destination: the new sequence; else 0")
        .field("length", &ta_transfer_info::length, "its tokens; of a fetch: that are published under the first keys")
        .field("block", &ta_transfer_info::block, "at which it failed, -1: none")
        .field("rank", &ta_transfer_info::rank, "whose fault it was, -1: nobody's")
        .field("reason", &ta_transfer_info::reason, "text of `status`");
}

// Events and places of published blocks.
void bind_prefix_structs(nb::module_& m) {
    Struct<ta_prefix_event>(m, "PrefixEvent", "What became of a published block.")
        .made(
            "key", [](const ta_prefix_event& self) { return nb::bytes(self.key, sizeof self.key); }, "hashed")
        .field("number", &ta_prefix_event::number,
               "of the namespace's events, from 1; those that a gap before RESET lacks were lost")
        .field("index", &ta_prefix_event::index, "of the block in its sequence")
        .choice("kind", &ta_prefix_event::kind, "PrefixEventKind")
        .choice("tier", &ta_prefix_event::tier, "Tier", "where it is; DROPPED: was");
    Struct<ta_prefix_place>(m, "PrefixPlace", "Where a block is.")
        .choice("answer", &ta_prefix_place::answer, "PrefixAnswer")
        .field("rank", &ta_prefix_place::rank,
               "of YES: this one if it has the block, else the one where it is nearest: device, host, disk")
        .choice("tier", &ta_prefix_place::tier, "Tier", "there");
}

}  // namespace

void bind_structs(nb::module_& m) {
    bind_context_info(m);
    bind_pool_structs(m);
    bind_namespace_structs(m);
    bind_block_structs(m);
    bind_tier_structs(m);
    bind_group_structs(m);
    bind_prefix_structs(m);
}
