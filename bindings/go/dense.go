package turboattention

// #include "shim.h"
import "C"

import (
	"runtime"
	"sync/atomic"
	"unsafe"
)

// DenseOptions of [Context.AttendDense]; a zero field is the default.
type DenseOptions struct {
	Variant      DenseVariant
	Batch        int     // sequences; default 1, or what the offsets say
	QOffsets     []int64 // [batch + 1] prefix sums of query tokens; nil: split evenly
	KOffsets     []int64 // [batch + 1] prefix sums of keys; nil: split evenly
	VGranularity Granularity
	NonFinite    NonFinite
	Attend       AttendOptions
	Stream       unsafe.Pointer // cudaStream_t of a GPU context
	GroupSize    int            // of DenseDistr: channels that share a score, 2, 3 or 4; default 2
}

var errOffsets = refuse(ErrInvalid, "offsets need one number more than there are sequences")

// AttendDense attends over plain tensors, without a pool: q and out [query tokens, query heads, head dim], k and v [keys, kv
// heads, head dim]. It is quantized to INT8 on the way, or channels are grouped (DenseDistr). options may be nil.
//
// Errors: [ErrInvalid] (an option outside its range, offsets that are no prefix sums, outputs that overlap; on a GPU memory
// that it cannot reach), [ErrShape], [ErrDType], [ErrNonFinite] (on a GPU a later call), [ErrState] (on a GPU: the stream is
// being captured), [ErrMemory], [ErrUnsupported] (channels; a stream on a CPU; a driver without memory pools).
func (c *Context) AttendDense(q, k, v, out Tensor, options *DenseOptions) error {
	if !c.enter() {
		return errClosedContext
	}
	defer c.leave()
	var o DenseOptions
	if options != nil {
		o = *options
	}
	for _, offsets := range [][]int64{o.QOffsets, o.KOffsets} {
		if offsets == nil {
			continue
		}
		if o.Batch == 0 {
			o.Batch = len(offsets) - 1
		}
		if len(offsets) < 2 || len(offsets) != o.Batch+1 {
			return errOffsets
		}
	}
	var shapes [4]C.ta_tensor
	for i, t := range [...]*Tensor{&q, &k, &v, &out} {
		if err := t.check(c.device); err != nil {
			return err
		}
		t.shape(&shapes[i])
	}
	if err := o.Attend.check(c.device, &q); err != nil {
		return err
	}
	co := C.ta_dense_options{variant: C.ta_dense_variant(o.Variant), batch: uint32Of(o.Batch),
		v_granularity: C.ta_granularity(o.VGranularity), nonfinite: C.ta_nonfinite(o.NonFinite), stream: C.ta_stream(o.Stream),
		group_size: uint32Of(o.GroupSize)}
	var ca C.ta_attend_options
	o.Attend.fill(&ca)
	a := &o.Attend
	e := newError()
	return result(C.tago_attend_dense(c.c, &shapes[0], q.chars(), k.chars(), v.chars(), out.chars(), a.LSE.c(), &co, &ca,
		first[C.int64_t](o.QOffsets), first[C.int64_t](o.KOffsets), a.Slopes.c(), a.Sinks.c(), e), e)
}

// State is attention of some queries over a set of keys, with its LSE.
type State struct {
	Out Tensor // [tokens, heads, head dim]
	LSE Floats // [tokens, heads]
}

var errStates = refuse(ErrInvalid, "1 to 64 states, all of one shape")

// MergeStates merges attention of the same queries over disjoint sets of keys, in the order of the list, into attention over
// all of them. lse may be none; stream is a cudaStream_t of a GPU context, else nil.
//
// Errors: [ErrInvalid] (the number of states, outputs that overlap; on a GPU memory that it cannot reach), [ErrShape],
// [ErrDType], [ErrNonFinite] (on a CPU), [ErrUnsupported] (channels; a stream on a CPU), on a GPU [ErrState] (no stream while
// one is captured that synchronizes with the default stream).
func (c *Context) MergeStates(states []State, out Tensor, lse Floats, stream unsafe.Pointer) error {
	if !c.enter() {
		return errClosedContext
	}
	defer c.leave()
	n := len(states)
	if n < 1 || n > 64 {
		return errStates
	}
	var shapes [65]C.ta_tensor
	var data, lses C.tago_pointers
	for i := range states {
		s := &states[i]
		if err := s.Out.check(c.device); err != nil {
			return err
		}
		if err := s.LSE.check(c.device, s.Out.tokens*s.Out.heads); err != nil {
			return err
		}
		s.Out.shape(&shapes[i])
		data.at[i] = s.Out.chars()
		lses.at[i] = (*C.char)(s.LSE.data)
	}
	if err := out.check(c.device); err != nil {
		return err
	}
	if err := lse.check(c.device, out.tokens*out.heads); err != nil {
		return err
	}
	out.shape(&shapes[n])
	data.at[n], lses.at[n] = out.chars(), (*C.char)(lse.data)
	e := newError()
	return result(C.tago_merge_states(c.c, C.uint32_t(n), &shapes[0], data, lses, C.ta_stream(stream), e), e)
}

// Calibrator finds the bits of kv heads: it ranks those of each layer for 4 or 2 bits, or chooses by costs. One goroutine at a time.
type Calibrator struct {
	c       *C.ta_calibrator // nil: the calibrator was closed, or never made
	context *Context
	heads   int // of all layers
	busy    atomic.Bool
}

