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

// claimed is one claim of an entry, as recorded by the relay that made it. Times are machine time,
// which all share.
type claimed struct {
	by        string
	token     string
	asked, at int64  // when the relay asked for it, and when it got it
	instant   string // the claim's time by the database's clock
	finishing int64  // when the relay began to mark it as finished
}

// marked is a mark: accepted, late, or with an outcome that the relay never received.
type marked struct {
	by        string
	token     string
	asked, at int64
	to        string
	outcome   string // "marked", "late" or "marking"
}

// entryLife is everything that relays did to an entry.
type entryLife struct {
	claims []claimed
	marks  []marked
}

// judgeClaims returns the violations in the history of claims: entries whose claims, renewals,
// expiries and marks do not fit leaseModel, and claims with several times. met counts the late
// marks that met another relay's live claim.
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
				broken = append(broken, fmt.Sprintf("entry %s: claimed by %s at %s, other entries of the same claim at %s", seq, c.by, c.instant, was))
			}
			instants[c.token] = c.instant
		}
		met += e.met()
	}
	return broken, met, nil
}

// claimsIn returns the entries that relays recorded in dir, by Seq.
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
		case "marking": // from here on the relay may have given up the claim
			e.marks = append(e.marks, marked{by, token, asked, at, more, what})
			if i := slices.IndexFunc(e.claims, func(c claimed) bool { return c.token == token && c.by == by }); i >= 0 {
				e.claims[i].finishing = asked
			}
		case "marked", "late":
			m := marked{by, token, asked, at, more, what}
			before := marked{by, token, asked, 0, more, "marking"}
			if i := slices.IndexFunc(e.marks, func(o marked) bool { o.at = 0; return o == before }); i >= 0 {
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
	token   string
	what    string // "claim", "expire", or the target status of a mark
	outcome string // a mark's outcome
	term    int    // number of the term that a claim or a renewal begins, or that an expiry ends
}

// leaseState is the holder of an entry and the state of its lease.
type leaseState struct {
	holder  string // empty: none
	term    int
	expired bool // the term has ended, and any relay may claim the entry
	done    bool // published, finally
}

// leaseModel describes the valid histories of an entry. A claim whose reply was lost is unknown, so
// its holder counts as none.
var leaseModel = (&porcupine.NondeterministicModel{
	Init: func() []any { return []any{leaseState{}} },
	Step: func(state, input, _ any) []any {
		s, in := state.(leaseState), input.(leaseStep)
		switch {
		case in.what == "claim" && (s.done || s.holder != "" && !s.expired),
			in.outcome == "marked" && s.holder != in.token,
			in.outcome == "late" && s.holder == in.token && !s.expired:
			return nil
		case in.what == "claim":
			return []any{leaseState{holder: in.token, term: in.term}}
		case in.what == "expire":
			s.expired = s.expired || s.term == in.term
			return []any{s}
		case in.outcome == "late" && s.holder == in.token:
			return []any{leaseState{}}
		case s.holder != in.token:
			return []any{s}
		}
		next := leaseState{done: in.what == "published"}
		if in.what == "claimed" {
			next = leaseState{holder: in.token, term: in.term}
		}
		if in.outcome == "marking" {
			return []any{s, next}
		}
		return []any{next}
	},
}).ToModel()

// broken describes the violation in an entry's history. It is empty for a valid history.
func (e *entryLife) broken(lease time.Duration) string {
	const never = 1<<63 - 1
	var ops []porcupine.Operation
	var all string
	add := func(asked, at int64, s leaseStep) {
		ops = append(ops, porcupine.Operation{Call: asked, Return: at, Input: s})
	}
	term := func(asked int64) int { // others may claim the entry at its end
		add(asked+int64(lease), never, leaseStep{what: "expire", term: len(ops) + 1})
		return len(ops)
	}
	for _, c := range e.claims {
		add(c.asked, c.at, leaseStep{token: c.token, what: "claim", term: term(c.asked)})
		all += fmt.Sprintf("; claimed by %s, %d to %d", c.by, c.asked, c.at)
	}
	for _, m := range e.marks {
		s := leaseStep{token: m.token, what: m.to, outcome: m.outcome}
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
	return "not a valid history of a lease" + all
}

// before reports whether c was certainly made before o. A stopped process may get the reply of its
// call late.
func (c claimed) before(o claimed) bool { return c.at < o.asked }

// met counts the late marks of a claim that came while a later claim was live.
func (e *entryLife) met() (n int) {
	for _, m := range e.marks {
		mine := slices.IndexFunc(e.claims, func(c claimed) bool { return c.token == m.token })
		if m.outcome == "late" && mine >= 0 && slices.ContainsFunc(e.claims, func(c claimed) bool {
			return e.claims[mine].before(c) && c.at < m.asked && (c.finishing == 0 || c.finishing > m.asked)
		}) {
			n++
		}
	}
	return n
}
