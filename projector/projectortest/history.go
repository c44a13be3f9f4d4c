package projectortest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

// step applies an event. A second step of an event delivers it again.
type step struct {
	event  int // index
	faults []fault
}

// history is what happens in a pass.
type history struct {
	source  source
	steps   []step
	atOnce  bool          // all events are appended before the runner starts
	rebuild bool          // the read model is rebuilt at the end, in each way that is possible
	pause   time.Duration // before the pass
}

// inOrder returns the history without faults, in which each event is applied once.
func inOrder(s source, events []int) history {
	h := history{source: s}
	for _, n := range events {
		h.steps = append(h.steps, step{event: n})
	}
	return h
}

// events returns the events of h, each once, in order.
func (h history) events() (list []int) {
	for _, s := range h.steps {
		if !slices.Contains(list, s.event) {
			list = append(list, s.event)
		}
	}
	return list
}

// result is what a pass has left.
type result[Row any] struct {
	rows    []Row
	output  []outbox.Message
	problem *problem
}

// play runs h on a new database. An error means that the pass could not be run at all.
func (k *Kit[Tx, DB, Row]) play(t testing.TB, events []prepared, h history) (res result[Row], err error) {
	t.Helper()
	s := newScope(t)
	defer s.end()
	time.Sleep(h.pause) // so that times differ
	w, err := newPass(s, k, events, h.source)
	if err != nil {
		return res, err
	}
	defer func() { _ = w.stop() }() // if an error has ended the pass
	if err := w.run(h); err != nil {
		return res, err
	}
	if res.problem = w.record.problem(); res.problem != nil {
		return res, nil
	}
	res.output = w.record.emitted()
	res.rows, err = w.rows(t.Context())
	return res, err
}

// run applies the steps of h, and stops all runners.
func (w *pass[Tx, DB, Row]) run(h history) error {
	if h.atOnce {
		for _, s := range h.steps {
			if err := w.append(s.event); err != nil {
				return err
			}
		}
	}
	if err := w.start(); err != nil {
		return err
	}
	for _, s := range h.steps {
		if err := w.apply(s); err != nil {
			return err
		}
		if w.record.problem() != nil {
			break
		}
	}
	if err := w.settle(); err != nil {
		return err
	}
	if h.rebuild && w.record.problem() == nil {
		if err := w.rebuild(); err != nil {
			return err
		}
	}
	return w.stop()
}

// rebuild rebuilds the read model in each way that the projector has, and compares the rows.
func (w *pass[Tx, DB, Row]) rebuild() error {
	ctx, cancel := context.WithTimeout(w.t.Context(), patience) // ends a test that hangs
	defer cancel()
	before, err := w.rows(ctx)
	if err != nil {
		return err
	}
	for _, how := range []projector.RebuildHow{projector.InPlace, projector.BlueGreen} {
		err := w.runners[0].runner.Rebuild(ctx, w.p.Name(), projector.Rebuild{
			How: how, Decision: projector.Decision{By: "projectortest", Reason: "ExactlyOnce"},
		})
		if errors.Is(err, projector.ErrNoRebuild) {
			continue
		}
		if err != nil {
			return fmt.Errorf("%s rebuild: %w", how, err)
		}
		after, err := w.rows(ctx)
		if err != nil {
			return err
		}
		if d := diff(rowTexts(before), rowTexts(after)); d != "" {
			w.record.fail(&problem{kind: "rebuild", text: fmt.Sprintf("rows before and after the %s rebuild (- before, + after):\n%s", how, d)})
			return nil
		}
	}
	return nil
}

// compare returns the difference between the result of a pass and that of a clean one, or nil.
func compare[Row any](want, got result[Row]) *problem {
	if got.problem != nil {
		return got.problem
	}
	if d := diff(rowTexts(want.rows), rowTexts(got.rows)); d != "" {
		return &problem{kind: "rows differ", text: "rows (- as they should be, + as they are):\n" + d}
	}
	w, g := texts(want.output), texts(got.output)
	slices.Sort(w)
	slices.Sort(g)
	if d := diff(slices.Compact(w), slices.Compact(g)); d != "" {
		return &problem{kind: "output differs", text: "output (- as it should be, + as it is):\n" + d}
	}
	return nil
}

// diff returns the lines that only one of two lists has, or "" if the lists are equal.
func diff(want, got []string) string {
	if slices.Equal(want, got) {
		return ""
	}
	count := map[string]int{}
	for _, line := range got {
		count[line]++
	}
	var out []string
	for _, line := range want {
		if count[line]--; count[line] < 0 {
			out = append(out, "  - "+line)
		}
	}
	clear(count)
	for _, line := range want {
		count[line]++
	}
	for _, line := range got {
		if count[line]--; count[line] < 0 {
			out = append(out, "  + "+line)
		}
	}
	if len(out) == 0 {
		return "  the same in another order: give the query an order, unless the order is what the projector writes"
	}
	const most = 20
	if len(out) > most {
		out = append(out[:most], fmt.Sprintf("  … and %d more", len(out)-most))
	}
	return strings.Join(out, "\n")
}

func lines(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(text, "\n")
}

// describeSteps prints the steps of h, numbered.
func describeSteps(events []prepared, h history) string {
	var b strings.Builder
	seen := map[int]bool{}
	for i, s := range h.steps {
		e := &events[s.event]
		var notes []string
		if seen[s.event] {
			notes = append(notes, "delivered again")
		}
		seen[s.event] = true
		for _, f := range s.faults {
			notes = append(notes, f.String())
		}
		fmt.Fprintf(&b, "  %d. %s", i+1, e)
		if len(notes) > 0 {
			fmt.Fprintf(&b, "\n       %s", strings.Join(notes, "\n       "))
		}
		b.WriteString("\n")
	}
	if h.rebuild {
		fmt.Fprintf(&b, "  %d. the read model is rebuilt\n", len(h.steps)+1)
	}
	return b.String()
}
