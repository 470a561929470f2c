package turboattention

import (
	"context"
	"errors"
	"testing"
)

// A model's shape, and data for it as in examples/c/decode.c.
const (
	layers, qHeads, kvHeads, dim, prompt = 2, 8, 2, 128, 1000
)

var q, k, v = inputs()

var background = context.Background()

func inputs() (q, k, v []float32) {
	k, v = make([]float32, prompt*kvHeads*dim), make([]float32, prompt*kvHeads*dim)
	q = make([]float32, prompt*qHeads*dim)
	for i := range k {
		k[i], v[i] = float32(i*79%2003)/1001-1, float32(i%1009)/1009
	}
	for i := range q {
		q[i] = float32(i*97%1999)/999 - 1
	}
	return q, k, v
}

func must[T any](value T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Fails unless err is this code, as *Error or as the code itself.
func wants(t testing.TB, err error, code Code) {
	t.Helper()
	if !errors.Is(err, code) {
		t.Fatalf("%v instead of %v", err, code)
	}
}

func newContext(t testing.TB) *Context {
	t.Helper()
	c := must(NewContext(&ContextOptions{Threads: 1}))(t)
	t.Cleanup(func() { c.Close() })
	return c
}

func poolOptions() PoolOptions {
	return PoolOptions{Layers: layers, KVHeads: kvHeads, HeadDim: dim, BudgetBytes: 64 << 20}
}

func newPool(t testing.TB, change ...func(*PoolOptions)) *Pool {
	t.Helper()
	options := poolOptions()
	for _, f := range change {
		f(&options)
	}
	p := must(newContext(t).NewPool(options))(t)
	t.Cleanup(func() { p.Close() })
	return p
}

func tiered(o *PoolOptions) { o.Tiers = &TierOptions{HostBytes: 32 << 20, BeginWaitMillis: 50} }

func newPlan(t testing.TB, p *Pool) *Plan {
	t.Helper()
	plan := must(p.NewPlan())(t)
	t.Cleanup(func() { plan.Close() })
	return plan
}

// One step of n tokens, the first ones of the data.
func step(plan *Plan, seq *Sequence, n int, out []float32) error {
	return plan.Step([]*Sequence{seq}, []int{n}, func(s *Step) error {
		for layer := 0; layer < layers; layer++ {
			if err := s.Append(layer, TensorOf(k, n, kvHeads, dim), TensorOf(v, n, kvHeads, dim)); err != nil {
				return err
			}
			if err := s.Attend(layer, TensorOf(q, n, qHeads, dim), TensorOf(out, n, qHeads, dim), nil); err != nil {
				return err
			}
		}
		return nil
	})
}

// A sequence of n tokens.
func filled(t testing.TB, p *Pool, n int) *Sequence {
	t.Helper()
	seq := must(p.NewSequence())(t)
	check(t, step(newPlan(t, p), seq, n, make([]float32, n*qHeads*dim)))
	return seq
}

func length(t testing.TB, seq *Sequence) int {
	t.Helper()
	return must(seq.Length())(t)
}

// What attention in layer 0 gives for the last query of a sequence. A step that brings no tokens needs no appends.
func attend(t testing.TB, p *Pool, seq *Sequence) []float32 {
	t.Helper()
	out := make([]float32, qHeads*dim)
	check(t, newPlan(t, p).StepQueries([]*Sequence{seq}, nil, []int{1}, func(s *Step) error {
		return s.Attend(0, TensorOf(q, 1, qHeads, dim), TensorOf(out, 1, qHeads, dim), nil)
	}))
	return out
}

func same(t testing.TB, a, b []float32) {
	t.Helper()
	for i := range a {
		if a[i] != b[i] {
			t.Fatalf("element %d: %v and %v", i, a[i], b[i])
		}
	}
}

func keys(n int, of byte) []Key {
	list := make([]Key, n)
	for i := range list {
		list[i] = Key{of, byte(i), 1}
	}
	return list
}
