package turboattention

// #include <stdlib.h>
// #include "shim.h"
import "C"

import (
	"io"
	"runtime"
	"sync/atomic"
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
	runtime.SetFinalizer(s, (*Sequence).Close)
	return s
}

// NewSequence creates an empty sequence. [ErrLimit]: the pool has as many as it may.
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

func (s *Sequence) c() C.ta_seq { return C.ta_seq(s.id.Load()) }

// Fork creates a sequence with the same tokens, sharing their blocks. [ErrBusy]: it is in an open step.
func (s *Sequence) Fork() (*Sequence, error) {
	p := s.pool
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	var id C.ta_seq
	e := newError()
	if err := result(C.ta_seq_fork(p.c, s.c(), &id, e), e); err != nil {
		return nil, err
	}
	return p.sequence(id), nil
}

// Truncate drops all tokens from length on.
func (s *Sequence) Truncate(length int) error {
	p := s.pool
	if !p.enter() {
		return errClosedPool
	}
	defer p.leave()
	e := newError()
	return result(C.ta_seq_truncate(p.c, s.c(), C.int64_t(length), e), e)
}

// Forget forgets the tokens of the blocks that are wholly in [first, first+n), and returns how many those were. Positions and the
// length stay, attention passes over them, and blocks that nobody else has are freed. Tokens of a block that is only in part in the
// range stay, as do those of the last block until it is full. [ErrInvalid]: tokens beyond the sequence. Later calls that would need
// such a block fail with [ErrState]: Save, Export, Publish, transfers, and Truncate to a length inside of it.
func (s *Sequence) Forget(first, n int) (int, error) {
	p := s.pool
	if !p.enter() {
		return 0, errClosedPool
	}
	defer p.leave()
	var forgotten C.int64_t
	e := newError()
	err := result(C.ta_seq_forget(p.c, s.c(), C.int64_t(first), C.int64_t(n), &forgotten, e), e)
	return int(forgotten), err
}

// Shift forgets the tokens [first, first+n), as Forget does, and closes the gap: attention sees the tokens before it n positions
// later. first and n are multiples of 64. The length stays, and a new token has the position that it says, in q and in k. Stored
// keys are not changed; docs/shift.md explains it. [ErrUnsupported]: the pool was made without [PoolOptions.Rotary], or with
// windows, [Numerics.BatchInvariant] or [EvictAttention]; or the sequence is partitioned. Later steps with a query before the gap
// or in it fail with [ErrState].
func (s *Sequence) Shift(first, n int) error {
	p := s.pool
	if !p.enter() {
		return errClosedPool
	}
	defer p.leave()
	e := newError()
	return result(C.ta_seq_shift(p.c, s.c(), C.int64_t(first), C.int64_t(n), e), e)
}

// Reserve promises room in the device tier for the next tokens of the sequence: steps that bring no more, of any size, do not wait
// for room or fail for lack of it. The promise ends with the sequence, a Suspend, or the next call, which replaces it; 0 tokens
// end it. A fork has none.
//
//	waitMillis  how long the call may wait for room; 0: as a step does (TierOptions.BeginWaitMillis); -1: not at all
//
// [ErrTierFull]: there is no room, and the former promise holds. [ErrBusy]: it is in an open step.
func (s *Sequence) Reserve(tokens, waitMillis int) error {
	p := s.pool
	if !p.enter() {
		return errClosedPool
	}
	defer p.leave()
	e := newError()
	return result(C.ta_seq_reserve(p.c, s.c(), C.int64_t(tokens), limited(waitMillis), e), e)
}

// SetPriority says how early the sequence's blocks leave a full tier under [EvictPriority]: the lower the earlier; 0 at first.
func (s *Sequence) SetPriority(priority int32) error {
	p := s.pool
	if !p.enter() {
		return errClosedPool
	}
	defer p.leave()
	e := newError()
	return result(C.ta_seq_set_priority(p.c, s.c(), C.int32_t(priority), e), e)
}

// Length is the number of tokens; those of an open step do not count.
func (s *Sequence) Length() (int, error) {
	p := s.pool
	if !p.enter() {
		return 0, errClosedPool
	}
	defer p.leave()
	var n C.int64_t
	e := newError()
	err := result(C.ta_seq_length(p.c, s.c(), &n, e), e)
	return int(n), err
}

// Verify recomputes the hash of every full page, wherever it is. [ErrCorrupt] names the first bad one.
func (s *Sequence) Verify() error {
	p := s.pool
	if !p.enter() {
		return errClosedPool
	}
	defer p.leave()
	e := newError()
	return result(C.ta_seq_verify(p.c, s.c(), e), e)
}

// Save writes the sequence to a new file, which is there, complete and synced, when Save returns nil, and not there else.
// report may be nil.
func (s *Sequence) Save(path string, report Progress) error {
	p := s.pool
	if !p.enter() {
		return errClosedPool
	}
	defer p.leave()
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

// LoadSequence makes a sequence of a file, all of it or nothing. The pool has the shape and settings of the one that saved it.
// report may be nil.
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

// Export writes the bytes of the file that [Sequence.Save] would write, for programs that carry sequences by means of their own, and
// returns how many there are. The beginning, at offset 0, is written last. An error of to stops the work; the call returns it. to may
// use this package, but not the same pool.
func (s *Sequence) Export(to io.WriterAt) (int64, error) {
	p := s.pool
	if !p.enter() {
		return 0, errClosedPool
	}
	defer p.leave()
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

// ImportSequence makes a sequence of the bytes of an export or of a file, all of them or nothing, as [Pool.LoadSequence] does.
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

// Save writes all sequences of the pool to a new file; published: what is published, too. report may be nil.
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
