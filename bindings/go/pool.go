package turboattention

// #include <stdlib.h>
// #include "shim.h"
import "C"

import (
	"math"
	"runtime"
	"time"
	"unsafe"
)

// Numerics are the numeric settings of a pool; a zero field is decided by the profile. docs/numerics.md explains them.
type Numerics struct {
	Profile        Profile
	KGranularity   Granularity
	VGranularity   Granularity
	OpenScale      OpenScale
	VExponents     Switch
	FractionalZero Switch
	VSearch        Switch
	Hadamard       Switch
	SinkBlocks     int // blocks at the start of a sequence that stay 8 bits; -1: none
	Exp            Exp
	P              P
	NonFinite      NonFinite
	HadamardSeed   uint64
	KOffset        []float32 // [layers, kv heads, head dim] subtracted from K, each layer with its own shape
	KTurning       Switch
	KSearch        Switch
	UnitSlope      Switch
	QBits          uint32 // of queries in decode, against K at 8 bits: 8 or 15; 0: the profile's
	BatchInvariant Switch // a token's results have the same bits in every step; off by default
}

// TierOptions are the memory below the device tier; docs/tiers.md explains them.
type TierOptions struct {
	HostNode         int    // 1 + a NUMA node
	HostBytes        uint64 // 0: no host tier
	DiskBytes        uint64 // 0: no disk tier
	DiskFolder       string // of a file without a name
	DiskPath         string // a disk tier that lasts
	HighPercent      int
	LowPercent       int
	Eviction         Eviction
	DropColdest      Switch
	BeginWaitMillis  int // how long a begin waits for room and for moves; -1: not at all
	Staging          Staging
	FallingPrecision Switch
	Peer             *Context // of another device, whose memory holds a peer tier
	PeerBytes        uint64   // its budget; 0: no peer tier
}

// PoolOptions of [Context.NewPool]. Layers, KVHeads, HeadDim and BudgetBytes are required; any other field that is zero has its
// default.
type PoolOptions struct {
	Layers       int
	KVHeads      int
	HeadDim      int          // channels of q and k: 16 to 256, a multiple of 8
	VHeadDim     int          // of v and of the output; default HeadDim
	LayerGroups  []LayerGroup // ranges of layers with a window or a shape of their own, of distinct layers
	Bits         int          // 8, 4 or 2; default 4
	KBits, VBits []uint8      // [layers, kv heads of the layer], in place of Bits
	BudgetBytes  uint64       // of the device tier
	MaxSequences int
	Numerics     Numerics
	Tiers        *TierOptions // nil: the device tier alone
	Rotary       *Rotary      // nil: sequences cannot be shifted
}

// Pool is a cache: the blocks of many sequences in one budget.
type Pool struct {
	use
	c       *C.ta_kv_pool
	context *Context
	peer    *Context      // of its peer tier, or nil
	first   chan struct{} // holds one value while a ReserveContext is the first of the line
}

var errMaps = refuse(ErrShape, "a map of bits or offsets does not have the length that layers, heads and channels give")

// LayerGroup is layers [First, First+Layers): a window, and a shape that differs from the pool's.
type LayerGroup struct {
	First, Layers int
	Window        int64 // keys that a query of these layers sees at most; 0: no limit
	KVHeads       int   // 1 to 1024; 0: the pool's
	HeadDim       int   // channels of q and k: 16 to 256, a multiple of 8; 0: the pool's
	VHeadDim      int   // of v and of the output; 0: HeadDim, and where that is 0, too, the pool's
}

// Rotary is the rotary embedding that callers apply to q and k, for [Sequence.Shift]: at position p pair i (x, y) of a head has
// become (x cos(a p) - y sin(a p), x sin(a p) + y cos(a p)), where a is the pair's angle.
type Rotary struct {
	Pairs    RotaryPairs
	Channels int       // the first ones of a head, which are turned: even, 2 to the least HeadDim of the layers
	Angles   []float64 // [layers, Channels/2] radians for each position, -1024 to 1024; or [Channels/2] for all layers
}

var errAngles = refuse(ErrShape, "a rotary embedding needs Channels/2 angles for each layer, or for all")

// layers says of how many layers there are angles: those of a pool, or 1 that stands for all.
func (r *Rotary) layers(ofPool int) (int, error) {
	pairs, n := r.Channels/2, ofPool
	if len(r.Angles) == pairs {
		n = 1
	}
	if float64(len(r.Angles)) != float64(n)*float64(pairs) {
		return 0, errAngles
	}
	return n, nil
}

