package main

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
)

// claimed is one claim of an entry, as the relay that made it knows it; times are of the machine, which all share.
type claimed struct {
	by        string
	token     string
	asked, at int64  // when the relay asked for it, and had it
	instant   string // of the claim, by the database
	over      int64  // when it began to mark it for good
}

// marked is a mark: accepted, late, or with an outcome that the relay never heard.
type marked struct {
	by        string
	token     string
	asked, at int64
	to        string
	outcome   string // "marked", "late" or "marking"
}

// entryLife is what relays have done to an entry.
type entryLife struct {
	claims []claimed
	marks  []marked
}

// judgeClaims tells what must not be in the history of claims: an entry whose claims, renewals, expiries and marks are no
// history of a lease (leaseModel), and a claim of several instants. met is how many late marks met the claim of another
// that lived.
func judgeClaims(dir string, lease time.Duration) (broken []string, met int, err error) {
	entries, err := claimsIn(dir)
	if err != nil {
		return nil, 0, err
	}
	instants := map[string]string{} // by token
	for _, seq := range slices.Sorted(maps.Keys(entries)) {
		e := entries[seq]
		if what := e.broken(lease); what != "" {
			broken = append(broken, "entry "+seq+": "+what)
		}
		for _, c := range e.claims {
			if was, ok := instants[c.token]; ok && was != c.instant {
				broken = append(broken, fmt.Sprintf("entry %s: claimed by %s at %s, and others by the same claim at %s", seq, c.by, c.instant, was))
			}
			instants[c.token] = c.instant
		}
		met += e.met()
	}
	return broken, met, nil
}

// claimsIn are the entries that relays have written down in dir, by their Seq.
func claimsIn(dir string) (map[string]*entryLife, error) {
	files, err := filepath.Glob(filepath.Join(dir, "trace-relay*"))
	if err != nil {
		return nil, err
	}
	entries := map[string]*entryLife{}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		err = readClaims(f, filepath.Base(name), entries)
		_ = f.Close()
		if err != nil {
			return nil, err
		}
	}
	return entries, nil
}

func readClaims(from io.Reader, by string, entries map[string]*entryLife) error {
	lines := bufio.NewScanner(from)
	for lines.Scan() {
		var at, asked int64
		var what, seq, token, more string
		if n, _ := fmt.Sscan(lines.Text(), &at, &what, &seq, &token, &asked, &more); n < 6 {
			continue
		}
		e := entries[seq]
		if e == nil {
			e = &entryLife{}
			entries[seq] = e
		}
		switch what {
		case "claimed":
			e.claims = append(e.claims, claimed{by: by, token: token, asked: asked, at: at, instant: more})
		case "marking": // from here on nobody knows whether the claim lives
			e.marks = append(e.marks, marked{by, token, asked, at, more, what})
			if i := slices.IndexFunc(e.claims, func(c claimed) bool { return c.token == token && c.by == by }); i >= 0 {
				e.claims[i].over = asked
			}
		case "marked", "late":
			m := marked{by, token, asked, at, more, what}
			begun := marked{by, token, asked, 0, more, "marking"}
			if i := slices.IndexFunc(e.marks, func(o marked) bool { o.at = 0; return o == begun }); i >= 0 {
				e.marks[i] = m
			} else {
				e.marks = append(e.marks, m)
			}
		}
	}
	return lines.Err()
}

// leaseStep is one thing that happened to an entry.
type leaseStep struct {
	token string
	what  string // "claim", "expire", or where a mark leads
	heard string // a mark's outcome
	term  int    // which term a claim or a renewal begins, and an expiry ends
}

// leaseState is who holds an entry.
type leaseState struct {
	holder string // "": nobody
	term   int
	over   bool // the term is over, and whoever comes may take it
	done   bool // it is published, once and for all
}

// leaseModel is what an entry may go through. A claim whose reply was lost is not known to anybody: its holder is taken
// for nobody.
var leaseModel = (&porcupine.NondeterministicModel{
	Init: func() []any { return []any{leaseState{}} },
	Step: func(state, input, _ any) []any {
		s, in := state.(leaseState), input.(leaseStep)
		switch {
		case in.what == "claim" && (s.done || s.holder != "" && !s.over),
			in.heard == "marked" && s.holder != in.token,
			in.heard == "late" && s.holder == in.token && !s.over:
			return nil
		case in.what == "claim":
			return []any{leaseState{holder: in.token, term: in.term}}
		case in.what == "expire":
			s.over = s.over || s.term == in.term
			return []any{s}
		case in.heard == "late" && s.holder == in.token:
			return []any{leaseState{}}
		case s.holder != in.token:
			return []any{s}
		}
		next := leaseState{done: in.what == "published"}
		if in.what == "claimed" {
			next = leaseState{holder: in.token, term: in.term}
		}
		if in.heard == "marking" {
			return []any{s, next}
		}
		return []any{next}
	},
}).ToModel()

// broken says what is wrong with the history of an entry, or nothing.
func (e *entryLife) broken(lease time.Duration) string {
	const never = 1<<63 - 1
	var ops []porcupine.Operation
	var all string
	add := func(asked, at int64, s leaseStep) {
		ops = append(ops, porcupine.Operation{Call: asked, Return: at, Input: s})
	}
	term := func(asked int64) int { // at the end of which others may take it
		add(asked+int64(lease), never, leaseStep{what: "expire", term: len(ops) + 1})
		return len(ops)
	}
	for _, c := range e.claims {
		add(c.asked, c.at, leaseStep{token: c.token, what: "claim", term: term(c.asked)})
		all += fmt.Sprintf("; claimed by %s, %d to %d", c.by, c.asked, c.at)
	}
	for _, m := range e.marks {
		s := leaseStep{token: m.token, what: m.to, heard: m.outcome}
		if m.to == "claimed" {
			s.term = term(m.asked)
		}
		if m.outcome == "marking" {
			m.at = never
		}
		add(m.asked, m.at, s)
		all += fmt.Sprintf("; %s (%s) by %s, %d to %d", m.outcome, m.to, m.by, m.asked, m.at)
	}
	if porcupine.CheckOperations(leaseModel, ops) {
		return ""
	}
	return "no history of a lease" + all
}

// before tells whether c was certainly made before o: a process that is stopped in a call may hear of it late.
func (c claimed) before(o claimed) bool { return c.at < o.asked }

// met counts the late marks of a claim that came while a later one lived.
func (e *entryLife) met() (n int) {
	for _, m := range e.marks {
		mine := slices.IndexFunc(e.claims, func(c claimed) bool { return c.token == m.token })
		if m.outcome == "late" && mine >= 0 && slices.ContainsFunc(e.claims, func(c claimed) bool {
			return e.claims[mine].before(c) && c.at < m.asked && (c.over == 0 || c.over > m.asked)
		}) {
			n++
		}
	}
	return n
}
