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

// supervisor keeps a worker process running, and kills it with SIGKILL when the killer decides so.
type supervisor struct {
	name    string
	role    role
	command func(incarnation int) *exec.Cmd // incarnation is 1 for the first process, 2 for the next
	ledger  *ledger
	killer  *killer
	onKill  func(kills int, r role) // called after each kill that counts

	mu       sync.Mutex
	stdin    io.Closer // of the running worker
	stopping bool
}

// run restarts the worker until stop is called and the last process has drained. If ctx ends, run
// kills the worker.
func (s *supervisor) run(ctx context.Context) error {
	for incarnation := 1; ; incarnation++ {
		killed, err := s.runOnce(ctx, incarnation)
		hadWork := s.hadWork()
		s.ledger.workerDied(s.name)
		if killed {
			if kills := s.killer.resolve(s.role, hadWork); hadWork {
				s.onKill(kills, s.role)
			}
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case killed:
		case err != nil:
			return fmt.Errorf("worker %s ended unexpectedly: %w", s.name, err)
		case s.isStopping():
			return nil
		default:
			return fmt.Errorf("worker %s ended unexpectedly without an error", s.name)
		}
	}
}

// hadWork reports whether the trace of the worker ended with work in flight.
func (s *supervisor) hadWork() bool {
	if s.role == relayWork {
		return s.ledger.hasClaim(s.name)
	}
	return s.ledger.inFlight(s.name)
}

// runOnce runs one worker process to its end and reports whether the supervisor killed it. All
// steps that the worker wrote are then in the ledger.
func (s *supervisor) runOnce(ctx context.Context, incarnation int) (killed bool, err error) {
	cmd := s.command(incarnation)
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
	s.setStdin(stdin)
	killing := false
	err = readSteps(stdout, func(step step) {
		s.ledger.record(s.name, step)
		if !killing && (step.kind == running || step.kind == claimed) && !s.isStopping() && s.killer.shouldKill(s.role) {
			killing = true
			time.Sleep(rand.N(time.Millisecond)) // vary the point of the kill
			killed = cmd.Process.Kill() == nil
		}
	})
	if err != nil {
		_ = cmd.Process.Kill()
	}
	err = errors.Join(err, cmd.Wait())
	const bySignal = -1
	if killed = killed && cmd.ProcessState.ExitCode() == bySignal; killing && !killed {
		s.killer.resolve(s.role, false)
	}
	return killed, err
}

func (s *supervisor) setStdin(stdin io.Closer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stdin = stdin
	if s.stopping {
		_ = stdin.Close()
	}
}

// stop makes the worker drain and end, by closing its standard input.
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
