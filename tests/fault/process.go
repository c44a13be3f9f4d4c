package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// process is a child of the suite, through all its lives.
type process struct {
	settings
	r      *run
	status *status    // shared by all lives
	lives  sync.Mutex // held by a cell while it ends and begins lives, if several goroutines do

	mu     sync.Mutex
	cmd    *exec.Cmd
	ending bool          // the suite is stopping it
	ended  chan struct{} // closed when the current life ends
	state  *os.ProcessState
	// may reports whether the process may end by itself with this code. It must not wait for the
	// process.
	may func(code int) bool
}

// begin starts the next life.
func (p *process) begin() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Life++
	text, err := json.Marshal(p.settings)
	if err != nil {
		return err
	}
	log, err := os.OpenFile(filepath.Join(p.Dir, "log-"+p.Name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	p.status.set(wordOpen, 0)
	p.status.set(wordReady, 0)
	p.status.set(wordUnitOpen, 0)
	p.status.set(wordManyOpen, 0)
	binary := cmp.Or(p.Program, p.r.suite.binary)
	if p.Skew != 0 {
		binary = p.r.suite.skewed
	}
	cmd := exec.Command(binary)
	cmd.Env = append(os.Environ(), roleEnv+"="+string(text), "KINORA_CRASH_POINT="+p.Point, fmt.Sprintf("%s=%d", skewEnv, int(p.Skew/time.Second)))
	if p.Stops {
		cmd.Env = append(cmd.Env, "KINORA_CRASH_STOPS=yes")
	}
	cmd.Stdout, cmd.Stderr = log, log
	// A Ctrl-C goes to the suite only.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	p.cmd, p.ended, p.ending = cmd, ended, false
	p.r.trace.printf("begin %s life %d pid %d", p.Name, p.Life, cmd.Process.Pid)
	go p.wait(cmd, ended)
	return nil
}

func (p *process) wait(cmd *exec.Cmd, ended chan struct{}) {
	err := cmd.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state = cmd.ProcessState
	p.r.trace.printf("end %s %v", p.Name, err)
	if !p.ending && (p.Point == "" || !killed(p.state)) && (p.may == nil || !p.may(p.state.ExitCode())) {
		p.r.fail("%s ended by itself: %v", p.Name, err)
	}
	close(ended)
}

func killed(s *os.ProcessState) bool {
	status, ok := s.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}

// onEnd sets which exit codes are not a failure.
func (p *process) onEnd(may func(code int) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.may = may
}

// awaitReady waits until the process works.
func (p *process) awaitReady() { p.r.await(p.Name+" to work", p.isReady) }

func (p *process) isReady() bool { return p.status.get(wordReady) == 1 }

// open reports whether the process has work in hand, which makes a kill count.
func (p *process) open() bool { return p.status.get(wordOpen) > 0 }

func (p *process) signal(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ending = p.ending || s == syscall.SIGKILL || s == syscall.SIGTERM
	_ = p.cmd.Process.Signal(s)
}

// kill sends SIGKILL, if possible at a moment when the process has work in hand. It reports whether
// the process left unfinished work behind.
func (p *process) kill() (counts bool) {
	limit := time.Now().Add(200 * time.Millisecond)
	for !p.open() && time.Now().Before(limit) {
		time.Sleep(100 * time.Microsecond)
	}
	time.Sleep(time.Duration(p.r.intn(2000)) * time.Microsecond) // vary the point of death
	p.signal(syscall.SIGKILL)
	<-p.ended
	counts = p.open()
	p.r.trace.printf("killed %s open %d", p.Name, p.status.get(wordOpen))
	if counts {
		p.r.inject("kill_"+string(p.Role), 1)
		if p.status.get(wordManyOpen) > 0 {
			p.r.inject("kill_unit_of_many", 1)
		}
	} else {
		p.r.inject("kill_idle", 1)
	}
	return counts
}

// awaitStopped waits until the kernel has stopped all threads of the process.
func (p *process) awaitStopped() {
	p.r.await(p.Name+" to stop", p.isStopped)
}

// isStopped reports whether the process is stopped, or gone.
func (p *process) isStopped() bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	_, after, _ := strings.Cut(string(text), ") ")
	return err != nil || strings.HasPrefix(after, "T")
}

// restart kills the process and begins its next life.
func (p *process) restart() (counts bool) {
	counts = p.kill()
	if err := p.begin(); err != nil {
		p.r.fail("start %s: %v", p.Name, err)
	}
	return counts
}

// stop sends SIGTERM. The process must drain and exit without an error. It has more time than its own limit.
func (p *process) stop() {
	limit := 2 * p.r.suite.patience()
	p.mu.Lock()
	ended, cmd := p.ended, p.cmd
	p.mu.Unlock()
	select {
	case <-ended:
		return
	default:
	}
	// A process that has just been started may not handle the signal yet, and has nothing to drain.
	starts := p.status.get(wordReady) == 0
	_ = cmd.Process.Signal(syscall.SIGCONT)
	p.signal(syscall.SIGTERM)
	select {
	case <-ended:
		if code := p.state.ExitCode(); code != 0 && (!starts || code > 0) { // negative: ended by a signal
			p.r.fail("%s failed after SIGTERM: %s", p.Name, p.state)
		}
	case <-time.After(limit):
		p.r.fail("%s has not ended %s after SIGTERM", p.Name, limit)
		_ = cmd.Process.Signal(syscall.SIGQUIT) // so that it prints its goroutines
		select {
		case <-ended:
		case <-time.After(2 * time.Second):
			p.signal(syscall.SIGKILL)
			<-ended
		}
	}
}

// destroy ends the process unconditionally.
func (p *process) destroy() {
	p.mu.Lock()
	ended := p.ended
	p.mu.Unlock()
	if ended != nil {
		p.signal(syscall.SIGKILL)
		<-ended
	}
}

func (p *process) String() string { return fmt.Sprintf("%s (life %d)", p.Name, p.Life) }
