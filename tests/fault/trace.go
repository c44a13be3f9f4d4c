package main

import (
	"fmt"
	"os"
	"sync"
	"syscall"
	"unsafe"
)

// trace is a file of lines, each with its time in nanoseconds. Each line is written at once, so a
// SIGKILL loses none.
type trace struct {
	mu   sync.Mutex
	file *os.File
	line []byte
}

// machineTime is the machine's time in nanoseconds, even if the process's own clock is wrong.
func machineTime() int64 {
	var now syscall.Timespec
	// This call cannot fail.
	_, _, _ = syscall.Syscall(syscall.SYS_CLOCK_GETTIME, 0, uintptr(unsafe.Pointer(&now)), 0)
	return now.Nano()
}

func openTrace(path string) (*trace, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	return &trace{file: f}, err
}

func (t *trace) printf(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.line = fmt.Appendf(t.line[:0], "%d ", machineTime())
	t.line = append(fmt.Appendf(t.line, format, args...), '\n')
	_, _ = t.file.Write(t.line)
}

func (t *trace) close() error { return t.file.Close() }
