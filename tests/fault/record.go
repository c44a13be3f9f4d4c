package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"
)

// ranOnce is what each entry of a record has.
type ranOnce struct {
	OK          bool    `json:"ok"`
	Duration    float64 `json:"duration_s"`
	Date        string  `json:"date"`        // when it ended, in UTC
	Fingerprint string  `json:"fingerprint"` // of the code: see internal/fingerprint
}

func (o ranOnce) ran() ranOnce { return o }

// entry is an entry of a record: a cell, a mutant, or a part of the long tests.
type entry interface {
	name() string
	ran() ranOnce
}

// record is a JSON file with one entry for each name. It is replaced after each entry, so that an interrupted run
// continues.
type record[T entry] struct {
	path  string                   // empty: nothing is written
	names []string                 // all names, in the order of the file; other entries are dropped
	code  func(name string) string // the fingerprint of the present code, for an entry

	mu  sync.Mutex
	all []T
}

// openRecord reads the entries of a record, if there is one.
func openRecord[T entry](path string, names []string, code func(name string) string) (*record[T], error) {
	r := &record[T]{path: path, names: names, code: code}
	if path == "" {
		return r, nil
	}
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return r, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &r.all)
	}
	if err != nil {
		return nil, fmt.Errorf("read the record %s: %w", path, err)
	}
	return r, nil
}

// has reports whether the record has an entry of the present code that is ok.
func (r *record[T]) has(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.all, func(e T) bool {
		return e.name() == name && e.ran().OK && e.ran().Fingerprint == r.code(name)
	})
}

// ended returns the result of an entry that began at a time and has just ended.
func (r *record[T]) ended(name string, ok bool, begin time.Time) ranOnce {
	return ranOnce{OK: ok, Duration: time.Since(begin).Seconds(), Date: time.Now().UTC().Format(time.DateTime), Fingerprint: r.code(name)}
}

// put replaces the entry of a name, and the file. Any goroutine may call it.
func (r *record[T]) put(e T) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.path == "" {
		return nil
	}
	r.all = slices.DeleteFunc(r.all, func(one T) bool { return one.name() == e.name() || !slices.Contains(r.names, one.name()) })
	r.all = append(r.all, e)
	slices.SortStableFunc(r.all, func(a, b T) int { return slices.Index(r.names, a.name()) - slices.Index(r.names, b.name()) })
	text, err := json.MarshalIndent(r.all, "", "  ")
	if err != nil {
		return err
	}
	next := r.path + ".next"
	if err := os.WriteFile(next, append(text, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(next, r.path)
}
