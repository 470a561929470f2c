package turboattention

// #include <turboattention.h>
import "C"

import (
	"context"
	"time"
	"unsafe"
)

// Waits until look says that it is done, or ctx ends. look may block for the short time that it is given: between looks no
// thread of the system is taken.
func wait(ctx context.Context, look func(time.Duration) (bool, error)) error {
	if done, err := look(20 * time.Microsecond); done || err != nil {
		return err
	}
	delay := 20 * time.Microsecond
	timer := time.NewTimer(delay)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
		}
		if done, err := look(0); done || err != nil {
			return err
		}
		if delay += delay / 4; delay > 2*time.Millisecond {
			delay = 2 * time.Millisecond
		}
		timer.Reset(delay)
	}
}

// Move is a batch of moves that was asked for, which goes on in the background.
type Move struct {
	pool   *Pool
	ticket C.ta_ticket
}

// MoveInfo says how far a move is.
type MoveInfo struct {
	State   MoveState
	Blocks  uint64 // asked for
	Moved   uint64
	Present uint64 // were there already
	Skipped uint64 // not full, pinned, released, or on another move; of a prefetch also: no room
	Failed  uint64
	Status  Code  // of the first block that failed; 0: none
	Block   int64 // its index in the sequence, -1: none
}

// Move asks for n blocks from first on to be moved to a tier. If the tier is full, colder blocks leave it.
//
// Errors: [ErrInvalid] (blocks beyond the sequence), [ErrStale], [ErrBusy] (it is in an open step), [ErrUnsupported] (no such
// tier, or none below the device).
func (s *Sequence) Move(first, n int, tier Tier) (*Move, error) {
	m := &Move{pool: s.pool}
	err := s.blocks(first, n, func(first, n C.uint64_t, e *C.ta_error) C.ta_status {
		return C.ta_seq_move(s.pool.c, s.c(), first, n, C.ta_tier(tier), &m.ticket, e)
	})
	if err != nil {
		return nil, err
	}
	return m, nil
}

// Prefetch asks for n blocks from first on to be moved to the device tier, as many as fit.
//
// Errors: [ErrInvalid] (blocks beyond the sequence), [ErrStale], [ErrBusy] (it is in an open step), [ErrUnsupported] (no tier
// below the device).
func (s *Sequence) Prefetch(first, n int) (*Move, error) {
	m := &Move{pool: s.pool}
	err := s.blocks(first, n, func(first, n C.uint64_t, e *C.ta_error) C.ta_status {
		return C.ta_seq_prefetch(s.pool.c, s.c(), first, n, &m.ticket, e)
	})
	if err != nil {
		return nil, err
	}
	return m, nil
}

// Suspend asks for all blocks of an idle sequence, also the open one, to be moved to a tier below the device, so that it has no
// bytes there. The next step brings back what it needs. Pinned blocks stay, and so do blocks that sequences in open steps or
// with a reservation have, too.
//
// Errors: [ErrInvalid] (the device tier), [ErrStale], [ErrBusy] (it is in an open step), [ErrUnsupported] (no such tier).
func (s *Sequence) Suspend(tier Tier) (*Move, error) {
	p := s.pool
	if !p.enter() {
		return nil, errClosedPool
	}
	defer s.leave()
	m := &Move{pool: p}
	e := newError()
	if err := result(C.ta_seq_suspend(p.c, s.c(), C.ta_tier(tier), &m.ticket, e), e); err != nil {
		return nil, err
	}
	return m, nil
}

// Pin keeps n full blocks from first on in their tier or a faster one. Pins are counted.
//
// Errors: [ErrInvalid] (blocks beyond the sequence), [ErrStale], [ErrBusy] (it is in an open step), [ErrState] (a block is not
// full).
func (s *Sequence) Pin(first, n int) error {
	return s.blocks(first, n, func(first, n C.uint64_t, e *C.ta_error) C.ta_status {
		return C.ta_seq_pin(s.pool.c, s.c(), first, n, e)
	})
}

