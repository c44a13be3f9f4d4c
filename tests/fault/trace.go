package main

import (
	"fmt"
	"os"
	"sync"
	"time"
)

// trace is a file of lines, each with its time in nanoseconds and written at once: what was traced before a SIGKILL is
// there.
type trace struct {
	mu   sync.Mutex
	file *os.File
	line []byte
}

func openTrace(path string) (*trace, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	return &trace{file: f}, err
}

func (t *trace) printf(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.line = fmt.Appendf(t.line[:0], "%d ", time.Now().UnixNano())
	t.line = append(fmt.Appendf(t.line, format, args...), '\n')
	_, _ = t.file.Write(t.line)
}

func (t *trace) close() error { return t.file.Close() }
