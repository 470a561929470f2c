package turboattention

// #include <stdlib.h>
// #include "shim.h"
import "C"

import (
	"context"
	"errors"
	"io"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"
)

// Sequence is a list of tokens in a pool.
type Sequence struct {
	pool *Pool
	id   atomic.Uint64 // 0 once it was closed
}

func (p *Pool) sequence(id C.ta_seq) *Sequence {
	s := &Sequence{pool: p}
	s.id.Store(uint64(id))
	closeLater(s, (*Sequence).Close)
	return s
}

// NewSequence creates an empty sequence.
//
// Errors: [ErrLimit] (the pool has as many as it may).
func (p *Pool) NewSequence() (*Sequence, error) {
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	var id C.ta_seq
	e := newError()
	if err := result(C.ta_seq_create(p.c, &id, e), e); err != nil {
		return nil, err
	}
	return p.sequence(id), nil
}

// ID is the number of the sequence in its pool, which events and files name; 0 once it was closed.
func (s *Sequence) ID() uint64 { return s.id.Load() }

// Close ends the sequence, also while it is in an open step: that goes on, and commits nothing to it.
func (s *Sequence) Close() error {
	id := s.id.Swap(0)
	if id == 0 {
		return nil
	}
	runtime.SetFinalizer(s, nil)
	if !s.pool.enter() {
		return nil // it went with its pool
	}
	defer s.pool.leave()
	e := newError()
	err := result(C.ta_seq_release(s.pool.c, C.ta_seq(id), e), e)
	if err != nil && (err.(*Error).Code == ErrStale || err.(*Error).Code == ErrClosed) {
		return nil // moved to another rank, or gone with its pool
	}
	return err
}

// leave ends a call that has entered the pool. Until then it keeps the sequence from being collected. Otherwise, after the last
// use in the call, a finalizer could release the sequence while the call runs.
func (s *Sequence) leave() { s.pool.leave() }

func (s *Sequence) c() C.ta_seq { return C.ta_seq(s.id.Load()) }

// Fork creates a sequence with the same tokens, which shares their blocks.
//
// Errors: [ErrStale], [ErrBusy] (it is in an open step), [ErrLimit] (the pool has as many as it may), [ErrState] (it is
// partitioned).
func (s *Sequence) Fork() (*Sequence, error) {
	p := s.pool
	if !p.enter() {
		return nil, errClosedPool
	}
	defer s.leave()
	var id C.ta_seq
	e := newError()
	if err := result(C.ta_seq_fork(p.c, s.c(), &id, e), e); err != nil {
		return nil, err
	}
	return p.sequence(id), nil
}

// Truncate drops all tokens from length on.
//
// Errors: [ErrInvalid] (more than the length), [ErrState] (a length inside a block that was dropped, or windows have passed
// what later tokens need), [ErrStale], [ErrBusy] (it is in an open step), [ErrUnsupported] (a partitioned sequence with
// universal open scales).
func (s *Sequence) Truncate(length int) error {
	p := s.pool
	if !p.enter() {
		return errClosedPool
	}
	defer s.leave()
	e := newError()
	return result(C.ta_seq_truncate(p.c, s.c(), C.int64_t(length), e), e)
}

// Forget forgets the tokens of the blocks that are wholly in [first, first+n), and returns the number of these tokens.
// Positions and the length stay, attention skips the tokens, and blocks that nobody else has are freed. A block that is only
// partly in the range keeps its tokens, and so does the last block until it is full. Later calls that need a forgotten block
// fail with [ErrState]: Save,
// Export, Publish, transfers, and Truncate to a length inside of it.
//
// Errors: [ErrInvalid] (tokens beyond the sequence), [ErrStale], [ErrBusy] (it is in an open step), [ErrMemory].
func (s *Sequence) Forget(first, n int) (int, error) {
	p := s.pool
	if !p.enter() {
		return 0, errClosedPool
	}
	defer s.leave()
	var forgotten C.int64_t
	e := newError()
	err := result(C.ta_seq_forget(p.c, s.c(), C.int64_t(first), C.int64_t(n), &forgotten, e), e)
	return int(forgotten), err
}

// Shift forgets the tokens [first, first+n), as Forget does, and closes the gap: attention sees the tokens before it n positions
// later. first and n are multiples of 64. The length stays, and a new token has the position that the length says, in q and in
// k. Stored keys are not changed; docs/shift.md explains it. Later steps with a query before the gap or in it fail with
// [ErrState].
//
// Errors: [ErrInvalid] (no multiples of 64, or tokens beyond the sequence), [ErrStale], [ErrBusy] (it is in an open step),
// [ErrMemory], [ErrUnsupported] (the pool was made without [PoolOptions.Rotary], or with windows, batch invariance or
// [EvictAttention]; or the sequence is partitioned).
func (s *Sequence) Shift(first, n int) error {
	p := s.pool
	if !p.enter() {
		return errClosedPool
	}
	defer s.leave()
	e := newError()
	return result(C.ta_seq_shift(p.c, s.c(), C.int64_t(first), C.int64_t(n), e), e)
}

