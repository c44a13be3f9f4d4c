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

// harms are what cells have handlers do, in their own transactions, before they apply. More["harm"] names one.
var harms = map[string]func(ctx context.Context, w *work, e moved, exec func(sql string, args ...any) error) error{
	"conflicting": conflicting,
	"poisonous":   poisonous,
}

// harm does it, if there is one.
func (w *work) harm(ctx context.Context, e moved, exec func(sql string, args ...any) error) error {
	if do := harms[w.More["harm"]]; do != nil {
		return do(ctx, w, e, exec)
	}
	return nil
}

// stuck selects the stuck messages of a projector, or of all of them without a name.
func stuck(name string) projector.ParkedFilter {
	return projector.ParkedFilter{Projector: name, States: []projector.ParkedState{projector.StateStuck}}
}

// mend decides, once the runner runs, that all stuck messages of a projector are replayed.
func (w *work) mend(ctx context.Context, r *projector.Runner, name string) {
	<-r.Running()
	n, err := projector.Replay(ctx, w.db, stuck(name), projector.Decision{By: "suite", Reason: "mended"})
	w.trace.printf("replayed %d err %v", n, err)
}

// wordWait is the longest that a statement waited for the pool, and for its answer, in microseconds.
const wordWait = 32

// probe measures that, until ctx ends.
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

// countStarts is how often the handler of each message has started, in whatever process.
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

// atMost keeps a number, which must not be over limit.
func (r *run) atMost(what string, n, limit int) {
	r.measure(what, time.Duration(n)*time.Millisecond)
	if n > limit {
		r.fail("%s: %d, and not at most %d", what, n, limit)
	}
}
