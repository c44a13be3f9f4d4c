package main

import (
	"bufio"
	"context"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/kinora-go/kinora/projector"
)

// harms are the faults that handlers cause in their own transactions before they apply.
// More["harm"] names one.
var harms = map[string]func(ctx context.Context, w *work, e moved, exec func(sql string, args ...any) error) error{
	"conflicting": conflicting,
	"poisonous":   poisonous,
}

// harm causes the fault that the cell chose, if any.
func (w *work) harm(ctx context.Context, e moved, exec func(sql string, args ...any) error) error {
	if do := harms[w.More["harm"]]; do != nil {
		return do(ctx, w, e, exec)
	}
	return nil
}

// stuck selects the stuck messages of a projector, or of all projectors if name is empty.
func stuck(name string) projector.ParkedFilter {
	return projector.ParkedFilter{Projector: name, States: []projector.ParkedState{projector.StateStuck}}
}

// replayStuck makes all stuck messages of a projector due again.
func (w *work) replayStuck(ctx context.Context, r *projector.Runner, name string) {
	<-r.Running()
	n, err := projector.Replay(ctx, w.db, stuck(name), projector.Decision{By: "suite", Reason: "fixed"})
	w.trace.printf("replayed %d err %v", n, err)
}

// wordWait is the longest time in microseconds that a statement waited for the pool and for its
// result.
const wordWait = 32

// probe measures that time until ctx ends.
func (w *work) probe(ctx context.Context) {
	for ctx.Err() == nil {
		begin := time.Now()
		if _, err := w.db.Pool().Exec(ctx, `select 1`); err != nil {
			return
		}
		w.status.set(wordWait, max(w.status.get(wordWait), time.Since(begin).Microseconds()))
		pause(ctx, 20*time.Millisecond)
	}
}

// countStarts counts how often the handler of each message has started, in all processes.
func countStarts(dir string) (map[string]int, error) {
	files, err := filepath.Glob(filepath.Join(dir, "trace-runner*"))
	if err != nil {
		return nil, err
	}
	n := map[string]int{}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		lines := bufio.NewScanner(f)
		for lines.Scan() {
			if of := strings.Fields(lines.Text()); len(of) > 2 && of[1] == "start" {
				n[of[2]]++
			}
		}
		_ = f.Close()
		if err := lines.Err(); err != nil {
			return nil, err
		}
	}
	return n, nil
}

// atMost records a measurement that depends on the machine. If the cell has it for itself, it fails above limit.
func (r *run) atMost(what string, n, limit int) {
	r.measure(what, time.Duration(n)*time.Millisecond)
	if n > limit && r.isAlone() {
		r.fail("%s is %d, the limit is %d", what, n, limit)
	}
}
