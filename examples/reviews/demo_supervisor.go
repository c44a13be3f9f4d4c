package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"time"
)

// crew is the workers, each in a process of its own.
type crew struct {
	relays     []*supervisor
	projectors []*supervisor // or those that do everything
	settle     func(context.Context) error
	stopping   chan struct{}
	stop       func() // lets all workers drain
}

func newCrew(settle func(context.Context) error) *crew {
	c := &crew{settle: settle, stopping: make(chan struct{})}
	c.stop = sync.OnceFunc(func() { close(c.stopping) })
	return c
}

// run keeps the workers running until stop is called and all have drained: the relays, and when nothing is on
// its way any more, the others. If ctx ends it kills.
func (c *crew) run(ctx context.Context) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	start := func(all []*supervisor) (stop func()) {
		var running sync.WaitGroup
		for _, s := range all {
			running.Go(func() {
				if err := s.run(ctx); err != nil {
					fail(err)
				}
			})
		}
		return func() {
			for _, s := range all {
				s.stop()
			}
			running.Wait()
		}
	}
	stopProjectors := start(c.projectors)
	stopRelays := start(c.relays)
	select {
	case <-c.stopping:
	case <-ctx.Done():
	}
	stopRelays()
	if ctx.Err() == nil {
		if err := c.settle(ctx); err != nil {
			fail(err)
		}
	}
	stopProjectors()
	return context.Cause(ctx)
}

// killer decides when a worker is killed. A role's kills are spread over its work, and only one is under way.
type killer struct {
	wanted map[role]int
	due    func(r role, kill, of int) bool // whether it is time for this one, counted from 1

	mu      sync.Mutex
	counted map[role]int // kills that met what they should
	missed  int          // those that did not
	busy    map[role]bool
}

func newKiller(wanted map[role]int, due func(r role, kill, of int) bool) *killer {
	return &killer{wanted: wanted, due: due, counted: map[role]int{}, busy: map[role]bool{}}
}

// wants tells whether to kill a worker of this role now. If so, tell settled what came of it.
func (k *killer) wants(r role) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.busy[r] || k.counted[r] >= k.wanted[r] || !k.due(r, k.counted[r]+1, k.wanted[r]) {
		return false
	}
	k.busy[r] = true
	return true
}

// settled tells whether a kill counts, and returns how many do.
func (k *killer) settled(r role, counts bool) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.busy[r] = false
	if counts {
		k.counted[r]++
	} else {
		k.missed++
	}
	return k.total()
}

func (k *killer) total() (n int) {
	for _, c := range k.counted {
		n += c
	}
	return n
}

// supervisor keeps a worker process running, and kills it with SIGKILL when the killer wants that.
type supervisor struct {
	name    string
	role    role
	command func(life int) *exec.Cmd
	ledger  *ledger
	killer  *killer
	killed  func(kills int, r role) // is told about each that counts

	mu       sync.Mutex
	stdin    io.Closer // of the worker that lives
	stopping bool
}

// run starts workers until stop is called and the last one has drained. If ctx ends it kills.
func (s *supervisor) run(ctx context.Context) error {
	for life := 1; ; life++ {
		killed, err := s.live(ctx, life)
		struck := s.struck()
		s.ledger.died(s.name)
		if killed {
			if kills := s.killer.settled(s.role, struck); struck {
				s.killed(kills, s.role)
			}
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case killed:
		case err != nil:
			return fmt.Errorf("the worker ended by itself: %w", err)
		case s.isStopping():
			return nil
		default:
			return errors.New("the worker ended by itself")
		}
	}
}

// struck tells whether the worker was in the middle of something when its account ended.
func (s *supervisor) struck() bool {
	if s.role == relayWork {
		return s.ledger.relaying(s.name)
	}
	return s.ledger.underway(s.name)
}

// live runs one worker to its end, and tells whether it was killed in the name of the demo. When it returns,
// everything that the worker wrote down is in the ledger.
func (s *supervisor) live(ctx context.Context, life int) (killed bool, err error) {
	cmd := s.command(life)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return false, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return false, err
	}
	if err := cmd.Start(); err != nil {
		return false, err
	}
	defer context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })()
	s.watch(stdin)
	victim := false
	err = readSteps(stdout, func(step step) {
		s.ledger.enter(s.name, step)
		if !victim && (step.kind == running || step.kind == claimed) && !s.isStopping() && s.killer.wants(s.role) {
			victim = true
			time.Sleep(rand.N(time.Millisecond)) // so that it does not always die at the same point
			killed = cmd.Process.Kill() == nil
		}
	})
	if err != nil {
		_ = cmd.Process.Kill()
	}
	err = errors.Join(err, cmd.Wait())
	const bySignal = -1
	if killed = killed && cmd.ProcessState.ExitCode() == bySignal; victim && !killed {
		s.killer.settled(s.role, false)
	}
	return killed, err
}

func (s *supervisor) watch(stdin io.Closer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stdin = stdin
	if s.stopping {
		_ = stdin.Close()
	}
}

// stop lets the worker drain: it ends when its standard input does.
func (s *supervisor) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopping = true
	if s.stdin != nil {
		_ = s.stdin.Close()
	}
}

func (s *supervisor) isStopping() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stopping
}