// Reserve promises room in the device tier for the next tokens of the sequence: steps that bring no more than these, of any
// size, do not wait for room or fail for lack of it. The promise ends with the sequence, a Suspend, or the next call, which
// replaces it; 0 tokens end it. A fork has none. It keeps a thread of the system while it waits;
// [Sequence.ReserveContext] does not.
//
//	waitMillis  how long the call may wait for room; 0: as a step does (TierOptions.BeginWaitMillis); -1: not at all
//
// Errors: [ErrTierFull] (there is no room; the former promise holds), [ErrInvalid], [ErrStale], [ErrBusy] (it is in an open
// step, or moves take its blocks to disk as fast as they are brought back), [ErrLimit] (2^40 tokens), [ErrMemory], of blocks on
// disk [ErrIO] and [ErrCorrupt].
func (s *Sequence) Reserve(tokens, waitMillis int) error {
	p := s.pool
	if !p.enter() {
		return errClosedPool
	}
	defer s.leave()
	e := newError()
	return result(C.ta_seq_reserve(p.c, s.c(), C.int64_t(tokens), limited(waitMillis), e), e)
}

// ReserveContext is Reserve that waits until there is room, or ctx ends: give ctx an end, since room may never come. Calls on one
// pool get room in their order, which is that of goroutines that wait for a channel. The first one looks for room again and
// again; the others take no thread of the system. Steps, and Reserve, which wait in the library, get room before it. Tokens
// that an empty device tier has no room for are refused at once.
//
// Errors: as [Sequence.Reserve], and ctx's.
func (s *Sequence) ReserveContext(ctx context.Context, tokens int) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	p := s.pool
	select {
	case <-ctx.Done():
		return ctx.Err()
	case p.first <- struct{}{}:
	}
	defer func() { <-p.first }()
	possible := false
	return wait(ctx, func(time.Duration) (bool, error) {
		// 1 ms: it gives way to steps that have waited longer, as a call that does not wait would not.
		err := s.Reserve(tokens, 1)
		if !errors.Is(err, ErrTierFull) {
			return true, err
		}
		if !possible {
			need, failed := p.Fit([]*Sequence{s}, []int{tokens})
			if failed != nil {
				return true, failed
			}
			stats, failed := p.Stats()
			if failed != nil {
				return true, failed
			}
			if need.BytesNew > stats.BytesBudget {
				return true, err
			}
			possible = true
		}
		return false, nil
	})
}

// SetPriority says how early the sequence's blocks leave a full tier under [EvictPriority]: the lower, the earlier; 0 at first.
//
// Errors: [ErrStale].
func (s *Sequence) SetPriority(priority int32) error {
	p := s.pool
	if !p.enter() {
		return errClosedPool
	}
	defer s.leave()
	e := newError()
	return result(C.ta_seq_set_priority(p.c, s.c(), C.int32_t(priority), e), e)
}

// Length is the number of tokens; those of an open step do not count.
//
// Errors: [ErrStale].
func (s *Sequence) Length() (int, error) {
	p := s.pool
	if !p.enter() {
		return 0, errClosedPool
	}
	defer s.leave()
	var n C.int64_t
	e := newError()
	err := result(C.ta_seq_length(p.c, s.c(), &n, e), e)
	return int(n), err
}

// Verify recomputes the hash of every full page, in whatever tier.
//
// Errors: [ErrCorrupt] (names the first bad page), [ErrIO] (a block on disk cannot be read), [ErrStale], [ErrBusy] (it is in an
// open step).
func (s *Sequence) Verify() error {
	p := s.pool
	if !p.enter() {
		return errClosedPool
	}
	defer s.leave()
	e := newError()
	return result(C.ta_seq_verify(p.c, s.c(), e), e)
}

// Save writes the sequence to a new file. If Save returns nil, the file is complete and synced; otherwise there is no file.
// report may be nil.
//
// Errors: [ErrInvalid] (the path exists), [ErrIO], [ErrTierFull] (no space on disk), [ErrCorrupt], [ErrCancelled], [ErrState]
// (blocks were dropped, or the sequence is partitioned), [ErrStale], [ErrBusy] (it is in an open step).
func (s *Sequence) Save(path string, report Progress) error {
	p := s.pool
	if !p.enter() {
		return errClosedPool
	}
	defer s.leave()
	cpath, err := cPath(path)
	if err != nil {
		return err
	}
	defer C.free(unsafe.Pointer(cpath))
	return report.with(func(handle C.uintptr_t) error {
		e := newError()
		return result(C.tago_seq_save(p.c, s.c(), cpath, handle, e), e)
	})
}