// Unpin takes a Pin back.
//
// Errors: [ErrInvalid] (blocks beyond the sequence), [ErrStale], [ErrBusy] (it is in an open step), [ErrState] (a block is not
// full, or not pinned).
func (s *Sequence) Unpin(first, n int) error {
	return s.blocks(first, n, func(first, n C.uint64_t, e *C.ta_error) C.ta_status {
		return C.ta_seq_unpin(s.pool.c, s.c(), first, n, e)
	})
}

// Retention says how long blocks are to be kept. A field that is 0 is at its default.
type Retention struct {
	// 1 to 63; default 32, which all blocks have at first. Blocks of a lower priority are demoted, evicted and dropped before all
	// others; among blocks of one priority the pool's Eviction decides.
	Priority       int
	DurationMillis int64 // after which the blocks have priority 32 again, up to 2^53; default: for ever
}

// Retain gives n full blocks from first on a priority. They have it in all sequences that share them, and when they are
// published; files do not have it. nil: the usual priority.
//
// Errors: [ErrInvalid] (blocks beyond the sequence, or a field outside its range), [ErrStale], [ErrBusy] (it is in an open
// step), [ErrState] (a block is not full).
func (s *Sequence) Retain(first, n int, retention *Retention) error {
	var c *C.ta_retention
	if retention != nil {
		c = &C.ta_retention{priority: uint32Of(retention.Priority), duration_ms: C.int64_t(retention.DurationMillis)}
		c.struct_size = C.uint32_t(unsafe.Sizeof(*c))
	}
	return s.blocks(first, n, func(first, n C.uint64_t, e *C.ta_error) C.ta_status {
		return C.ta_seq_retain(s.pool.c, s.c(), first, n, c, e)
	})
}

// BlockInfo describes a block of a sequence.
type BlockInfo struct {
	Tier           Tier   // of a block that has Owners
	Bytes          uint64 // in its tier, all layers
	Owners         int    // sequences that have it, and keys under which it is published; 0: it is in no tier
	Pins           int    // not taken back
	Priority       int    // now
	RetainedMillis int64  // how long it keeps that; -1: for ever
	Open           bool   // not full, or cut by a Truncate
	Dropped        bool   // by TierOptions.DropColdest or Sequence.Forget; in no tier
	Absent         bool   // of a partitioned sequence, another rank's; in no tier
	Passed         bool   // has the pages of layers without a window alone
	Published      bool   // in a namespace
}

// DescribeBlocks says what n blocks from first on are now.
//
// Errors: [ErrInvalid] (blocks beyond the sequence), [ErrStale], [ErrBusy] (it is in an open step).
func (s *Sequence) DescribeBlocks(first, n int) ([]BlockInfo, error) {
	if err := s.checkBlocks(first, n); err != nil {
		return nil, err
	}
	list := make([]C.ta_block_info, n+1)
	err := s.blocks(first, n, func(first, n C.uint64_t, e *C.ta_error) C.ta_status {
		return C.ta_seq_describe_blocks(s.pool.c, s.c(), first, n, &list[0], e)
	})
	if err != nil {
		return nil, err
	}
	blocks := make([]BlockInfo, n)
	for i := range blocks {
		c := &list[i]
		has := func(flag C.ta_block_flags) bool { return c.flags&flag != 0 }
		blocks[i] = BlockInfo{Tier: Tier(c.tier), Bytes: uint64(c.bytes), Owners: int(c.owners), Pins: int(c.pins),
			Priority: int(c.priority), RetainedMillis: int64(c.retained_ms), Open: has(C.TA_BLOCK_OPEN),
			Dropped: has(C.TA_BLOCK_DROPPED), Absent: has(C.TA_BLOCK_ABSENT), Passed: has(C.TA_BLOCK_PASSED),
			Published: has(C.TA_BLOCK_PUBLISHED)}
	}
	return blocks, nil
}

