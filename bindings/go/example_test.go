package turboattention_test

import (
	"context"
	"fmt"
	"log"

	ta "turboattention"
)

// A pool of one layer and one head, and a sequence of 200 tokens.
func setUp() (*ta.Pool, *ta.Plan, *ta.Sequence) {
	device, err := ta.NewContext(nil)
	check(err)
	pool, err := device.NewPool(ta.PoolOptions{Layers: 1, KVHeads: 1, HeadDim: 64, BudgetBytes: 1 << 20,
		Tiers: &ta.TierOptions{HostBytes: 1 << 20}})
	check(err)
	plan, err := pool.NewPlan()
	check(err)
	seq, err := pool.NewSequence()
	check(err)
	x := make([]float32, 200*64)
	check(plan.Step([]*ta.Sequence{seq}, []int{200}, func(step *ta.Step) error {
		return step.Append(0, ta.TensorOf(x, 200, 1, 64), ta.TensorOf(x, 200, 1, 64))
	}))
	return pool, plan, seq
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func ExamplePlan_Step() {
	_, plan, seq := setUp()
	k, q, out := make([]float32, 64), make([]float32, 4*64), make([]float32, 4*64) // 1 token, 1 kv head, 4 query heads
	for i := range k {
		k[i] = 1
	}
	check(plan.Step([]*ta.Sequence{seq}, []int{1}, func(step *ta.Step) error {
		if err := step.Append(0, ta.TensorOf(k, 1, 1, 64), ta.TensorOf(k, 1, 1, 64)); err != nil {
			return err
		}
		return step.Attend(0, ta.TensorOf(q, 1, 4, 64), ta.TensorOf(out, 1, 4, 64), nil)
	}))
	n, err := seq.Length()
	check(err)
	fmt.Printf("%d tokens, out[0] = %.3f\n", n, out[0]) // one of 201 values is 1, the others 0
	// Output: 201 tokens, out[0] = 0.005
}

func ExampleNamespace() {
	pool, _, a := setUp()
	space, err := pool.NewNamespace([32]byte{7}, 0) // secret random bytes
	check(err)
	keys := []ta.Key{{1}, {2}, {3}} // hashes of tokens 0..64, 0..128, 0..192 of a
	check(a.Publish(space, keys))
	_, n, err := space.Match([]ta.Key{keys[0], keys[1], {9}}) // a request that begins like a
	check(err)
	fmt.Println(n, "tokens need not be computed")
	// Output: 128 tokens need not be computed
}

func ExampleMove_Wait() {
	_, _, seq := setUp()
	move, err := seq.Move(1, 2, ta.TierHost)
	check(err)
	info, err := move.Wait(context.Background())
	check(err)
	fmt.Println(info.Moved, "blocks are in host memory")
	// Output: 2 blocks are in host memory
}