// LoadSequence creates a sequence from a file, all of it or nothing. The pool must have the shape and settings of the one that
// saved it.
// report may be nil.
//
// Errors: [ErrInvalid] (a file of another pool, no regular file), [ErrCorrupt], [ErrIO] (a symbolic link, too),
// [ErrUnsupported] (another version of the format), [ErrCancelled], [ErrTierFull], [ErrLimit] (too many sequences, or salts of
// namespaces that files named), [ErrMemory].
func (p *Pool) LoadSequence(path string, report Progress) (*Sequence, error) {
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	cpath, err := cPath(path)
	if err != nil {
		return nil, err
	}
	defer C.free(unsafe.Pointer(cpath))
	var id C.ta_seq
	err = report.with(func(handle C.uintptr_t) error {
		e := newError()
		return result(C.tago_seq_load(p.c, cpath, handle, &id, e), e)
	})
	if err != nil {
		return nil, err
	}
	return p.sequence(id), nil
}

// Export writes the bytes of the file that [Sequence.Save] would write, for programs that transport sequences by their own
// means, and returns their number. The beginning, at offset 0, is written last. An error of to stops the work; the call returns
// it. to may use this package, but not the same pool.
//
// Errors: [ErrCorrupt], [ErrState] (blocks were dropped, or the sequence is partitioned), [ErrStale], [ErrBusy] (it is in an
// open step), [ErrIO] (a block on disk cannot be read).
func (s *Sequence) Export(to io.WriterAt) (int64, error) {
	p := s.pool
	if !p.enter() {
		return 0, errClosedPool
	}
	defer s.leave()
	if to == nil {
		return 0, refuse(ErrInvalid, "to is nil")
	}
	var n C.uint64_t
	err := with(to, func(handle C.uintptr_t) error {
		e := newError()
		return result(C.tago_seq_export(p.c, s.c(), handle, &n, e), e)
	})
	return int64(n), err
}

// ImportSequence creates a sequence from the bytes of an export or of a file, all of it or nothing, as [Pool.LoadSequence]
// does.
//
// Errors: as [Pool.LoadSequence], but for those of files.
func (p *Pool) ImportSequence(data []byte) (*Sequence, error) {
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	start := new(byte) // never nil, also where there are no bytes
	if len(data) > 0 {
		start = &data[0]
	}
	var id C.ta_seq
	e := newError()
	if err := result(C.ta_seq_import(p.c, unsafe.Pointer(start), C.uint64_t(len(data)), &id, e), e); err != nil {
		return nil, err
	}
	return p.sequence(id), nil
}

// Save writes all sequences of the pool to a new file; published: published blocks, too. report may be nil.
//
// Errors: as [Sequence.Save]; [ErrBusy] (a sequence is in an open step), [ErrLimit] (an index of more than 4 GiB).
func (p *Pool) Save(path string, published bool, report Progress) error {
	if !p.enter() {
		return errClosedPool
	}
	defer p.leave()
	cpath, err := cPath(path)
	if err != nil {
		return err
	}
	defer C.free(unsafe.Pointer(cpath))
	var flags C.ta_save_flags
	if published {
		flags = C.TA_SAVE_PUBLISHED
	}
	return report.with(func(handle C.uintptr_t) error {
		e := newError()
		return result(C.tago_kv_pool_save(p.c, cpath, flags, handle, e), e)
	})
}

// Load adds the sequences of a file to the pool, all or none, by the ids that they had where they were saved. report may be nil.
//
// Errors: as [Pool.LoadSequence].
func (p *Pool) Load(path string, report Progress) (map[uint64]*Sequence, error) {
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	cpath, err := cPath(path)
	if err != nil {
		return nil, err
	}
	defer C.free(unsafe.Pointer(cpath))
	var n C.uint64_t
	e := newError()
	if err := result(C.tago_kv_pool_load(p.c, cpath, 0, nil, 0, &n, e), e); err != nil {
		return nil, err
	}
	loaded := make([]C.ta_loaded_seq, n+1) // never empty: that would ask for the number again
	err = report.with(func(handle C.uintptr_t) error {
		e := newError()
		return result(C.tago_kv_pool_load(p.c, cpath, handle, &loaded[0], n, &n, e), e)
	})
	if err != nil {
		return nil, err
	}
	seqs := make(map[uint64]*Sequence, n)
	for _, l := range loaded[:n] {
		seqs[uint64(l.saved)] = p.sequence(l.loaded)
	}
	return seqs, nil
}
