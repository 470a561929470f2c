// Command gpu is the README's quick start on a GPU: keys, values, queries and results are in GPU memory, and calls enqueue their
// work on a stream. It prints the same lines; numbers differ from a CPU's in the last digits.
package main

import (
	"fmt"
	"log"

	ta "turboattention"
	"turboattention/internal/device"
)

const layers, qHeads, kvHeads, dim, prompt = 2, 8, 2, 128, 1000

func main() {
	context := must(ta.NewContext(&ta.ContextOptions{Device: ta.CUDA}))
	pool := must(context.NewPool(ta.PoolOptions{Layers: layers, KVHeads: kvHeads, HeadDim: dim, Bits: 4, BudgetBytes: 64 << 20}))
	plan, seq := must(pool.NewPlan()), must(pool.NewSequence())
	check(device.Open())
	check(plan.SetStream(must(device.Stream())))

	k := buffer(prompt*kvHeads*dim, func(i int) float32 { return float32(i*79%2003)/1001 - 1 })
	v := buffer(prompt*kvHeads*dim, func(i int) float32 { return float32(i%1009) / 1009 })
	q := buffer(prompt*qHeads*dim, func(i int) float32 { return float32(i*97%1999)/999 - 1 })
	out := buffer(prompt*qHeads*dim, func(int) float32 { return 0 })
	view := func(b *device.Buffer, n, heads int) ta.Tensor {
		return ta.TensorAt(b.Pointer(), ta.F32, n, heads, dim, heads*dim, dim)
	}
	for i, n := 0, prompt; i < 10; i, n = i+1, 1 {
		check(plan.Step([]*ta.Sequence{seq}, []int{n}, func(step *ta.Step) error {
			for layer := 0; layer < layers; layer++ {
				if err := step.Append(layer, view(k, n, kvHeads), view(v, n, kvHeads)); err != nil {
					return err
				}
				if err := step.Attend(layer, view(q, n, qHeads), view(out, n, qHeads), nil); err != nil {
					return err
				}
			}
			return nil
		}))
		fmt.Printf("step %d: out[0] = %.4f\n", i, must(out.Read())[0])
	}
}

func buffer(n int, number func(i int) float32) *device.Buffer {
	data := make([]float32, n)
	for i := range data {
		data[i] = number(i)
	}
	return must(device.New(data))
}

func must[T any](value T, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
