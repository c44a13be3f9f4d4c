package main

import (
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// status is a page of numbers that a child shares with the suite. What the child wrote before a SIGKILL is there, and
// nobody can forget to flush it.
type status struct{ words *[statusWords]atomic.Int64 }

const statusWords = 1024

// The words of a status. open is what makes a kill count: handlers between their start and their ack, entries between
// their claim and their mark, commands between their intent and their outcome.
const (
	wordOpen   = iota
	wordReady  // the child works
	wordGate   // producer: may it issue commands; the suite says so
	wordIssued // producer: commands, of all its lives
	wordAcked  // producer: those that were acknowledged
	wordDone   // runner: handlers that ran; relay: entries that were marked
	wordLate   // relay: marks that were fenced
	wordUnits  // runner: units of one message, of all its lives
	wordMany   // runner: units of several messages, of all its lives

	wordUnitOpen // runner: units of one message that are open
	wordManyOpen // runner: units of several messages that are open
	wordStreams  = 64
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
