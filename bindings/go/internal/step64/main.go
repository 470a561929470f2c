// Command step64 is bindings/overhead/step64.c in Go.
package main

import (
	"fmt"
	"log"
	"time"

	ta "turboattention"
)

func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	context, err := ta.NewContext(&ta.ContextOptions{Threads: 1})
	if err != nil {
		return err
	}
	pool, err := context.NewPool(ta.PoolOptions{Layers: 1, KVHeads: 1, HeadDim: 64, Bits: 8, BudgetBytes: 1 << 20})
	if err != nil {
		return err
	}
	plan, err := pool.NewPlan()
	if err != nil {
		return err
	}
	seq, err := pool.NewSequence()
	if err != nil {
		return err
	}
	x, out := make([]float32, 64*64), make([]float32, 64*64)
	for i := range x {
		x[i] = float32(i*79%2003)/1001 - 1
	}
	seqs, n := []*ta.Sequence{seq}, []int{64}
	best := time.Hour
	for round := 0; round < 750; round++ {
		start := time.Now()
		for i := 0; i < 20; i++ {
			t := ta.TensorOf(x, 64, 1, 64)
			err := plan.Step(seqs, n, func(s *ta.Step) error {
				if err := s.Append(0, t, t); err != nil {
					return err
				}
				return s.Attend(0, t, ta.TensorOf(out, 64, 1, 64), nil)
			})
			if err != nil {
				return err
			}
			if err := seq.Truncate(0); err != nil {
				return err
			}
		}
		if each := time.Since(start) / 20; each < best {
			best = each
		}
	}
	fmt.Println(best.Nanoseconds())
	return nil
}
