package turboattention

// #include "shim.h"
import "C"

import (
	"math"
	"runtime"
	"sync/atomic"
	"unsafe"
)

// Plan makes steps over batches of sequences of one pool. One goroutine at a time.
type Plan struct {
	c    *C.tago_plan // nil: the plan was closed, or never made
	pool *Pool
	busy atomic.Bool // a call runs
	step Step
	seqs []*Sequence // of the open step, so that none of them is collected
}

// Step is what a plan does between Begin and End. It is the plan's: do not keep it.
type Step struct {
	plan *Plan
	open bool
}

// NewPlan creates a plan of the pool.
//
// Errors: those of every call.
func (p *Pool) NewPlan() (*Plan, error) {
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	e := newError()
	var status C.ta_status
	c := C.tago_plan_create(p.c, &status, e)
	if err := result(status, e); err != nil {
		return nil, err
	}
	plan := &Plan{c: c, pool: p}
	plan.step.plan = plan
	closeLater(plan, (*Plan).Close)
	return plan, nil
}

var (
	errBusyPlan   = refuse(ErrBusy, "another call on the plan runs; it takes one at a time")
	errClosedPlan = refuse(ErrClosed, "the plan was closed")
	errNoStep     = refuse(ErrState, "the step is over")
	errCounts     = refuse(ErrInvalid, "a step needs a count for each of its sequences")
	errParents    = refuse(ErrInvalid, "a tree needs a parent for each new token")
	errPositions  = refuse(ErrInvalid, "a step needs a position for each query token")
	errOtherPool  = refuse(ErrInvalid, "a sequence of another pool")
	errClosedSeq  = refuse(ErrStale, "the sequence was closed")
	errTooLarge   = refuse(ErrMemory, "no memory for the list of sequences")
)

func (p *Plan) take() error {
	if !p.busy.CompareAndSwap(false, true) {
		return errBusyPlan
	}
	if p.c == nil {
		p.busy.Store(false)
		return errClosedPlan
	}
	return nil
}

func (p *Plan) result(status C.ta_status) error {
	if status == C.TA_OK {
		return nil
	}
	return errorOf(status, &p.c.err)
}

// Close aborts an open step and ends the plan. While a call on the plan runs, Close fails with [ErrBusy] and does nothing.
func (p *Plan) Close() error {
	if err := p.take(); err != nil {
		if err == errClosedPlan {
			return nil
		}
		return err
	}
	defer p.busy.Store(false)
	runtime.SetFinalizer(p, nil)
	p.over()
	C.tago_plan_destroy(p.c)
	p.c = nil
	return nil
}

// SetStream sets the CUDA stream (a cudaStream_t) on which the plan's later calls enqueue; it must outlive them; nil: the
// legacy default stream.
//
// Errors: [ErrState] (a step is open; the stream is being captured, and the plan ran on another one), [ErrUnsupported] (on a
// CPU).
func (p *Plan) SetStream(stream unsafe.Pointer) error {
	if err := p.take(); err != nil {
		return err
	}
	defer p.busy.Store(false)
	return p.result(C.ta_plan_set_stream(p.c.plan, C.ta_stream(stream), &p.c.err))
}

// Step runs f in a step that brings new[i] tokens to seqs[i] and attends with them. When f returns nil the tokens belong to the
// sequences; when it returns an error or panics the sequences are as before.
//
// Errors: as [Plan.BeginWith] and [Step.End], and what f returns.
func (p *Plan) Step(seqs []*Sequence, new []int, f func(*Step) error) error {
	return p.StepQueries(seqs, new, nil, f)
}

// StepQueries is Step with queries[i] query tokens for seqs[i], the last ones of its length and new tokens. new nil: no new
// tokens; queries nil: as new.
//
// Errors: as [Plan.Step].
func (p *Plan) StepQueries(seqs []*Sequence, new, queries []int, f func(*Step) error) error {
	step, err := p.Begin(seqs, new, queries)
	if err != nil {
		return err
	}
	defer step.abort() // on an error, a panic, or runtime.Goexit
	if err := f(step); err != nil {
		return err
	}
	return step.End()
}

// StepOptions say how a step differs from an ordinary one; a zero field is the default.
type StepOptions struct {
	WaitMillis    int    // how long the begin waits for room; 0: TierOptions.BeginWaitMillis; -1: not at all
	Drafts        Switch // On: EndKeep may keep a part of the new tokens, as a verification of drafts does
	LayersInOrder Switch // On: each layer is attended to before the next one's append, and prompts take less memory
	TreeParent    []int  // [sum of new]: an index among the sequence's new tokens, -1: its last token. Implies Drafts
	// [sum of queries]: the position of each query token in its sequence, in any order; it sees the tokens up to there. nil: the
	// last tokens. Not with TreeParent; Attend takes MaskCausal.
	QueryPositions []int64
}

