package turboattention

import (
	"errors"
	"fmt"
	"math"
	"testing"
)

// The numbers of examples/c/decode.c.
func TestDecode(t *testing.T) {
	p := newPool(t)
	plan, seq, out := newPlan(t, p), must(p.NewSequence())(t), make([]float32, prompt*qHeads*dim)
	want := []string{"0.0000", "0.4958", "0.4952", "0.4946", "0.4940", "0.4934", "0.4929", "0.4923", "0.4917", "0.4911"}
	for i, w := range want {
		n := 1
		if i == 0 {
			n = prompt
		}
		check(t, step(plan, seq, n, out))
		if got := fmt.Sprintf("%.4f", out[0]); got != w {
			t.Errorf("step %d: %s instead of %s", i, got, w)
		}
	}
	if n := length(t, seq); n != prompt+9 {
		t.Errorf("%d tokens", n)
	}
}

func TestStepAllocatesNothing(t *testing.T) {
	p := newPool(t)
	plan, seq, out := newPlan(t, p), filled(t, p, 64), make([]float32, qHeads*dim)
	seqs, n, lse := []*Sequence{seq}, []int{1}, FloatsOf(make([]float32, qHeads))
	tk, tv := TensorOf(k, 1, kvHeads, dim), TensorOf(v, 1, kvHeads, dim)
	tq, to := TensorOf(q, 1, qHeads, dim), TensorOf(out, 1, qHeads, dim)
	allocations := testing.AllocsPerRun(100, func() {
		err := plan.Step(seqs, n, func(s *Step) error {
			for layer := 0; layer < layers; layer++ {
				if err := s.Append(layer, tk, tv); err != nil {
					return err
				}
				if err := s.Attend(layer, tq, to, &AttendOptions{LSE: lse}); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	})
	if allocations != 0 {
		t.Errorf("%v allocations a step", allocations)
	}
}

func TestStepEnds(t *testing.T) {
	p := newPool(t)
	plan, seq := newPlan(t, p), must(p.NewSequence())(t)
	seqs, n := []*Sequence{seq}, []int{1}
	mine := errors.New("mine")
	if err := plan.Step(seqs, n, func(*Step) error { return mine }); err != mine {
		t.Errorf("%v", err)
	}
	func() {
		defer func() {
			if recover() != "oops" {
				t.Error("the panic is gone")
			}
		}()
		_ = plan.Step(seqs, n, func(*Step) error { panic("oops") })
	}()
	wants(t, plan.Step(seqs, n, func(*Step) error { return nil }), ErrState) // no layer was appended
	var kept *Step
	err := plan.Step(seqs, n, func(s *Step) error {
		kept = s
		_, err := seq.Fork()
		wants(t, err, ErrBusy)
		wants(t, s.Append(layers, TensorOf(k, 1, kvHeads, dim), TensorOf(v, 1, kvHeads, dim)), ErrInvalid)
		return mine
	})
	if err != mine || length(t, seq) != 0 {
		t.Errorf("%v, %d tokens", err, length(t, seq))
	}
	wants(t, kept.End(), ErrState)
	check(t, step(plan, seq, 1, make([]float32, qHeads*dim)))
}

func TestBatch(t *testing.T) {
	p := newPool(t)
	plan, a, b := newPlan(t, p), filled(t, p, 100), filled(t, p, 10)
	out, lse := make([]Half, 3*qHeads*dim), make([]float32, 3*qHeads)
	s := must(plan.Begin([]*Sequence{a, b}, []int{1, 0}, []int{1, 2}))(t)
	for layer := 0; layer < layers; layer++ {
		check(t, s.Append(layer, TensorOf(k, 1, kvHeads, dim), TensorOf(v, 1, kvHeads, dim)))
		check(t, s.Attend(layer, TensorOf(q, 3, qHeads, dim), TensorOf(out, 3, qHeads, dim),
			&AttendOptions{LSE: FloatsOf(lse), Mask: MaskFull, Scale: 0.1, Softcap: 30, Window: 50, P: PU16, Exp: ExpExact,
				Slopes: FloatsOf(make([]float32, qHeads)), Sinks: FloatsOf(make([]float32, qHeads))}))
	}
	check(t, s.End())
	if length(t, a) != 101 || length(t, b) != 10 || out[0] == 0 || lse[0] < 3 || lse[0] > 10 {
		t.Error(length(t, a), length(t, b), out[0], lse[0])
	}
	// heads apart: [heads, tokens, dim], as torch has them
	apart := make([]float32, qHeads*2*dim)
	check(t, plan.StepQueries([]*Sequence{a}, nil, []int{2}, func(s *Step) error {
		return s.Attend(0, TensorOf(q, 2, qHeads, dim), StridedTensorOf(apart, 2, qHeads, dim, dim, 2*dim), nil)
	}))
	if apart[len(apart)-1] == 0 {
		t.Error("the last head is not written")
	}
}

func TestVOfItsOwnChannels(t *testing.T) {
	p := newPool(t, func(o *PoolOptions) { o.Layers, o.HeadDim, o.VHeadDim = 1, 48, 32 })
	groups := []LayerGroup{{First: 1, Layers: 1, Window: 100}}
	w := newPool(t, func(o *PoolOptions) { o.Layers, o.LayerGroups = 2, groups })
	if d := must(w.Describe())(t); len(d.LayerGroups) != 1 || d.LayerGroups[0] != groups[0] || d.PassedTokenBlockBytes == 0 {
		t.Fatal(d.LayerGroups)
	}
	if d := must(p.Describe())(t); d.VHeadDim != 32 || d.BlockHeadDim != 64 {
		t.Errorf("%+v", d)
	}
	seq, out := must(p.NewSequence())(t), make([]float32, kvHeads*32)
	check(t, newPlan(t, p).Step([]*Sequence{seq}, []int{1}, func(s *Step) error {
		check(t, s.Append(0, TensorOf(k, 1, kvHeads, 48), TensorOf(v, 1, kvHeads, 32)))
		return s.Attend(0, TensorOf(q, 1, kvHeads, 48), TensorOf(out, 1, kvHeads, 32), nil)
	}))
	for i, x := range out {
		if math.Abs(float64(x-v[i])) > 0.01 {
			t.Fatal(i, x, v[i])
		}
	}
}

func TestLayersOfOtherShapes(t *testing.T) {
	bits, wide := []uint8{8, 4, 2}, LayerGroup{First: 1, Layers: 1, KVHeads: 1, HeadDim: 128, VHeadDim: 96}
	o := PoolOptions{Layers: 2, KVHeads: 2, HeadDim: 64, BudgetBytes: 1 << 20, KBits: bits, VBits: bits, LayerGroups: []LayerGroup{wide},
		Numerics: Numerics{KOffset: make([]float32, 2*64+128)}}
	o.Numerics.KOffset[255] = 0.125
	c := newContext(t)
	p := must(c.NewPool(o))(t)
	d := must(p.Describe())(t)
	if len(d.LayerGroups) != 1 || d.LayerGroups[0] != wide || string(d.KBits) != string(bits) || len(d.Numerics.KOffset) != 256 ||
		d.Numerics.KOffset[255] != 0.125 {
		t.Errorf("%+v", d)
	}
	if again := must(must(c.NewPool(d.PoolOptions))(t).Describe())(t); again.Fingerprint != d.Fingerprint {
		t.Error("a pool of the same options is another one")
	}
	seq, out := must(p.NewSequence())(t), make([]float32, 70*4*64)
	isQuarter := func(out []float32) {
		t.Helper()
		for i, x := range out {
			if math.Abs(float64(x-0.25)) > 0.01 {
				t.Fatal(i, x)
			}
		}
	}
	quarters := make([]float32, 70*128)
	for i := range quarters {
		quarters[i] = 0.25
	}
	check(t, newPlan(t, p).Step([]*Sequence{seq}, []int{70}, func(s *Step) error {
		check(t, s.Append(0, TensorOf(k, 70, 2, 64), TensorOf(quarters, 70, 2, 64)))
		check(t, s.Attend(0, TensorOf(q, 70, 4, 64), TensorOf(out, 70, 4, 64), nil))
		isQuarter(out)
		wants(t, s.Append(1, TensorOf(k, 70, 2, 64), TensorOf(quarters, 70, 2, 64)), ErrShape)
		check(t, s.Append(1, TensorOf(k, 70, 1, 128), TensorOf(quarters, 70, 1, 96)))
		return s.Attend(1, TensorOf(q, 70, 2, 128), TensorOf(out[:70*2*96], 70, 2, 96), nil)
	}))
	isQuarter(out[:70*2*96])
	for _, change := range []func(*PoolOptions){
		func(o *PoolOptions) { o.KBits = []uint8{4, 4, 4, 4} },
		func(o *PoolOptions) { o.Numerics.KOffset = make([]float32, 2*2*64+1) },
	} {
		other := o
		change(&other)
		_, err := c.NewPool(other)
		wants(t, err, ErrShape)
	}
	o.KBits, o.VBits, o.Numerics.KOffset = nil, nil, nil
	for _, wrong := range []LayerGroup{{First: 1, Layers: 2}, {Layers: 1, KVHeads: -1}, {Layers: 1, HeadDim: 20}} {
		o.LayerGroups = []LayerGroup{wrong}
		_, err := c.NewPool(o)
		if err == nil {
			t.Error(wrong)
		}
	}
}

func TestDrafts(t *testing.T) {
	p := newPool(t)
	plan, a, b := newPlan(t, p), filled(t, p, 100), filled(t, p, 10)
	begin := func(o *StepOptions) *Step {
		s := must(plan.BeginWith([]*Sequence{a, b}, []int{3, 2}, nil, o))(t)
		for layer := 0; layer < layers; layer++ {
			check(t, s.Append(layer, TensorOf(k, 5, kvHeads, dim), TensorOf(v, 5, kvHeads, dim)))
		}
		return s
	}
	s := begin(&StepOptions{WaitMillis: -1, Drafts: On})
	wants(t, s.EndKeep(nil), ErrInvalid)
	wants(t, s.EndKeep([]int{4, 0}), ErrInvalid)
	check(t, s.EndKeep([]int{2, 0}))
	wants(t, s.EndKeep([]int{2, 0}), ErrState)
	s = begin(&StepOptions{TreeParent: []int{-1, 0, 0, -1, -1}})
	wants(t, s.End(), ErrInvalid) // no chain
	check(t, s.EndKeep([]int{3, 2}))
	s = begin(nil)
	wants(t, s.EndKeep([]int{1, 1}), ErrInvalid) // no drafts
	check(t, s.Abort())
	s = begin(&StepOptions{LayersInOrder: On})
	out := make([]float32, 5*qHeads*dim)
	wants(t, s.Attend(0, TensorOf(q, 5, qHeads, dim), TensorOf(out, 5, qHeads, dim), nil), ErrState)
	check(t, s.Abort())
	if length(t, a) != 104 || length(t, b) != 11 {
		t.Error(length(t, a), length(t, b))
	}
	for _, o := range []StepOptions{{WaitMillis: -2}, {Drafts: 3}, {TreeParent: []int{-1}}, {TreeParent: []int{-1, 1 << 40}}} {
		_, err := plan.BeginWith([]*Sequence{a}, []int{2}, nil, &o)
		wants(t, err, ErrInvalid)
	}
}

func TestTensorsThatDoNotFit(t *testing.T) {
	p := newPool(t)
	seq := must(p.NewSequence())(t)
	check(t, newPlan(t, p).Step([]*Sequence{seq}, []int{2}, func(s *Step) error {
		good, out := TensorOf(k, 2, kvHeads, dim), make([]float32, 2*qHeads*dim)
		wants(t, s.Append(0, TensorOf(k[:10], 2, kvHeads, dim), good), ErrShape)
		wants(t, s.Append(0, good, TensorOf(k, -1, kvHeads, dim)), ErrShape)
		wants(t, s.Append(0, good, TensorOf(k, 1<<40, 1<<40, 1<<40)), ErrShape)
		wants(t, s.Append(0, good, StridedTensorOf(k, 2, kvHeads, dim, 1<<62, dim)), ErrShape)
		wants(t, s.Append(0, good, StridedTensorOf(k, 2, kvHeads, dim, 0, dim)), ErrShape)
		wants(t, s.Append(0, good, TensorOf(k, 3, kvHeads, dim)), ErrShape)
		bad := append([]float32(nil), k[:2*kvHeads*dim]...)
		bad[kvHeads*dim] = float32(math.NaN())
		err := s.Append(0, TensorOf(bad, 2, kvHeads, dim), good)
		wants(t, err, ErrNonFinite)
		var e *Error
		if !errors.As(err, &e) || e.Token != 1 || e.Head != 0 || e.Block != -1 {
			t.Errorf("%+v", e)
		}
		check(t, s.Append(0, good, good))
		tq, to := TensorOf(q, 2, qHeads, dim), TensorOf(out, 2, qHeads, dim)
		short := FloatsOf(make([]float32, qHeads-1))
		wants(t, s.Attend(0, tq, to, &AttendOptions{LSE: short}), ErrShape)
		wants(t, s.Attend(0, tq, to, &AttendOptions{Slopes: short}), ErrShape)
		wants(t, s.Attend(0, tq, to, &AttendOptions{Sinks: short}), ErrShape)
		wants(t, s.Attend(0, tq, tq, nil), ErrInvalid) // overlaps
		check(t, s.Append(1, good, good))
		return s.Attend(1, tq, to, nil)
	}))
	_, err := p.context.NewPool(PoolOptions{Layers: 1, KVHeads: 1, HeadDim: 64, BudgetBytes: 1 << 20, KBits: []uint8{4, 4}})
	wants(t, err, ErrShape)
	// memory of Go is not given to a GPU, which would use it after the call
	tensor := TensorOf(k, 1, 1, 1)
	wants(t, tensor.check(CUDA), ErrInvalid)
}

func BenchmarkStep64(b *testing.B) {
	p := newPool(b)
	plan, seq, out := newPlan(b, p), filled(b, p, 64), make([]float32, 64*qHeads*dim)
	b.ResetTimer()
	for i := 0; i < b.N; i++ {
		check(b, step(plan, seq, 64, out))
		check(b, seq.Truncate(64))
	}
}