// LocateBlocks says where n blocks from first on lie; nil: in no memory (on disk, dropped, another rank's). Pin what is to be read:
// other blocks may leave at any time.
//
// Errors: [ErrInvalid] (blocks beyond the sequence), [ErrStale], [ErrBusy] (it is in an open step).
func (s *Sequence) LocateBlocks(first, n int) ([]unsafe.Pointer, error) {
	if err := s.checkBlocks(first, n); err != nil {
		return nil, err
	}
	list := make([]unsafe.Pointer, n+1)
	err := s.blocks(first, n, func(first, n C.uint64_t, e *C.ta_error) C.ta_status {
		return C.ta_seq_locate_blocks(s.pool.c, s.c(), first, n, &list[0], e)
	})
	if err != nil {
		return nil, err
	}
	return list[:n], nil
}

// checkBlocks refuses what might take more memory than there is.
func (s *Sequence) checkBlocks(first, n int) error {
	length, err := s.Length()
	if err == nil && (first < 0 || n < 0 || n > length/64+1) {
		return errBlocks
	}
	return err
}

// MemoryRange is memory that a tier has blocks in.
type MemoryRange struct {
	DeviceOrdinal int // of the GPU whose memory it is; -1: the host's
	Data          unsafe.Pointer
	Bytes         uint64
}

// Memory says where a tier's memory is, so that a transfer library can register it. The memory stays until the pool is closed.
//
// Errors: [ErrInvalid], [ErrUnsupported] (the pool has no such tier, the disk tier, or the device tier on a CPU).
func (p *Pool) Memory(tier Tier) (MemoryRange, error) {
	if !p.enter() {
		return MemoryRange{}, errClosedPool
	}
	defer p.leave()
	var r C.ta_memory_range
	r.struct_size = C.uint32_t(unsafe.Sizeof(r))
	e := newError()
	if err := result(C.ta_kv_pool_get_memory(p.c, C.ta_tier(tier), &r, e), e); err != nil {
		return MemoryRange{}, err
	}
	return MemoryRange{DeviceOrdinal: int(r.device_ordinal), Data: r.data, Bytes: uint64(r.bytes)}, nil
}

var errBlocks = refuse(ErrInvalid, "a range of blocks with a negative number, or with more than the sequence has")

func (s *Sequence) blocks(first, n int, call func(first, n C.uint64_t, e *C.ta_error) C.ta_status) error {
	if first < 0 || n < 0 {
		return errBlocks
	}
	if !s.pool.enter() {
		return errClosedPool
	}
	defer s.leave()
	e := newError()
	return result(call(C.uint64_t(first), C.uint64_t(n), e), e)
}

// Descriptor can be read (poll, epoll) while TakeFinishedMoves has tickets. It belongs to the pool.
//
// Errors: [ErrUnsupported] (the pool has no tier below the device, and no namespace had a store), [ErrLimit] (no more
// descriptors).
func (p *Pool) Descriptor() (int, error) {
	if !p.enter() {
		return -1, errClosedPool
	}
	defer p.leave()
	var fd C.int32_t
	e := newError()
	err := result(C.ta_kv_pool_descriptor(p.c, &fd, e), e)
	return int(fd), err
}

// TakeFinishedMoves takes up to most tickets of moves that are finished, each once, the oldest first, from the first Descriptor on:
// see [Move.Ticket].
//
// Errors: [ErrUnsupported] (as [Pool.Descriptor]), [ErrState] (nobody has asked for the descriptor).
func (p *Pool) TakeFinishedMoves(most int) ([]uint64, error) {
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	return take(most, func(piece []uint64, n *C.uint64_t) error {
		e := newError()
		return result(C.ta_move_take_finished(p.c, first[C.ta_ticket](piece), C.uint64_t(len(piece)), n, e), e)
	})
}

// Ticket is the move's number in its pool.
func (m *Move) Ticket() uint64 { return uint64(m.ticket) }