// Begin opens a step without a function around it: End or Abort it. Arguments are those of StepQueries. A step waits for blocks
// that come from disk, and for room, up to [TierOptions.BeginWaitMillis].
//
// Errors: as [Plan.BeginWith].
func (p *Plan) Begin(seqs []*Sequence, new, queries []int) (*Step, error) {
	return p.BeginWith(seqs, new, queries, nil)
}

// BeginWith is Begin with options, which may be nil.
//
// Errors: [ErrInvalid] (a sequence that is there twice or is of another pool, counts that do not fit), [ErrStale], [ErrBusy] (a
// sequence is in another open step, or moves keep taking the step's blocks to disk), [ErrTierFull], [ErrMemory], [ErrLimit]
// (too many tokens), [ErrState] (a step of the plan is open; queries see what windows have passed, or stand before the gap of a
// shift), [ErrUnsupported] (drafts under universal open scales, trees in a pool that is batch invariant, query positions of a
// partitioned sequence), of blocks on disk [ErrIO] and [ErrCorrupt], on a GPU [ErrNonFinite] (earlier tokens were not finite;
// once). Of partitioned sequences also [ErrMismatch], [ErrCancelled], [ErrTimeout] and [ErrPeerLost].
func (p *Plan) BeginWith(seqs []*Sequence, new, queries []int, options *StepOptions) (*Step, error) {
	if err := p.take(); err != nil {
		return nil, err
	}
	defer p.busy.Store(false)
	n := len(seqs)
	if (new != nil && len(new) != n) || (queries != nil && len(queries) != n) || n > math.MaxInt32 {
		return nil, errCounts
	}
	if C.tago_plan_reserve(p.c, C.uint32_t(n)) == 0 {
		return nil, errTooLarge
	}
	if n > 0 {
		ids := unsafe.Slice(p.c.seqs, n)
		for i, seq := range seqs {
			if seq == nil || seq.pool != p.pool {
				return nil, errOtherPool
			}
			ids[i] = C.ta_seq(seq.id.Load())
		}
		counts(p.c.n_new, new)
		counts(p.c.n_query, queries)
	}
	parents, positions, err := p.options(options, new, queries)
	if err != nil {
		return nil, err
	}
	status := C.tago_begin(p.c, C.uint32_t(n), given(new), given(queries), first[C.int32_t](parents),
		first[C.int64_t](positions))
	if status != C.TA_OK {
		return nil, p.result(status)
	}
	p.seqs = append(p.seqs[:0], seqs...)
	p.step.open = true
	return &p.step, nil
}

// Fills in the options of a step but for the parents of its tokens and the positions of its queries.
func (p *Plan) options(o *StepOptions, new, queries []int) (parents []int32, positions []int64, err error) {
	c := &p.c.step
	c.wait_ms, c.drafts, c.layers_in_order = 0, 0, 0
	if o == nil {
		return nil, nil, nil
	}
	c.wait_ms, c.drafts, c.layers_in_order = limited(o.WaitMillis), C.ta_switch(o.Drafts), C.ta_switch(o.LayersInOrder)
	if queries == nil {
		queries = new
	}
	if o.QueryPositions != nil && len(o.QueryPositions) != sum(queries) {
		return nil, nil, errPositions
	}
	if o.TreeParent == nil {
		return nil, o.QueryPositions, nil
	}
	tokens := sum(new)
	if len(o.TreeParent) != tokens {
		return nil, nil, errParents
	}
	parents = make([]int32, tokens+1) // its pointer is that of memory also where there are none
	for i, parent := range o.TreeParent {
		parents[i] = int32(limited(parent))
	}
	return parents, o.QueryPositions, nil
}

func sum(n []int) int {
	all := 0
	for _, count := range n {
		all += count
	}
	return all
}

func counts(c *C.int32_t, n []int) {
	list := unsafe.Slice(c, len(n))
	for i, count := range n {
		list[i] = int32Of(count)
	}
}

func given(n []int) C.int {
	if n == nil {
		return 0
	}
	return 1
}

// The step has ended: let go of its sequences.
func (p *Plan) over() {
	p.step.open = false
	for i := range p.seqs {
		p.seqs[i] = nil
	}
}

func (s *Step) take() error {
	if err := s.plan.take(); err != nil {
		return err
	}
	if !s.open {
		s.plan.busy.Store(false)
		return errNoStep
	}
	return nil
}

// Append quantizes the new tokens of a layer and appends them: k and v [sum of new, kv heads, head dim] of the layer, the
// sequences one after the other, keys after their rotary embedding. Each layer is appended once in a step.
//
// Errors: [ErrInvalid] (no such layer; on a GPU memory that it cannot reach), [ErrShape], [ErrDType], [ErrState] (the layer has
// its append, or the step is over), [ErrNonFinite] (on a GPU the next begin with the sequence reports it), [ErrMemory].
func (s *Step) Append(layer int, k, v Tensor) error {
	if err := s.take(); err != nil {
		return err
	}
	p := s.plan
	defer p.busy.Store(false)
	if err := k.check(p.pool.context.device); err != nil {
		return err
	}
	if err := v.check(p.pool.context.device); err != nil {
		return err
	}
	k.shape(&p.c.a)
	v.shape(&p.c.b)
	return p.result(C.tago_append(p.c, uint32Of(layer), k.chars(), v.chars()))
}