// mapSizes says how many elements maps over all layers have: one for each head, and one for each channel of K.
func mapSizes(layers, kvHeads, headDim int, groups []LayerGroup) (heads, channels float64) {
	or := func(own, common int) float64 {
		if own == 0 {
			own = common
		}
		return float64(own)
	}
	all := float64(layers)
	heads, channels = all*float64(kvHeads), all*float64(kvHeads)*float64(headDim)
	for _, g := range groups {
		n, ownHeads, ownDim := float64(g.Layers), or(g.KVHeads, kvHeads), or(g.HeadDim, headDim)
		heads += n * (ownHeads - float64(kvHeads))
		channels += n * (ownHeads*ownDim - float64(kvHeads)*float64(headDim))
	}
	return heads, channels
}

// Fills in the shape, but for the groups, which the caller hands over beside it.
func (o *PoolOptions) shape(co *C.ta_kv_pool_options) []C.ta_layer_group {
	groups := make([]C.ta_layer_group, len(o.LayerGroups))
	for i, g := range o.LayerGroups {
		groups[i] = C.ta_layer_group{struct_size: C.sizeof_ta_layer_group, first: uint32Of(g.First),
			layers: uint32Of(g.Layers), window: C.int64_t(g.Window), kv_heads: uint32Of(g.KVHeads),
			head_dim: uint32Of(g.HeadDim), v_head_dim: uint32Of(g.VHeadDim)}
	}
	co.layers, co.kv_heads = uint32Of(o.Layers), uint32Of(o.KVHeads)
	co.head_dim, co.v_head_dim = uint32Of(o.HeadDim), uint32Of(o.VHeadDim)
	co.n_layer_groups = uint32Of(len(groups))
	return groups
}

// NewPool creates an empty pool.
//
// Errors: [ErrInvalid], [ErrShape] (a map of another length), [ErrUnsupported], [ErrMemory]; of the tiers also [ErrTierFull]
// (no space for the file), [ErrIO], [ErrLimit] (threads), [ErrBusy] (another pool has the file), [ErrCorrupt] (the file is
// damaged).
func (c *Context) NewPool(options PoolOptions) (*Pool, error) {
	if !c.enter() {
		return nil, errClosedContext
	}
	defer c.leave()
	heads, channels := mapSizes(options.Layers, options.KVHeads, options.HeadDim, options.LayerGroups)
	n := &options.Numerics
	wrong := func(length int, want float64) bool { return length != 0 && float64(length) != want }
	if wrong(len(options.KBits), heads) || wrong(len(options.VBits), heads) || wrong(len(n.KOffset), channels) {
		return nil, errMaps
	}
	var co C.ta_kv_pool_options
	groups := options.shape(&co)
	co.bits, co.budget_bytes = uint32Of(options.Bits), C.uint64_t(options.BudgetBytes)
	co.max_sequences = uint32Of(options.MaxSequences)
	cn := C.ta_numerics{profile: C.ta_profile(n.Profile), k_granularity: C.ta_granularity(n.KGranularity),
		v_granularity: C.ta_granularity(n.VGranularity), open_scale: C.ta_open_scale(n.OpenScale),
		v_exponents: C.ta_switch(n.VExponents), fractional_zero: C.ta_switch(n.FractionalZero),
		v_search: C.ta_switch(n.VSearch), hadamard: C.ta_switch(n.Hadamard), sink_blocks: limited(n.SinkBlocks),
		exp: C.ta_exp(n.Exp), p: C.ta_p(n.P), nonfinite: C.ta_nonfinite(n.NonFinite),
		hadamard_seed: C.uint64_t(n.HadamardSeed), k_turning: C.ta_switch(n.KTurning),
		k_search: C.ta_switch(n.KSearch), unit_slope: C.ta_switch(n.UnitSlope),
		q_bits: C.uint32_t(n.QBits), batch_invariant: C.ta_switch(n.BatchInvariant)}
	var ct *C.ta_tier_options
	var folder, path *C.char
	if t := options.Tiers; t != nil {
		ct = &C.ta_tier_options{host_node: uint32Of(t.HostNode), host_bytes: C.uint64_t(t.HostBytes),
			disk_bytes: C.uint64_t(t.DiskBytes), high_percent: limited(t.HighPercent), low_percent: limited(t.LowPercent),
			eviction: C.ta_eviction(t.Eviction), drop_coldest: C.ta_switch(t.DropColdest),
			begin_wait_ms: limited(t.BeginWaitMillis), staging: C.ta_staging(t.Staging),
			falling_precision: C.ta_switch(t.FallingPrecision), peer_bytes: C.uint64_t(t.PeerBytes)}
		if t.Peer != nil {
			if !t.Peer.enter() {
				return nil, errClosedContext
			}
			defer t.Peer.leave()
			ct.peer = t.Peer.c
		}
		var err error
		if folder, err = cPath(t.DiskFolder); err != nil {
			return nil, err
		}
		defer C.free(unsafe.Pointer(folder))
		if path, err = cPath(t.DiskPath); err != nil {
			return nil, err
		}
		defer C.free(unsafe.Pointer(path))
	}
	var cr *C.ta_rotary
	var angles []float64
	if r := options.Rotary; r != nil {
		layers, err := r.layers(options.Layers)
		if err != nil {
			return nil, err
		}
		cr = &C.ta_rotary{pairs: C.ta_rotary_pairs(r.Pairs), channels: uint32Of(r.Channels), layers: uint32Of(layers)}
		angles = r.Angles
	}
	p := &Pool{context: c, first: make(chan struct{}, 1)}
	e := newError()
	status := C.tago_kv_pool_create(c.c, &co, &cn, ct, cr, first[C.ta_layer_group](groups), first[C.uint8_t](options.KBits),
		first[C.uint8_t](options.VBits), first[C.float](n.KOffset), first[C.double](angles), folder, path, &p.c, e)
	if err := result(status, e); err != nil {
		return nil, err
	}
	if options.Tiers != nil {
		p.peer = options.Tiers.Peer
	}
	p.open()
	closeLater(p, (*Pool).Close)
	return p, nil
}