// Residency says where the blocks of a sequence are.
type Residency struct {
	PinnedBlocks                                     int
	DeviceBlocks, PeerBlocks, HostBlocks, DiskBlocks uint64
	DeviceBytes, PeerBytes, HostBytes, DiskBytes     uint64
	DroppedBlocks                                    uint64 // by TierOptions.DropColdest or Sequence.Forget; in no tier
}

// Residency says where the blocks of the sequence are now.
//
// Errors: [ErrStale], [ErrBusy] (it is in an open step).
func (s *Sequence) Residency() (*Residency, error) {
	p := s.pool
	if !p.enter() {
		return nil, errClosedPool
	}
	defer s.leave()
	var r C.ta_residency
	r.struct_size = C.uint32_t(unsafe.Sizeof(r))
	e := newError()
	if err := result(C.ta_seq_residency(p.c, s.c(), &r, e), e); err != nil {
		return nil, err
	}
	return &Residency{int(r.pinned_blocks), uint64(r.device_blocks), uint64(r.peer_blocks), uint64(r.host_blocks),
		uint64(r.disk_blocks), uint64(r.device_bytes), uint64(r.peer_bytes), uint64(r.host_bytes), uint64(r.disk_bytes),
		uint64(r.dropped_blocks)}, nil
}

func (m *Move) look(patience time.Duration, info *C.ta_move_info) error {
	p := m.pool
	if !p.enter() {
		return errClosedPool
	}
	defer p.leave()
	info.struct_size = C.uint32_t(unsafe.Sizeof(*info))
	e := newError()
	if patience > 0 {
		return result(C.ta_move_wait(p.c, m.ticket, C.int64_t(patience.Nanoseconds()), info, e), e)
	}
	return result(C.ta_move_query(p.c, m.ticket, info, e), e)
}

func moveInfo(i *C.ta_move_info) *MoveInfo {
	return &MoveInfo{MoveState(i.state), uint64(i.blocks), uint64(i.moved), uint64(i.present), uint64(i.skipped),
		uint64(i.failed), Code(i.status), int64(i.block)}
}

// Info says how far the move is.
//
// Errors: [ErrStale] (it finished more than 4096 moves ago).
func (m *Move) Info() (*MoveInfo, error) {
	var info C.ta_move_info
	if err := m.look(0, &info); err != nil {
		return nil, err
	}
	return moveInfo(&info), nil
}

// Wait waits for the end of the move, or of ctx. If a block failed or the move was cancelled, it returns an error beside the
// info.
//
// Errors: [ErrStale] (it finished more than 4096 moves ago), [ErrCancelled], and of the first block that failed [ErrTierFull],
// [ErrIO], [ErrCorrupt] and others; of a load from a store [ErrLimit] (the quota), [ErrStale] (the namespace ended),
// [ErrClosed].
func (m *Move) Wait(ctx context.Context) (*MoveInfo, error) {
	var info C.ta_move_info
	err := wait(ctx, func(patience time.Duration) (bool, error) {
		err := m.look(patience, &info)
		return MoveState(info.state) >= MoveDone, err
	})
	if err != nil {
		return nil, err
	}
	switch MoveState(info.state) {
	case MoveFailed:
		err := refuse(Code(info.status), "a block could not move").(*Error)
		err.Block = int64(info.block)
		return moveInfo(&info), err
	case MoveCancelled:
		return moveInfo(&info), refuse(ErrCancelled, "the move was cancelled")
	}
	return moveInfo(&info), nil
}

// Cancel stops the move: blocks that have not moved yet stay where they are.
//
// Errors: [ErrStale] (it finished more than 4096 moves ago).
func (m *Move) Cancel() error {
	p := m.pool
	if !p.enter() {
		return errClosedPool
	}
	defer p.leave()
	e := newError()
	return result(C.ta_move_cancel(p.c, m.ticket, e), e)
}