// AttendOptions of [Step.Attend] and [Context.AttendDense]; a zero field is the default.
type AttendOptions struct {
	LSE     Floats // gets [query tokens, query heads]: natural log of the denominator, scale and sink included
	Mask    Mask
	Scale   float32 // multiplies q.k; default 1/sqrt(head dim)
	Softcap float32 // c: score = c * tanh(score / c)
	Window  int64   // keys a query sees, its own included
	Slopes  Floats  // ALiBi, [query heads]
	Sinks   Floats  // learned sink logits, [query heads]
	Exp     Exp
	P       P
}

func (o *AttendOptions) check(device Device, q *Tensor) error {
	if err := o.LSE.check(device, q.tokens*q.heads); err != nil {
		return err
	}
	if err := o.Slopes.check(device, q.heads); err != nil {
		return err
	}
	return o.Sinks.check(device, q.heads)
}

func (o *AttendOptions) fill(c *C.ta_attend_options) {
	c.mask, c.exp, c.p = C.ta_mask(o.Mask), C.ta_exp(o.Exp), C.ta_p(o.P)
	c.scale, c.softcap, c.window = C.float(o.Scale), C.float(o.Softcap), C.int64_t(o.Window)
}

// Attend attends with the step's queries to all tokens of their sequences, the new ones included.
//
//	q        [sum of queries, query heads, head dim]
//	out      as q; is written, and shares no memory with q
//	options  may be nil
//
// Errors: [ErrInvalid] (no such layer, an option outside its range, outputs that overlap; on a GPU memory that it cannot
// reach), [ErrShape], [ErrDType], [ErrState] (the layer lacks its append), [ErrNonFinite] (on a CPU), [ErrMemory],
// [ErrUnsupported] (batch invariance, shifts and query positions exclude some options; on a GPU more than 16 query heads for
// each kv head of a token tree, or where attention is observed), on a GPU [ErrLimit] (too many rows and pages). Of partitioned
// sequences also [ErrMismatch], [ErrCancelled], [ErrTimeout] and [ErrPeerLost].
func (s *Step) Attend(layer int, q, out Tensor, options *AttendOptions) error {
	if err := s.take(); err != nil {
		return err
	}
	p := s.plan
	defer p.busy.Store(false)
	var o AttendOptions
	if options != nil {
		o = *options
	}
	device := p.pool.context.device
	if err := q.check(device); err != nil {
		return err
	}
	if err := out.check(device); err != nil {
		return err
	}
	if err := o.check(device, &q); err != nil {
		return err
	}
	q.shape(&p.c.a)
	out.shape(&p.c.b)
	o.fill(&p.c.options)
	return p.result(C.tago_attend(p.c, uint32Of(layer), q.chars(), out.chars(), o.LSE.c(), o.Slopes.c(), o.Sinks.c()))
}

// End commits: the new tokens belong to their sequences. If it fails, the step is still open.
//
// Errors: [ErrState] (a layer lacks its append or the step is over), [ErrInvalid] (the tokens are a tree), [ErrMemory],
// [ErrDevice]. Of partitioned sequences also [ErrMismatch], [ErrCancelled], [ErrTimeout] and [ErrPeerLost].
func (s *Step) End() error { return s.end(nil) }

// EndKeep commits a part of the new tokens of a step with [StepOptions.Drafts]: keep has for each sequence 1 + the index, among
// its new tokens, of the last token that stays. This token and its ancestors stay; 0: none stays. If it fails, the step is
// still open.
//
// Errors: as [Step.End]; [ErrInvalid] also of numbers in keep that are too large, and of a step without drafts.
func (s *Step) EndKeep(keep []int) error {
	if keep == nil {
		keep = []int{}
	}
	return s.end(keep)
}

func (s *Step) end(keep []int) error {
	if err := s.take(); err != nil {
		return err
	}
	p := s.plan
	defer p.busy.Store(false)
	if keep != nil {
		if len(keep) != len(p.seqs) {
			return errCounts
		}
		counts(p.c.n_new, keep)
	}
	if status := C.tago_end(p.c, given(keep)); status != C.TA_OK {
		return p.result(status)
	}
	p.over()
	return nil
}

// Abort gives the step up: sequences are as before Begin.
//
// Errors: [ErrState] (the step is over).
func (s *Step) Abort() error {
	if err := s.take(); err != nil {
		return err
	}
	p := s.plan
	defer p.busy.Store(false)
	p.over()
	return p.result(C.tago_abort(p.c))
}

func (s *Step) abort() {
	if s.open {
		_ = s.Abort()
	}
}
