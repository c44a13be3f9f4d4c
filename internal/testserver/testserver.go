// Package testserver runs the private servers of tests, each in a shell that ends the server when the test process ends,
// however that process ends. Packages pgtest and redistest build on it.
package testserver

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Skip skips t if the environment variable KINORA_SKIP lists the server's name ("postgres,redis").
func Skip(t testing.TB, name string) {
	t.Helper()
	if slices.Contains(strings.Split(os.Getenv("KINORA_SKIP"), ","), name) {
		t.Skip("KINORA_SKIP=" + name)
	}
}

// FreePort returns a port of 127.0.0.1 that no server listens on. Another server may take it before the caller does. It is
// below the ports that outgoing connections get, so none of them takes it while a test has ended the server.
func FreePort() (port int, err error) {
	for range 100 {
		port = 10000 + rand.IntN(22000)
		l, listening := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err = listening; err == nil {
			return port, l.Close()
		}
	}
	return 0, err
}

// Process is a shell that runs a server.
type Process struct {
	life *os.File // the shell's standard input: closed when the test process ends
	done chan struct{}
}

// Run starts sh with a script and its arguments, in dir. The script runs the server until its standard input ends, and then
// removes dir. Run removes the rest of dir after the script.
func Run(dir, script string, args ...string) (*Process, error) { return run(dir, nil, script, args) }

// RunUnprivileged is Run, as the user postgres or nobody if this process runs as root. That user then owns dir.
func RunUnprivileged(dir, script string, args ...string) (*Process, error) {
	credential, err := unprivileged(dir)
	if err != nil {
		return nil, err
	}
	return run(dir, credential, script, args)
}

func run(dir string, credential *syscall.Credential, script string, args []string) (*Process, error) {
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("sh", append([]string{"-c", script, "keep"}, args...)...) //nolint:gosec // a constant of a test package
	cmd.Dir, cmd.Stdin = dir, read
	// Ctrl-C is for the tests: the server ends after them.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: credential}
	err = cmd.Start()
	_ = read.Close()
	if err != nil {
		_ = write.Close()
		return nil, err
	}
	p := &Process{life: write, done: make(chan struct{})}
	go func() {
		_ = cmd.Wait()
		_ = os.RemoveAll(dir)
		close(p.done)
	}()
	return p, nil
}

// Send writes a line to the script.
func (p *Process) Send(line string) error {
	_, err := fmt.Fprintln(p.life, line)
	return err
}

// Stop stops the server, and returns when the script has ended.
func (p *Process) Stop() {
	_ = p.life.Close()
	<-p.done
}

// ErrOtherServer: the server that answers is not the one that was started.
var ErrOtherServer = errors.New("another server has the port")

// Limit is how long a server may take to start, or to do what else a test waits for. It only ends a test that hangs. It is not
// patience.Limit, which tests of mutants shorten: their servers are as slow as others.
const Limit = 10 * time.Minute

// Await calls try until it returns nil, and returns its last error, with the text of the log, after Limit. It returns
// at once if the script ends or if the error is ErrOtherServer.
func (p *Process) Await(log string, try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), Limit)
	defer cancel()
	var said []byte
	for {
		err := try(ctx)
		if err == nil || errors.Is(err, ErrOtherServer) {
			return err
		}
		if text, err := os.ReadFile(log); err == nil { // the script removes the file
			said = text
		}
		select {
		case <-p.done:
			return fmt.Errorf("the server ended: %w\n%s", err, said)
		case <-ctx.Done():
			return fmt.Errorf("the server does not answer: %w\n%s", err, said)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// unprivileged returns the credential of a user other than root, and gives dir to that user. It returns nil if this process
// does not run as root.
func unprivileged(dir string) (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil //nolint:nilnil // no other user is necessary
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, _ := strconv.ParseUint(u.Uid, 10, 32)
		gid, _ := strconv.ParseUint(u.Gid, 10, 32)
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, os.Chown(dir, int(uid), int(gid))
	}
	return nil, errors.New("root may not run the server, and there is no user postgres or nobody")
}