// The first element of a slice as C sees it; nil of an empty one.
func first[C, T any](list []T) *C {
	if len(list) == 0 {
		return nil
	}
	return (*C)(unsafe.Pointer(&list[0]))
}

// Takes up to most of the waiting items. call fills in a piece of the list and says how many it has put there; if they are
// fewer than the piece, there are no more now. If a later piece fails, what was taken is returned, and the next call fails.
func take[T any](most int, call func(piece []T, n *C.uint64_t) error) ([]T, error) {
	const atOnce = 1024 // most may be larger than memory
	list := []T{}
	for {
		taken, room := len(list), most-len(list)
		if room > atOnce {
			room = atOnce
		} else if room < 0 {
			room = 0
		}
		list = append(list, make([]T, room)...)
		var n C.uint64_t
		err := call(list[taken:], &n)
		list = list[:taken+int(n)]
		if err != nil && taken == 0 {
			return nil, err
		}
		if err != nil || int(n) < room || len(list) >= most {
			return list, nil
		}
	}
}

// A number for C's 32 bits that must not turn into another valid one; -1 is one.
func limited(n int) C.int32_t {
	if n < math.MinInt32 || n > math.MaxInt32 {
		return math.MinInt32
	}
	return C.int32_t(n)
}

// A time in milliseconds, rounded away from zero, so that only 0 becomes 0, which stands for the default.
func millis(t time.Duration) C.int32_t {
	n := t / time.Millisecond
	if t%time.Millisecond > 0 {
		n++
	} else if t%time.Millisecond < 0 {
		n--
	}
	return limited(int(n))
}

// A path for C, to be freed; nil for an empty one.
func cPath(path string) (*C.char, error) {
	if path == "" {
		return nil, nil
	}
	for i := 0; i < len(path); i++ {
		if path[i] == 0 {
			return nil, refuse(ErrInvalid, "a path with a NUL in it")
		}
	}
	return C.CString(path), nil
}

// Close ends the pool for all its users: its sequences are released, published blocks are dropped, and calls on it and on its
// plans fail with [ErrClosed], also a Begin that waits.
func (p *Pool) Close() error {
	if p == nil {
		return nil
	}
	if !p.enter() {
		return nil
	}
	defer p.leave()
	if first, _ := p.close(); !first {
		return nil
	}
	runtime.SetFinalizer(p, nil)
	e := newError()
	if err := result(C.ta_kv_pool_close(p.c, e), e); err != nil && err.(*Error).Code != ErrClosed {
		return err
	}
	return nil
}

func (p *Pool) leave() {
	if p.use.leave() {
		C.ta_kv_pool_destroy(p.c)
	}
}

var errClosedPool = refuse(ErrClosed, "the pool was closed")

// PoolDescription is all that another holder of the pool may want to know.
type PoolDescription struct {
	PoolOptions              // as in effect: no field is at its default, but for granularities
	Device            Device // of the pool's context
	DeviceOrdinal     int
	Fingerprint       uint64 // pools with the same one exchange files and sequences
	TokenBlockBytes   uint64
	ChannelBlockBytes uint64 // 0: there are none
	LowBlockBytes     uint64
	BlockHeadDim      int // channels that blocks have: 64, 96, 128 or 256
	// Sizes of blocks without the pages of layers with windows; 0: there are none.
	PassedTokenBlockBytes, PassedChannelBlockBytes uint64
}

