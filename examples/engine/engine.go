// The life of an engine in Go: docs/embedding.md explains it.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"

	ta "turboattention"
)

const layers, qHeads, kvHeads, dim, chunk, prompt, blocks, answer = 2, 4, 2, 64, 128, 300, 300 / 64, 256

func must[T any](value T, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func rows(first, n, heads, salt int) ta.Tensor {
	x := make([]float32, n*heads*dim)
	for i := range x {
		x[i] = float32(((first+i/(heads*dim))*131+i%(heads*dim))*salt%255-127) / 128
	}
	return ta.TensorOf(x, n, heads, dim)
}

func run(step *ta.Step, first, n int, out []float32) error {
	for layer := 0; layer < layers; layer++ {
		if err := step.Append(layer, rows(first, n, kvHeads, 83), rows(first, n, kvHeads, 89)); err != nil {
			return err
		}
		if err := step.Attend(layer, rows(first, n, qHeads, 79), ta.TensorOf(out, n, qHeads, dim), nil); err != nil {
			return err
		}
	}
	return nil
}

func step(plan *ta.Plan, seq *ta.Sequence, first, n int) float32 {
	out := make([]float32, n*qHeads*dim)
	check(plan.Step([]*ta.Sequence{seq}, []int{n}, func(step *ta.Step) error {
		return run(step, first, n, out)
	}))
	return out[(n-1)*qHeads*dim]
}

// The sequence of a request and the tokens that it has; nil: there is no room for it now.
func admit(space *ta.Namespace, keys []ta.Key, answer int) (*ta.Sequence, int) {
	seq, length, err := space.Match(keys)
	check(err)
	have := length / chunk * chunk
	check(seq.Truncate(have))
	err = seq.Reserve(prompt-have+answer, -1)
	if errors.Is(err, ta.ErrTierFull) { // the request stays in the queue: the Bytes of the ta.Error lack
		check(seq.Close())
		return nil, 0
	}
	check(err)
	return seq, have
}

func prefill(plan *ta.Plan, seq *ta.Sequence, space *ta.Namespace, keys []ta.Key, have int) (last float32) {
	for n := 0; have < prompt; have += n {
		n = chunk
		if prompt-have < n {
			n = prompt - have
		}
		last = step(plan, seq, have, n)
	}
	check(seq.Publish(space, keys))
	return last
}

func main() {
	device := must(ta.NewContext(nil))
	pool := must(device.NewPool(ta.PoolOptions{Layers: layers, KVHeads: kvHeads, HeadDim: dim, Bits: 4, BudgetBytes: 4 << 20,
		Tiers: &ta.TierOptions{HostBytes: 8 << 20}}))
	plan := must(pool.NewPlan())
	space := must(pool.NewNamespace([32]byte{1}, 0)) // secret and random in earnest
	keys := make([]ta.Key, blocks)
	for i := 0; i < blocks*32; i++ {
		keys[i/32][i%32] = byte(i + 1)
	}

	fit := must(pool.Fit([]*ta.Sequence{nil}, []int{prompt + answer}))
	fmt.Printf("fits: %d, %d bytes\n", map[bool]int{true: 1}[fit.Now], fit.BytesNew)

	cold, have := admit(space, keys, answer)
	fmt.Printf("cold: %d matched, prefill %.6f\n", have, prefill(plan, cold, space, keys, have))
	seq, have := admit(space, keys, answer)
	fmt.Printf("warm: %d matched, prefill %.6f\n", have, prefill(plan, seq, space, keys, have))
	if tooLong, _ := admit(space, keys, 1<<20); tooLong == nil {
		fmt.Println("too long: queued")
	}
	for t := prompt; t < prompt+3; t++ {
		fmt.Printf("decode: token %d, %.6f\n", t, step(plan, seq, t, 1))
	}

	other := must(seq.Fork())
	check(other.Truncate(prompt))
	fmt.Printf("fork: %.6f\n", step(plan, other, prompt+7, 1))

	const drafts, accepted = 4, 2
	verified := must(plan.BeginWith([]*ta.Sequence{other}, []int{drafts}, nil, &ta.StepOptions{Drafts: ta.On}))
	check(run(verified, prompt+8, drafts, make([]float32, drafts*qHeads*dim)))
	check(verified.EndKeep([]int{accepted}))
	fmt.Printf("verified: %d tokens, next %.6f\n", must(other.Length()), step(plan, other, prompt+17, 1))

	cancelled := must(plan.Begin([]*ta.Sequence{seq}, []int{1}, nil))
	check(run(cancelled, prompt+3, 1, make([]float32, qHeads*dim)))
	check(cancelled.Abort())
	fmt.Printf("cancelled: %d tokens\n", must(seq.Length()))

	info := must(must(seq.Move(0, blocks, ta.TierHost)).Wait(context.Background()))
	fmt.Printf("swapped out: %d blocks\n", info.Moved)
	must(must(seq.Move(0, blocks, ta.TierDevice)).Wait(context.Background()))
	fmt.Printf("swapped in: %.6f\n", step(plan, seq, prompt+3, 1))
	check(pool.Close())
}
