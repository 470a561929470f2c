package turboattention

// #include <turboattention.h>
import "C"

import "unsafe"

// PoolStats are figures of a pool; the header has what each counts.
type PoolStats struct {
	Sequences             int
	Tokens                uint64
	BytesBudget           uint64
	BytesUsed             uint64
	BytesCached           uint64
	BytesPeak             uint64
	TokenBlocks           uint64
	ChannelBlocks         uint64
	LowBlocks             uint64
	SharedBlocks          uint64
	TokenBlockBytes       uint64
	ChannelBlockBytes     uint64
	LowBlockBytes         uint64
	TokenBitsPerElement   float64
	ChannelBitsPerElement float64
	AppendedTokens        uint64 // since creation, as the next ones
	ClosedPages           uint64
	ReopenedBlocks        uint64
	CopiedBlocks          uint64
	SaturatedValues       uint64
	ClampedValues         uint64
	BytesFree             uint64 // now: a step's new blocks take these at once
	BytesReclaimable      uint64 // and these after blocks have been demoted
	BytesPromised         uint64 // neither: Sequence.Reserve gave them away
	PassedBlocks          uint64 // in use, beside the others: without the pages of layers with windows
}

// Stats are the pool's figures now.
//
// Errors: those of every call.
func (p *Pool) Stats() (*PoolStats, error) {
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	var s C.ta_kv_pool_stats
	s.struct_size = C.uint32_t(unsafe.Sizeof(s))
	e := newError()
	if err := result(C.ta_kv_pool_get_stats(p.c, &s, e), e); err != nil {
		return nil, err
	}
	return &PoolStats{
		Sequences: int(s.sequences), Tokens: uint64(s.tokens), BytesBudget: uint64(s.bytes_budget), BytesUsed: uint64(s.bytes_used),
		BytesCached: uint64(s.bytes_cached), BytesPeak: uint64(s.bytes_peak), TokenBlocks: uint64(s.token_blocks),
		ChannelBlocks: uint64(s.channel_blocks), LowBlocks: uint64(s.low_blocks), SharedBlocks: uint64(s.shared_blocks),
		TokenBlockBytes: uint64(s.token_block_bytes), ChannelBlockBytes: uint64(s.channel_block_bytes),
		LowBlockBytes: uint64(s.low_block_bytes), TokenBitsPerElement: float64(s.token_bits_per_element),
		ChannelBitsPerElement: float64(s.channel_bits_per_element), AppendedTokens: uint64(s.appended_tokens),
		ClosedPages: uint64(s.closed_pages), ReopenedBlocks: uint64(s.reopened_blocks), CopiedBlocks: uint64(s.copied_blocks),
		SaturatedValues: uint64(s.saturated_values), ClampedValues: uint64(s.clamped_values), BytesFree: uint64(s.bytes_free),
		BytesReclaimable: uint64(s.bytes_reclaimable), BytesPromised: uint64(s.bytes_promised), PassedBlocks: uint64(s.passed_blocks),
	}, nil
}

// Fit says whether a step would find room in the device tier.
type Fit struct {
	Now            bool   // at once: nothing leaves the device tier for it and nothing comes from disk
	AfterEviction  bool   // now or after others have left; if not, only other sequences that end can make room
	FirstLacking   int    // the first sequence that does not fit, with those before it, after eviction; -1: all fit
	BytesLacking   uint64 // of the device tier after eviction
	BytesNew       uint64 // of blocks that the step adds, without what is promised to its sequences
	BlocksFromDisk uint64 // that come to memory first
	BytesFromDisk  uint64
}

// Fit tells whether a step that brings new[i] tokens to seqs[i] would find room now. A nil sequence is a new, empty one; new
// nil: no new tokens. Fit reserves nothing; [Sequence.Reserve] does.
//
// Errors: [ErrInvalid] (a sequence that is there twice or is of another pool, counts that do not fit), [ErrStale], [ErrLimit]
// (too many tokens).
func (p *Pool) Fit(seqs []*Sequence, new []int) (*Fit, error) {
	if new != nil && len(new) != len(seqs) {
		return nil, errCounts
	}
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	ids, tokens := make([]C.ta_seq, len(seqs)), make([]C.int32_t, len(new))
	for i, seq := range seqs {
		if seq == nil {
			continue
		}
		if seq.pool != p {
			return nil, errOtherPool
		}
		if ids[i] = seq.c(); ids[i] == 0 {
			return nil, errClosedSeq
		}
	}
	if len(new) > 0 {
		counts(&tokens[0], new)
	}
	var f C.ta_fit
	f.struct_size = C.uint32_t(unsafe.Sizeof(f))
	e := newError()
	err := result(C.ta_kv_pool_fit(p.c, C.uint32_t(len(ids)), first[C.ta_seq](ids), first[C.int32_t](tokens), &f, e), e)
	if err != nil {
		return nil, err
	}
	return &Fit{f.now != 0, f.after_eviction != 0, int(f.first_lacking), uint64(f.bytes_lacking), uint64(f.bytes_new),
		uint64(f.blocks_from_disk), uint64(f.bytes_from_disk)}, nil
}

// TierStats are figures of one tier; docs/tiers.md explains them.
type TierStats struct {
	State             TierState
	Reason            string
	BytesBudget       uint64
	BytesUsed         uint64
	BytesFree         uint64
	LargestFree       uint64
	Fragmentation     float64
	Blocks            uint64
	TokenBlocks       uint64
	ChannelBlocks     uint64
	LowBlocks         uint64
	PassedBlocks      uint64
	BlocksIn          uint64 // since creation, as the next ones
	BlocksOut         uint64
	BytesIn           uint64
	BytesOut          uint64
	FallenBlocks      uint64
	Hits              uint64
	Misses            uint64
	MissesFailed      uint64
	EvictedBlocks     uint64
	EvictedAgeSeconds float64
	RequestsQueued    uint64 // now
	RequestsFailed    uint64
	RequestsCorrupt   uint64
}