// Describe says what the pool is.
//
// Errors: those of every call.
func (p *Pool) Describe() (*PoolDescription, error) {
	if !p.enter() {
		return nil, errClosedPool
	}
	defer p.leave()
	var d C.ta_kv_pool_description
	d.struct_size = C.uint32_t(unsafe.Sizeof(d))
	e := newError()
	if err := result(C.ta_kv_pool_describe(p.c, &d, e), e); err != nil {
		return nil, err
	}
	var groups []LayerGroup
	for i := 0; i < int(d.n_layer_groups); i++ {
		g := (*C.ta_layer_group)(unsafe.Add(unsafe.Pointer(d.layer_groups), i*int(d.layer_groups.struct_size)))
		groups = append(groups, LayerGroup{int(g.first), int(g.layers), int64(g.window), int(g.kv_heads), int(g.head_dim),
			int(g.v_head_dim)})
	}
	sizes, channels := mapSizes(int(d.layers), int(d.kv_heads), int(d.head_dim), groups)
	heads := int(sizes)
	n := d.numerics
	out := &PoolDescription{
		PoolOptions: PoolOptions{Layers: int(d.layers), KVHeads: int(d.kv_heads), HeadDim: int(d.head_dim), Bits: int(d.bits),
			KBits: goBytes(d.k_bits, heads), VBits: goBytes(d.v_bits, heads), BudgetBytes: uint64(d.budget_bytes),
			MaxSequences: int(d.max_sequences), VHeadDim: int(d.v_head_dim), LayerGroups: groups,
			Numerics: Numerics{Profile: Profile(n.profile), KGranularity: Granularity(n.k_granularity),
				VGranularity: Granularity(n.v_granularity), OpenScale: OpenScale(n.open_scale),
				VExponents: Switch(n.v_exponents), FractionalZero: Switch(n.fractional_zero), VSearch: Switch(n.v_search),
				Hadamard: Switch(n.hadamard), SinkBlocks: int(n.sink_blocks), Exp: Exp(n.exp), P: P(n.p),
				NonFinite: NonFinite(n.nonfinite), HadamardSeed: uint64(n.hadamard_seed), KTurning: Switch(n.k_turning),
				KSearch: Switch(n.k_search), UnitSlope: Switch(n.unit_slope), QBits: uint32(n.q_bits),
				BatchInvariant: Switch(n.batch_invariant)}},
		Device: Device(d.device), DeviceOrdinal: int(d.device_ordinal), Fingerprint: uint64(d.fingerprint),
		TokenBlockBytes: uint64(d.token_block_bytes), ChannelBlockBytes: uint64(d.channel_block_bytes),
		LowBlockBytes: uint64(d.low_block_bytes), BlockHeadDim: int(d.block_head_dim),
		PassedTokenBlockBytes: uint64(d.passed_token_block_bytes), PassedChannelBlockBytes: uint64(d.passed_channel_block_bytes),
	}
	if n.k_offset != nil {
		out.Numerics.KOffset = append([]float32(nil), unsafe.Slice((*float32)(n.k_offset), int(channels))...)
	}
	if r := d.rotary; r != nil {
		angles := unsafe.Slice((*float64)(r.angles), int(r.layers)*int(r.channels/2))
		out.Rotary = &Rotary{RotaryPairs(r.pairs), int(r.channels), append([]float64(nil), angles...)}
	}
	if t := d.tiers; t != nil {
		out.Tiers = &TierOptions{HostNode: int(t.host_node), HostBytes: uint64(t.host_bytes), DiskBytes: uint64(t.disk_bytes),
			HighPercent: int(t.high_percent), LowPercent: int(t.low_percent), Eviction: Eviction(t.eviction),
			DropColdest: Switch(t.drop_coldest), BeginWaitMillis: int(t.begin_wait_ms), Staging: Staging(t.staging),
			FallingPrecision: Switch(t.falling_precision), Peer: p.peer, PeerBytes: uint64(t.peer_bytes)}
		if t.disk_folder != nil {
			out.Tiers.DiskFolder = C.GoString(t.disk_folder)
		}
		if t.disk_path != nil {
			out.Tiers.DiskPath = C.GoString(t.disk_path)
		}
	}
	return out, nil
}

func goBytes(data *C.uint8_t, n int) []byte {
	return append([]byte(nil), unsafe.Slice((*byte)(data), n)...)
}