// NewCalibrator creates a calibrator.
//
// Errors: [ErrInvalid] (layers, heads), [ErrUnsupported] (channels).
func (c *Context) NewCalibrator(layers, kvHeads, headDim int) (*Calibrator, error) {
	if !c.enter() {
		return nil, errClosedContext
	}
	defer c.leave()
	k := &Calibrator{context: c, heads: layers * kvHeads}
	e := newError()
	status := C.ta_calibrator_create(c.c, uint32Of(layers), uint32Of(kvHeads), uint32Of(headDim), &k.c, e)
	if err := result(status, e); err != nil {
		return nil, err
	}
	closeLater(k, (*Calibrator).Close)
	return k, nil
}

// NewCalibratorFor creates a calibrator for the shape of a pool with these options, whose layers may differ. Other options are
// ignored.
//
// Errors: [ErrInvalid], [ErrUnsupported].
func (c *Context) NewCalibratorFor(options PoolOptions) (*Calibrator, error) {
	if !c.enter() {
		return nil, errClosedContext
	}
	defer c.leave()
	heads, _ := mapSizes(options.Layers, options.KVHeads, options.HeadDim, options.LayerGroups)
	k := &Calibrator{context: c, heads: int(heads)}
	var co C.ta_kv_pool_options
	groups := options.shape(&co)
	e := newError()
	status := C.tago_calibrator_create_for(c.c, &co, first[C.ta_layer_group](groups), &k.c, e)
	if err := result(status, e); err != nil {
		return nil, err
	}
	closeLater(k, (*Calibrator).Close)
	return k, nil
}

var (
	errBusyCalibrator   = refuse(ErrBusy, "another call on the calibrator runs; it takes one at a time")
	errClosedCalibrator = refuse(ErrClosed, "the calibrator was closed")
)

func (k *Calibrator) take() error {
	if !k.busy.CompareAndSwap(false, true) {
		return errBusyCalibrator
	}
	if k.c == nil {
		k.busy.Store(false)
		return errClosedCalibrator
	}
	return nil
}

// Close ends the calibrator. While a call on it runs it fails with [ErrBusy].
func (k *Calibrator) Close() error {
	if err := k.take(); err != nil {
		if err == errClosedCalibrator {
			return nil
		}
		return err
	}
	defer k.busy.Store(false)
	runtime.SetFinalizer(k, nil)
	C.ta_calibrator_destroy(k.c)
	k.c = nil
	return nil
}

// Observe takes k and v of some tokens of a layer into account: [tokens, kv heads, head dim].
//
// Errors: [ErrInvalid] (no such layer), [ErrShape], [ErrDType], [ErrNonFinite], [ErrMemory].
func (k *Calibrator) Observe(layer int, keys, values Tensor) error {
	if err := k.take(); err != nil {
		return err
	}
	defer k.busy.Store(false)
	var shapes [2]C.ta_tensor
	for i, t := range [...]*Tensor{&keys, &values} {
		if t.wrong != nil {
			return t.wrong
		}
		t.shape(&shapes[i])
	}
	e := newError()
	return result(C.tago_calibrator_observe(k.c, uint32Of(layer), &shapes[0], keys.chars(), values.chars(), e), e)
}

var errCosts = refuse(ErrInvalid, "costs are [layers, kv heads, 3]")

// Choose gives the maps of least total cost whose blocks have at most blockBytes; their priorities are empty. Costs are
// [layers, kv heads of the layer, 3]: with 8 bits, with 4, and with 2; +Inf: never with these bits.
//
// Errors: [ErrInvalid] (lists of another length, a cost that is NaN or -Inf, a head whose costs are all infinite, blocks
// smaller than the costs allow: the error's bytes say by how much).
func (k *Calibrator) Choose(keyCost, valueCost []float32, blockBytes uint64) (*BitMaps, error) {
	if err := k.take(); err != nil {
		return nil, err
	}
	defer k.busy.Store(false)
	n := k.heads
	if len(keyCost) != 3*n || len(valueCost) != 3*n {
		return nil, errCosts
	}
	m := &BitMaps{KBits: make([]uint8, n), VBits: make([]uint8, n)}
	e := newError()
	status := C.ta_calibrator_choose(k.c, first[C.float](keyCost), first[C.float](valueCost), C.uint64_t(blockBytes),
		first[C.uint8_t](m.KBits), first[C.uint8_t](m.VBits), e)
	if err := result(status, e); err != nil {
		return nil, err
	}
	return m, nil
}

// BitMaps are maps for [PoolOptions] and the priorities behind them, each [layers, kv heads of the layer].
type BitMaps struct {
	KBits, VBits         []uint8
	KPriority, VPriority []float32
}

// Finish ranks: low heads of each layer get 2 bits, for K and for V each, the others 4.
//
// Errors: [ErrInvalid] (more heads than there are), [ErrState] (a layer was never observed).
func (k *Calibrator) Finish(low int) (*BitMaps, error) {
	if err := k.take(); err != nil {
		return nil, err
	}
	defer k.busy.Store(false)
	n := k.heads
	m := &BitMaps{make([]uint8, n), make([]uint8, n), make([]float32, n), make([]float32, n)}
	e := newError()
	status := C.ta_calibrator_finish(k.c, uint32Of(low), first[C.uint8_t](m.KBits), first[C.uint8_t](m.VBits),
		first[C.float](m.KPriority), first[C.float](m.VPriority), e)
	if err := result(status, e); err != nil {
		return nil, err
	}
	return m, nil
}
