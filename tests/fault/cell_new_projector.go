package main

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
)

var newProjectorCell = &cell{
	// Promise: G7b.2
	name: "new-projector", number: 25,
	summary: "a projector added over many events, while a broker delivers 500 a second, under kill -9: exact, in order, and then live",
	full:    100 * time.Second, short: 3 * time.Second, alone: true, redelivers: true,
	requires: []string{"kill_runner", "left_to_reader"}, run: runNewProjector,
}

// Events that are in the log before the projector is added.
const (
	pastEvents      = 300_000
	pastEventsShort = 30_000
	pastStreams     = 300 // at a time
	memoryLimit     = 130 // percent: memory with all events, of that with a tenth
)

func runNewProjector(r *run) {
	r.server(brokerConfig{Duplicate: 0.02})
	r.addArms(tenthName)
	r.arms = nil // it does not get all events
	n, short := pastEvents, !r.isLong()
	if short {
		n = pastEventsShort
	}
	begin := time.Now()
	r.must(r.writePast(n))
	r.say("%d events written in %s", n, time.Since(begin).Round(time.Millisecond))

	change := func(arm string, from int) func(*settings) {
		return func(s *settings) {
			s.Rate, s.Alone, s.Streams, s.Hot, s.Batched = 500, false, pastStreams, 0, s.Role == running
			s.Arms, s.From, s.Control = []string{arm}, int64(from), arm == exactName
		}
	}
	arm, from, tenth := exactName, 0, 0
	if !short {
		arm, from = tenthName, n-n/10
	}
	_, _, runners := r.startAll(1, 2, change(arm, from))
	if !short {
		tenth = r.catchUp(tenthName, runners, r.length/5)
		r.waitDrained(10 * lease)
		for i, p := range runners {
			p.stop()
			runners[i] = r.child(running, change(exactName, 0))
		}
	}
	all, added := 0, false
	r.prove(func() {
		if added {
			r.forget(runners)
		}
		added = true
		all = max(all, r.catchUp(exactName, runners, r.span))
		r.waitCompleted(10*lease, exactName)
	})
	if !short {
		percent := 100 * all / max(tenth, 1)
		r.say("runners had at most %d MB, and %d MB with a tenth of the events: %d %%", all>>10, tenth>>10, percent)
		r.atMost("memory_percent", percent, memoryLimit)
	}
	r.judge()
}

// forget deletes all that the projector has, while no runner runs, so that it is a new one again.
func (r *run) forget(runners []*process) {
	for _, p := range runners {
		p.stop()
	}
	for _, sql := range []string{
		`truncate sums, lists`,
		`delete from kinora.markers where split_part(handler, '/', 1) = 'exact'`,
		`delete from kinora.checkpoints where projector = 'exact'`,
	} {
		_, err := r.pool.Exec(r.suite.ctx, sql)
		r.must(err)
	}
	for _, p := range runners {
		r.must(p.begin())
	}
}

// catchUp lets commands flow, and kills runners until a projector is live, and at least for a time.
// A short cell kills only for that time, and until it has killed the reader of the log once. It returns the most memory that one of them has used, in kB.
func (r *run) catchUp(projector string, runners []*process, least time.Duration) (memory int) {
	defer r.flow()()
	begin, live, counted := time.Now(), time.Duration(0), r.kinds()["left_to_reader"]
	for next := lease / 4; live == 0 || time.Since(begin) < least; {
		r.sleep(20 * time.Millisecond)
		for _, p := range runners {
			memory = max(memory, p.memory())
		}
		mode := r.modeOf(projector)
		if mode == "live" && live == 0 {
			live = time.Since(begin)
			r.measure(projector+"_live_ms", live)
			r.say("%s is live after %s", projector, live.Round(time.Millisecond))
		}
		since := time.Since(begin)
		kills := r.isLong() || since < least || r.kinds()["left_to_reader"] == counted
		if since > next && kills {
			next = since + lease/4
			p := runners[r.intn(2)]
			p.awaitReady() // on a slow machine, kills alone would keep the runners from their work
			if p.restart() && mode == "catch-up" {
				r.inject("left_to_reader", 1)
				next = time.Since(begin) + r.between(2*lease, 4*lease)
			}
		}
		if time.Since(begin) > 10*least+r.suite.patience() {
			r.fail("%s is %s after %s", projector, mode, time.Since(begin))
			return memory
		}
	}
	return memory
}

// modeOf returns the mode of a projector's checkpoint.
func (r *run) modeOf(projector string) (mode string) {
	r.must(r.pool.QueryRow(r.suite.ctx, `select coalesce((select mode from kinora.checkpoints where projector = $1), '')`, projector).Scan(&mode))
	return mode
}

// memory returns the most memory that this life of the process has used, in kB; 0 if it has ended.
func (p *process) memory() (kB int) {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	_, after, _ := bytes.Cut(text, []byte("VmHWM:"))
	kB, _ = strconv.Atoi(strings.TrimSpace(string(bytes.TrimSuffix(bytes.SplitN(after, []byte("\n"), 2)[0], []byte("kB")))))
	return kB
}

// writePast writes n events by plain SQL, and their commands to a ledger. The streams have the
// length that producers give them, and those at the end of the log are continued by producers.
func (r *run) writePast(n int) error {
	l, err := openLedger(r.dir, "past", 1)
	if err != nil {
		return err
	}
	defer l.close()
	const length = 200
	var events, streams [][]any
	for i := range n {
		round, slot := i/pastStreams, i%pastStreams
		id := fmt.Sprintf("%d.%d", slot, round/length)
		stream := eventstore.StreamName(category, id)
		c := command{ID: uuid.NewString(), Stream: stream, N: round%length + 1, Amount: int64(1 + i%1000)}
		l.add("i %s %s %d %d\n", c.ID, c.Stream, c.N, c.Amount)
		l.outcome(c, acked)
		data := fmt.Sprintf(`{"command":%q,"stream":%q,"n":%d,"amount":%d}`, c.ID, c.Stream, c.N, c.Amount)
		events = append(events, []any{stream, int64(c.N), uuid.NewString(), movedAs, 1, data, "{}", time.Now()})
		if c.N == length || i+pastStreams >= n {
			streams = append(streams, []any{stream, category, int64(c.N)})
		}
		r.broker.last[stream] = c.N
	}
	copyIn := func(table string, rows [][]any, columns ...string) {
		if err == nil {
			_, err = r.pool.CopyFrom(r.suite.ctx, pgx.Identifier{"kinora", table}, columns, pgx.CopyFromRows(rows))
		}
	}
	copyIn("streams", streams, "stream", "category", "version")
	copyIn("events", events, "stream", "version", "id", "type", "schema_version", "data", "metadata", "recorded_at")
	r.past = n
	return err
}
