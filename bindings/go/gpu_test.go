package turboattention

import (
	"errors"
	"math"
	"testing"
	"unsafe"

	"turboattention/internal/device"
)

// A pool on a GPU. Skipped without a GPU, or without CUDA in the library.
func gpuPool(t *testing.T) *Pool {
	t.Helper()
	c, err := NewContext(&ContextOptions{Device: CUDA})
	if errors.Is(err, ErrUnsupported) {
		t.Skip(err)
	}
	check(t, err)
	t.Cleanup(func() { c.Close() })
	check(t, device.Open())
	p := must(c.NewPool(poolOptions()))(t)
	t.Cleanup(func() { p.Close() })
	return p
}

func onGPU(t *testing.T, data []float32) *device.Buffer {
	t.Helper()
	b := must(device.New(data))(t)
	t.Cleanup(func() { check(t, b.Free()) })
	return b
}

func at(b *device.Buffer, n, heads int) Tensor {
	return TensorAt(b.Pointer(), F32, n, heads, dim, heads*dim, dim)
}

func near(t *testing.T, got, want []float32) {
	t.Helper()
	var difference, norm float64
	for i := range want {
		difference += math.Pow(float64(got[i]-want[i]), 2)
		norm += math.Pow(float64(want[i]), 2)
	}
	if !(math.Sqrt(difference/norm) < 0.01) {
		t.Fatalf("differs by %v of %v", difference, norm)
	}
}

func TestGPUStepsGiveWhatACPUGives(t *testing.T) {
	p, cpu := gpuPool(t), newPool(t)
	plan, seq := newPlan(t, p), must(p.NewSequence())(t)
	check(t, plan.SetStream(must(device.Stream())(t)))
	cpuPlan, cpuSeq, want := newPlan(t, cpu), must(cpu.NewSequence())(t), make([]float32, len(q))
	dq, dk, dv := onGPU(t, q), onGPU(t, k), onGPU(t, v)
	out, lse := onGPU(t, make([]float32, len(q))), onGPU(t, make([]float32, prompt*qHeads))
	for _, n := range []int{prompt, 1, 1, 70} {
		check(t, plan.Step([]*Sequence{seq}, []int{n}, func(s *Step) error {
			for layer := 0; layer < layers; layer++ {
				if err := s.Append(layer, at(dk, n, kvHeads), at(dv, n, kvHeads)); err != nil {
					return err
				}
				options := AttendOptions{LSE: FloatsAt(lse.Pointer(), n*qHeads)}
				if err := s.Attend(layer, at(dq, n, qHeads), at(out, n, qHeads), &options); err != nil {
					return err
				}
			}
			return nil
		}))
		check(t, step(cpuPlan, cpuSeq, n, want))
		near(t, must(out.Read())(t), want[:n*qHeads*dim])
		for i, x := range must(lse.Read())(t)[:n*qHeads] {
			if !(math.Abs(float64(x)) < 20) {
				t.Fatalf("lse %d is %v", i, x)
			}
		}
	}
	if n := length(t, seq); n != prompt+72 {
		t.Error(n, "tokens")
	}
	check(t, seq.Verify())
}

func TestGPURefusesMemoryOfTheHost(t *testing.T) {
	p := gpuPool(t)
	plan, seq := newPlan(t, p), must(p.NewSequence())(t)
	good := at(onGPU(t, k[:kvHeads*dim]), 1, kvHeads)
	stream := must(device.Stream())(t)
	check(t, plan.Step([]*Sequence{seq}, []int{1}, func(s *Step) error {
		wants(t, s.Append(0, TensorOf(k, 1, kvHeads, dim), good), ErrInvalid)
		wants(t, s.Append(0, good, TensorAt(unsafe.Pointer(&k[0]), F32, 1, kvHeads, dim, kvHeads*dim, dim)), ErrInvalid)
		wants(t, plan.SetStream(stream), ErrState) // a step is open
		for layer := 0; layer < layers; layer++ {
			check(t, s.Append(layer, good, good))
		}
		return nil
	}))
	if n := length(t, seq); n != 1 {
		t.Error(n, "tokens")
	}
	check(t, device.Synchronize())
	_, err := NewContext(&ContextOptions{Device: CUDA, DeviceOrdinal: 99})
	wants(t, err, ErrInvalid)
}
