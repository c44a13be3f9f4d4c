package main

import (
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// status is a page of numbers that a child shares with the suite. The page keeps its values when
// the child is killed, and needs no flush.
type status struct{ words *[statusWords]atomic.Int64 }

const statusWords = 1024

// Words of a status. The open counts make a kill count: handlers between start and ack, entries
// between claim and mark, commands between intent and outcome.
const (
	wordOpen   = iota
	wordReady  // the child works
	wordGate   // producer: may it issue commands; set by the suite
	wordIssued // producer: commands of all lives
	wordAcked  // producer: acknowledged commands
	wordDone   // runner: completed handlers; relay: marked entries
	wordLate   // relay: marks that were too late
	wordUnits  // runner: units of one message, of all lives
	wordMany   // runner: units of several messages, of all lives

	wordUnitOpen // runner: open units of one message
	wordManyOpen // runner: open units of several messages

	wordCompleted = 32 // runner: by arm, the events that the reader of the log completed, as the observer counts them
	wordClaim     = 48 // worker: the longest claim of all lives, in nanoseconds
	wordStreams   = 64
)

func openStatus(path string) (*status, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	const size = statusWords * 8
	if err := f.Truncate(size); err != nil {
		return nil, err
	}
	page, err := syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", path, err)
	}
	return &status{(*[statusWords]atomic.Int64)(unsafe.Pointer(&page[0]))}, nil
}

func (s *status) add(word int, n int64) int64 { return s.words[word].Add(n) }
func (s *status) get(word int) int64          { return s.words[word].Load() }
func (s *status) set(word int, n int64)       { s.words[word].Store(n) }
