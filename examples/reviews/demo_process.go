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

// supervisor keeps a worker process running, and kills it with SIGKILL as often as it should.
type supervisor struct {
	command func(life int) *exec.Cmd
	ledger  *ledger
	kills   int                 // how many shall count
	due     func(kill int) bool // whether it is time for this one, counted from 1
	say     func(format string, args ...any)

	counted, missed int // kills that met a handler between its start and its ack, and those that did not

	mu       sync.Mutex
	stdin    io.Closer // of the worker that lives
	stopping bool
}

// run starts workers until stop is called and the last one has drained. If ctx ends it kills.
func (s *supervisor) run(ctx context.Context) error {
	for life := 1; ; life++ {
		killed, err := s.live(ctx, life)
		underway := s.ledger.underway()
		s.ledger.died()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case killed && underway:
			s.counted++
			s.say("kill %d of %d: after %d deliveries, between a handler's start and its ack", s.counted, s.kills, s.ledger.total().Deliveries)
		case killed:
			s.missed++
		case err != nil:
			return fmt.Errorf("the worker ended by itself: %w", err)
		case s.isStopping():
			return nil
		default:
			return errors.New("the worker ended by itself")
		}
	}
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
	err = readSteps(stdout, func(step step) {
		s.ledger.enter(step)
		if !killed && step.kind == running && s.counted < s.kills && s.due(s.counted+1) && !s.isStopping() {
			time.Sleep(rand.N(time.Millisecond)) // so that it does not always die at the same point
			killed = cmd.Process.Kill() == nil
		}
	})
	if err != nil {
		_ = cmd.Process.Kill()
	}
	err = errors.Join(err, cmd.Wait())
	const bySignal = -1
	return killed && cmd.ProcessState.ExitCode() == bySignal, err
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