// TierStats are the figures of a tier now.
//
// Errors: [ErrUnsupported] (the pool has no such tier).
func (p *Pool) TierStats(tier Tier) (*TierStats, error) {
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	var s C.ta_tier_stats
	s.struct_size = C.uint32_t(unsafe.Sizeof(s))
	e := newError()
	if err := result(C.ta_kv_pool_get_tier_stats(p.c, C.ta_tier(tier), &s, e), e); err != nil {
		return nil, err
	}
	return &TierStats{
		State: TierState(s.state), Reason: C.GoString(&s.reason[0]), BytesBudget: uint64(s.bytes_budget),
		BytesUsed: uint64(s.bytes_used), BytesFree: uint64(s.bytes_free), LargestFree: uint64(s.largest_free),
		Fragmentation: float64(s.fragmentation), Blocks: uint64(s.blocks), TokenBlocks: uint64(s.token_blocks),
		ChannelBlocks: uint64(s.channel_blocks), LowBlocks: uint64(s.low_blocks), PassedBlocks: uint64(s.passed_blocks), BlocksIn: uint64(s.blocks_in),
		BlocksOut: uint64(s.blocks_out), BytesIn: uint64(s.bytes_in), BytesOut: uint64(s.bytes_out),
		FallenBlocks: uint64(s.fallen_blocks), Hits: uint64(s.hits), Misses: uint64(s.misses),
		MissesFailed: uint64(s.misses_failed), EvictedBlocks: uint64(s.evicted_blocks),
		EvictedAgeSeconds: float64(s.evicted_age_seconds), RequestsQueued: uint64(s.requests_queued),
		RequestsFailed: uint64(s.requests_failed), RequestsCorrupt: uint64(s.requests_corrupt),
	}, nil
}

// MoveStats say what moved and why, and what steps waited for and staged; docs/tiers.md explains them.
type MoveStats struct {
	QueuedTickets      uint64 // now
	BytesAsked         uint64 // since creation, as the next ones
	BytesPrefetched    uint64
	BytesNeeded        uint64
	BytesEvicted       uint64
	FailedBlocks       uint64
	CorruptBlocks      uint64
	PrefetchUsed       uint64
	PrefetchLate       uint64
	PrefetchWasted     uint64
	WaitsForRoom       uint64
	WaitsForBlocks     uint64
	WaitSeconds        float64
	DroppedBlocks      uint64
	HostSteps          uint64
	StagedSteps        uint64
	StagedPages        uint64
	StagedBytes        uint64
	BytesByCopyEngine  uint64
	BytesByKernel      uint64
	CopyEngineFromDown uint64
	CopyEngineFromUp   uint64
}

// MoveStats are the figures of the pool's moves now.
//
// Errors: those of every call.
func (p *Pool) MoveStats() (*MoveStats, error) {
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	var s C.ta_move_stats
	s.struct_size = C.uint32_t(unsafe.Sizeof(s))
	e := newError()
	if err := result(C.ta_kv_pool_get_move_stats(p.c, &s, e), e); err != nil {
		return nil, err
	}
	return &MoveStats{
		QueuedTickets: uint64(s.queued_tickets), BytesAsked: uint64(s.bytes_asked), BytesPrefetched: uint64(s.bytes_prefetched),
		BytesNeeded: uint64(s.bytes_needed), BytesEvicted: uint64(s.bytes_evicted), FailedBlocks: uint64(s.failed_blocks),
		CorruptBlocks: uint64(s.corrupt_blocks), PrefetchUsed: uint64(s.prefetch_used), PrefetchLate: uint64(s.prefetch_late),
		PrefetchWasted: uint64(s.prefetch_wasted), WaitsForRoom: uint64(s.waits_for_room),
		WaitsForBlocks: uint64(s.waits_for_blocks), WaitSeconds: float64(s.wait_seconds), DroppedBlocks: uint64(s.dropped_blocks),
		HostSteps: uint64(s.host_steps), StagedSteps: uint64(s.staged_steps), StagedPages: uint64(s.staged_pages),
		StagedBytes: uint64(s.staged_bytes), BytesByCopyEngine: uint64(s.bytes_by_copy_engine),
		BytesByKernel: uint64(s.bytes_by_kernel), CopyEngineFromDown: uint64(s.copy_engine_from_down),
		CopyEngineFromUp: uint64(s.copy_engine_from_up),
	}, nil
}

// Metrics returns the statistics of all tiers as text for a scraper, or as one JSON object.
//
// Errors: those of every call.
func (p *Pool) Metrics(format MetricsFormat) (string, error) {
	if !p.enter() {
		return "", errClosedPool
	}
	defer p.leave()
	var buffer []byte
	for {
		var needed C.uint64_t
		e := newError()
		status := C.ta_kv_pool_write_metrics(p.c, C.ta_metrics_format(format), first[C.char](buffer), C.uint64_t(len(buffer)),
			&needed, e)
		err := result(status, e)
		switch {
		case err == nil && buffer != nil:
			return string(buffer[:needed-1]), nil // without the NUL
		case err != nil && int(needed) <= len(buffer):
			return "", err
		}
		buffer = make([]byte, needed+256) // numbers grow between the calls
	}
}
