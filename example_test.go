package kinora_test

import (
	"context"
	"fmt"

	"github.com/kinora-go/kinora"
)

// worker is a kinora.Service. Relays and runners are services too.
type worker struct {
	name    string
	running chan struct{}
}

func newWorker(name string) *worker { return &worker{name: name, running: make(chan struct{})} }

func (s *worker) Running() <-chan struct{} { return s.running }

func (s *worker) Run(ctx context.Context) error {
	fmt.Println(s.name, "starts")
	close(s.running)
	<-ctx.Done()
	fmt.Println(s.name, "stops")
	return nil
}

// Services start in order and stop in reverse order: consumers come first, the relay last.
func ExampleStart() {
	group, err := kinora.Start(context.Background(), newWorker("runner"), newWorker("relay"))
	if err != nil {
		panic(err)
	}
	fmt.Println("serving") // until the process gets a signal, or group.Ended is closed
	if err := group.Stop(); err != nil {
		panic(err)
	}

	// Output:
	// runner starts
	// relay starts
	// serving
	// relay stops
	// runner stops
}

// Run is for a program that has nothing else to do: it returns after its context ends.
func ExampleRun() {
	ctx, stop := context.WithCancel(context.Background()) // or signal.NotifyContext
	runner := newWorker("runner")
	go func() { <-runner.Running(); stop() }()
	fmt.Println(kinora.Run(ctx, runner))

	// Output:
	// runner starts
	// runner stops
	// <nil>
}
