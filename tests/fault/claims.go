package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// claimed is one claim of an entry, as the relay that made it knows it; times are of the machine, which all share.
type claimed struct {
	by        string
	token     string
	asked, at int64 // when the relay asked for it, and had it
	over      int64 // when it began to mark it for good
}

// marked is a mark, accepted or late.
type marked struct {
	by    string
	token string
	asked int64
	to    string
	late  bool
}

// entryLife is what relays have done to an entry.
type entryLife struct {
	claims []claimed
	marks  []marked
}

// judgeClaims tells what must not be in the history of claims: a claim while another one lived, and a mark that was
// accepted after another relay had taken the entry over. met is how many late marks met the claim of another that lived.
func judgeClaims(dir string, lease time.Duration) (broken []string, met int, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "trace-relay*"))
	if err != nil {
		return nil, 0, err
	}
	entries := map[string]*entryLife{}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, 0, err
		}
		readClaims(f, filepath.Base(name), entries)
		_ = f.Close()
	}
	for seq, e := range entries {
		for _, what := range e.broken(lease) {
			broken = append(broken, "entry "+seq+": "+what)
		}
		met += e.met()
	}
	slices.Sort(broken)
	return broken, met, nil
}

func readClaims(from io.Reader, by string, entries map[string]*entryLife) {
	for lines := bufio.NewScanner(from); lines.Scan(); {
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
			e.claims = append(e.claims, claimed{by: by, token: token, asked: asked, at: at})
		case "marked", "late":
			e.marks = append(e.marks, marked{by, token, asked, more, what == "late"})
		case "marking": // from here on nobody knows whether the claim lives
			if i := slices.IndexFunc(e.claims, func(c claimed) bool { return c.token == token && c.by == by }); i >= 0 {
				e.claims[i].over = asked
			}
		}
	}
}

// before tells whether c was certainly made before o: a process that is stopped in a call may hear of it late.
func (c claimed) before(o claimed) bool { return c.at < o.asked }

func (e *entryLife) broken(lease time.Duration) (all []string) {
	for _, c := range e.claims {
		for _, later := range e.claims {
			if !c.before(later) {
				continue
			}
			if later.at < c.asked+int64(lease) && (c.over == 0 || later.at < c.over) {
				all = append(all, fmt.Sprintf("claimed by %s, and by %s while that lived", c.by, later.by))
			}
			for _, m := range e.marks {
				if !m.late && m.token == c.token && m.asked > later.at {
					all = append(all, fmt.Sprintf("a mark of %s was accepted (%s) after %s had taken it over", m.by, m.to, later.by))
				}
			}
		}
	}
	return all
}

// met counts the late marks of a claim that came while a later one lived.
func (e *entryLife) met() (n int) {
	for _, m := range e.marks {
		mine := slices.IndexFunc(e.claims, func(c claimed) bool { return c.token == m.token })
		if m.late && mine >= 0 && slices.ContainsFunc(e.claims, func(c claimed) bool {
			return e.claims[mine].before(c) && c.at < m.asked && (c.over == 0 || c.over > m.asked)
		}) {
			n++
		}
	}
	return n
}
