package turboattention

import (
	"strings"
	"testing"
)

func TestDescribe(t *testing.T) {
	p := newPool(t, tiered, func(o *PoolOptions) {
		o.Numerics.KOffset = make([]float32, layers*kvHeads*dim)
		o.Numerics.KOffset[5] = 2
	})
	d := must(p.Describe())(t)
	if d.Layers != layers || d.KVHeads != kvHeads || d.HeadDim != dim || d.Bits != 4 || len(d.KBits) != layers*kvHeads ||
		d.Numerics.Exp != ExpPoly || d.Numerics.Hadamard != On || d.Numerics.SinkBlocks != 1 || d.Numerics.KOffset[5] != 2 ||
		d.Tiers == nil || d.Tiers.BeginWaitMillis != 50 || d.Device != CPU || d.BudgetBytes != 64<<20 || d.TokenBlockBytes == 0 {
		t.Errorf("%+v", d)
	}
	again := must(p.context.NewPool(d.PoolOptions))(t)
	defer again.Close()
	if e := must(again.Describe())(t); e.Fingerprint != d.Fingerprint {
		t.Error("a pool of the same options is another one")
	}
}

func TestContextInfo(t *testing.T) {
	c := must(NewContext(&ContextOptions{Threads: 2, ISA: ISAScalar}))(t)
	defer c.Close()
	info := must(c.Info())(t)
	if info.Threads != 2 || info.ISA != ISAScalar || info.ISABest < ISAScalar || info.DeviceName == "" {
		t.Errorf("%+v", info)
	}
	check(t, c.Health())
	if Version() < 100 || ABIVersion() != 1 || !strings.HasPrefix(BuildInfo(), "turboattention ") {
		t.Error(Version(), ABIVersion(), BuildInfo())
	}
	_, err := NewContext(&ContextOptions{Threads: -1})
	wants(t, err, ErrInvalid)
}

func TestDenseAndMerge(t *testing.T) {
	c := newContext(t)
	const n = 96
	tq, whole := TensorOf(q, 4, qHeads, dim), make([]float32, 4*qHeads*dim)
	attend := func(from, to int, out []float32, lse []float32) {
		check(t, c.AttendDense(tq, TensorOf(k[from*kvHeads*dim:], to-from, kvHeads, dim),
			TensorOf(v[from*kvHeads*dim:], to-from, kvHeads, dim), TensorOf(out, 4, qHeads, dim),
			&DenseOptions{Variant: DenseIntFlashHalf, Attend: AttendOptions{Mask: MaskFull, LSE: FloatsOf(lse)}}))
	}
	lse := make([]float32, 4*qHeads)
	attend(0, n, whole, lse)
	var states []State
	for i := 0; i < 3; i++ {
		out, lse := make([]float32, len(whole)), make([]float32, len(lse))
		attend(i*n/3, (i+1)*n/3, out, lse)
		states = append(states, State{TensorOf(out, 4, qHeads, dim), FloatsOf(lse)})
	}
	merged, mergedLSE := make([]float32, len(whole)), make([]float32, len(lse))
	check(t, c.MergeStates(states, TensorOf(merged, 4, qHeads, dim), FloatsOf(mergedLSE), nil))
	for i := range whole {
		if d := whole[i] - merged[i]; d > 0.01 || d < -0.01 {
			t.Fatalf("element %d: %v and %v", i, whole[i], merged[i])
		}
	}
	wants(t, c.MergeStates(nil, TensorOf(merged, 4, qHeads, dim), Floats{}, nil), ErrInvalid)
	wants(t, c.MergeStates(states, TensorOf(merged, 4, qHeads, dim), FloatsOf(mergedLSE[1:]), nil), ErrShape)
	tk := TensorOf(k, n, kvHeads, dim)
	check(t, c.AttendDense(tq, tk, tk, TensorOf(merged, 4, qHeads, dim), nil))
	check(t, c.AttendDense(tq, tk, tk, TensorOf(merged, 4, qHeads, dim),
		&DenseOptions{QOffsets: []int64{0, 1, 4}, KOffsets: []int64{0, 50, 96}}))
	wants(t, c.AttendDense(tq, tk, tk, tq, &DenseOptions{Batch: 3, QOffsets: []int64{0, 4}}), ErrInvalid)
}

func TestCalibrator(t *testing.T) {
	c := must(newContext(t).NewCalibrator(layers, kvHeads, dim))(t)
	_, err := c.Finish(1)
	wants(t, err, ErrState)
	for layer := 0; layer < layers; layer++ {
		check(t, c.Observe(layer, TensorOf(k, 100, kvHeads, dim), TensorOf(v, 100, kvHeads, dim)))
	}
	maps := must(c.Finish(1))(t)
	if maps.KBits[0]+maps.KBits[1] != 6 || maps.KPriority[0] == 0 {
		t.Errorf("%+v", maps)
	}
	newPool(t, func(o *PoolOptions) { o.KBits, o.VBits = maps.KBits, maps.VBits })
	costs := make([]float32, 3*layers*kvHeads)
	maps = must(c.Choose(costs, costs, 1<<30))(t)
	if maps.KBits[0] != 2 || maps.VBits[layers*kvHeads-1] != 2 {
		t.Errorf("what costs nothing: %+v", maps)
	}
	_, err = c.Choose(costs, costs, 1)
	wants(t, err, ErrInvalid)
	_, err = c.Choose(costs[1:], costs, 1<<30)
	wants(t, err, ErrInvalid)
	check(t, c.Close())
	check(t, c.Close())
	wants(t, c.Observe(0, TensorOf(k, 1, kvHeads, dim), TensorOf(v, 1, kvHeads, dim)), ErrClosed)

	uneven := PoolOptions{Layers: 2, KVHeads: 2, HeadDim: 64, LayerGroups: []LayerGroup{{First: 1, Layers: 1, KVHeads: 1, HeadDim: 128}}}
	c = must(newContext(t).NewCalibratorFor(uneven))(t)
	costs = make([]float32, 3*3)
	maps = must(c.Choose(costs, costs, 1<<30))(t)
	newPool(t, func(o *PoolOptions) {
		*o = uneven
		o.BudgetBytes, o.KBits, o.VBits = 1<<20, maps.KBits, maps.VBits
	})
	uneven.HeadDim = 20
	_, err = newContext(t).NewCalibratorFor(uneven)
	wants(t, err, ErrUnsupported)
}
