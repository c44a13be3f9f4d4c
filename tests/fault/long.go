package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/kinora-go/kinora/internal/mutant"
)

// longPart is a part of the long tests: a command at the root of the repository.
type longPart struct {
	name    string
	command string
}

// longParts are the tests that have a long form (see internal/longtest), and a program that runs until it has its numbers.
var longParts = []longPart{
	{"outbox", "go test -count=1 -timeout 60m ./outbox"},
	{"pooled", "go test -count=1 -timeout 60m ./providers/postgres/pooled"},
	{"commits", "go test -count=1 -timeout 60m -run TestNoEventIsSkippedWhateverTheOrderOfCommits ./providers/postgres"},
	{"distributed", "go test -count=1 -timeout 60m ./examples/distributed/..."},
	{"growth", "go run ./examples/growth -events 50000 -limit 20m"},
}

// longResult is the entry of a part in the record.
type longResult struct {
	Part string `json:"part"`
	ranOnce
}

func (l longResult) name() string { return l.Part }

// runLong runs the parts that the record lacks, or those in only, one after another.
func (s *suite) runLong(only, path string) (ok bool, err error) {
	root, err := mutant.Root(s.ctx)
	if err != nil {
		return false, err
	}
	var names []string
	for _, p := range longParts {
		names = append(names, p.name)
	}
	rec, err := openRecord[longResult](path, names, s.codeOf)
	if err != nil {
		return false, err
	}
	passed, failed, skipped := 0, 0, 0
	for _, p := range longParts {
		switch {
		case only != "" && !strings.Contains(","+only+",", ","+p.name+","):
			continue
		case only == "" && !s.again && rec.has(p.name):
			fmt.Printf("recorded: %s\n", p.name)
			skipped++
			continue
		}
		begin := time.Now()
		fmt.Printf("%s: %s\n", p.name, p.command)
		err := p.run(s.ctx, root)
		if s.ctx.Err() != nil {
			return false, s.ctx.Err()
		}
		r := longResult{p.name, rec.ended(p.name, err == nil, begin)}
		if err := rec.put(r); err != nil {
			return false, err
		}
		if r.OK {
			passed++
			fmt.Printf("%-7s %s  %.1fs\n", "ok", p.name, r.Duration)
		} else {
			failed++
			fmt.Printf("%-7s %s  %.1fs  %v\n", "FAILED", p.name, r.Duration, err)
		}
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped)
	return failed == 0, nil
}

// run runs the command of a part.
func (p longPart) run(ctx context.Context, root string) error {
	args := strings.Fields(p.command)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = root, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), "KINORA_LONG=1")
	return cmd.Run()
}
