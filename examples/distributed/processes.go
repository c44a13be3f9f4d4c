package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// processes starts processes of this program, and counts the words that they print. The caller ends
// them with stopAll.
type processes struct {
	program string    // this one, unless a test sets it
	log     io.Writer // gets their logs

	mu      sync.Mutex
	all     []*process
	started map[string]int // by role
	words   map[string]int
}

func newProcesses(log io.Writer) (*processes, error) {
	program, err := os.Executable()
	return &processes{program: program, log: log, started: map[string]int{}, words: map[string]int{}}, err
}

// process is one of them.
type process struct {
	role   string
	name   string // of its connections to PostgreSQL
	cmd    *exec.Cmd
	life   io.Closer // its standard input: it stops when this is closed, so also when this process is killed
	ready  chan struct{}
	exited chan struct{}
	err    error // of Wait; set before exited is closed
}

// start starts a process, and returns once it has printed that it is ready.
func (ps *processes) start(ctx context.Context, role string, args ...string) (*process, error) {
	p := &process{role: role, name: role + " " + rand.Text(), cmd: exec.Command(ps.program, append([]string{role}, args...)...), //nolint:gosec // this program
		ready: make(chan struct{}), exited: make(chan struct{})}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for this process, which stops the others
	p.cmd.Stderr = ps.log
	p.cmd.Env = append(os.Environ(), "PGAPPNAME="+p.name)
	life, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	p.life = life
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a %s: %w", role, err)
	}
	ps.mu.Lock()
	ps.all = append(ps.all, p)
	ps.started[role]++
	ps.mu.Unlock()
	go ps.read(p, out)
	select {
	case <-p.ready:
		return p, nil
	case <-p.exited:
		return nil, fmt.Errorf("a %s ended at its start: %w", role, errors.Join(p.err, errors.New("see its log")))
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (ps *processes) read(p *process, out io.Reader) {
	for lines := bufio.NewScanner(out); lines.Scan(); {
		word := strings.TrimSpace(lines.Text())
		if word == isReady {
			close(p.ready)
		}
		ps.mu.Lock()
		ps.words[word]++
		ps.mu.Unlock()
	}
	p.err = p.cmd.Wait()
	close(p.exited)
}

// printed is how often processes have printed a word.
func (ps *processes) printed(word string) int {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return ps.words[word]
}

func (p *process) signal(s os.Signal) { _ = p.cmd.Process.Signal(s) }

// kill ends the process as a crash does (SIGKILL), and returns when it has ended.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.exited
	_ = p.life.Close()
}

// hanging is how long the example waits for a process that hangs: longer than a slow machine needs.
const hanging = 10 * time.Minute

// stop stops the process, and returns its error. If it hangs, stop kills it.
func (p *process) stop() error {
	_ = p.life.Close()
	select {
	case <-p.exited:
		return p.err
	case <-time.After(hanging):
		p.kill()
		return fmt.Errorf("a %s did not stop", p.role)
	}
}

// ended reports whether the process has ended.
func (p *process) ended() bool {
	select {
	case <-p.exited:
		return true
	default:
		return false
	}
}

// stopAll stops all processes that run, the newest first. Servers were started first.
func (ps *processes) stopAll() (err error) {
	ps.mu.Lock()
	all := ps.all
	ps.all = nil
	ps.mu.Unlock()
	for i := len(all) - 1; i >= 0; i-- {
		if !all[i].ended() {
			if e := all[i].stop(); e != nil {
				err = errors.Join(err, fmt.Errorf("stop a %s: %w", all[i].role, e))
			}
		}
	}
	return err
}
