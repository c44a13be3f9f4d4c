package main

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

var brokerLosesCell = &cell{
	// Promise: G7b.1, G7b.4
	name: "broker-loses", number: 24,
	summary: "a broker that loses, doubles and delays deliveries, and a topic without publishers: exact by the log, each miss counted, under kill -9",
	full:    2 * time.Minute, short: 3 * time.Second, redelivers: true,
	requires: []string{"kill_runner", "lost", "delayed", "doubled", "counted"}, run: runBrokerLoses,
}

// countFor is the part of the cell's time in which no process is killed. A process that is killed
// may have completed events that it has not counted yet.
const countFor = 20

// countAtATime is fewer events than make a reader catch up. A reader that catches up counts no completed events.
const countAtATime = 300

func runBrokerLoses(r *run) {
	r.ahead = 200
	r.server(brokerConfig{Window: 1024, Duplicate: 0.02})
	r.addArms(unorderedName, unheardName, brokerName)
	lossy := func(s *settings) {
		s.Rate, s.Lossy, s.Grace, s.Arms = 200, true, lossyGrace, []string{orderedName, unorderedName, unheardName, brokerName}
	}
	_, relays, runners := r.startAll(2, 2, lossy)
	for _, what := range []string{"lost", "delayed", "doubled"} {
		r.gauge(what, func() int {
			n, err := tracedSince(r.dir, what, 0)
			r.must(err)
			return n
		})
	}
	r.prove(func() {
		r.during(func() {
			r.sleep(r.between(300*time.Millisecond, 900*time.Millisecond))
			if r.intn(4) == 0 {
				relays[r.intn(2)].restart()
			} else {
				runners[r.intn(2)].restart()
			}
		})
		for _, p := range r.all {
			p.awaitReady()
		}
		r.waitCompleted(10*lease, exactName, unorderedName, unheardName)
		r.countMisses()
	})
	r.waitPruned(exactName, unorderedName, unheardName)
	for name, n := range r.misses() {
		r.inject(name+"_completed", n)
	}
	r.judge()
}

// countMisses lets commands flow while no process is killed, and compares the misses with what observers count.
func (r *run) countMisses() {
	begin, before := machineTime(), r.misses()
	events := r.countOf(`select count(*) from kinora.events`)
	for start := time.Now(); ; {
		from := r.countOf(`select count(*) from kinora.events`)
		stop := r.flow()
		r.await("events", func() bool { return r.countOf(`select count(*) from kinora.events`) >= from+countAtATime })
		stop()
		r.waitCompleted(10*lease, exactName, unorderedName, unheardName)
		if time.Since(start) >= max(r.span/countFor, 3*time.Second) {
			break
		}
	}
	lost, err := tracedSince(r.dir, "lost", begin)
	r.must(err)
	after := r.misses()
	r.atLeast("unordered completed", after[unorderedName]-before[unorderedName], lost)
	r.atLeast("unheard completed", after[unheardName]-before[unheardName], r.countOf(`select count(*) from kinora.events`)-events)
	r.inject("counted", lost)
}

// atLeast fails the cell if a count is too low.
func (r *run) atLeast(what string, n, least int) {
	r.say("%s %d, at least %d", what, n, least)
	if n < least {
		r.fail("%s %d, want at least %d", what, n, least)
	}
}

// misses returns by arm how many events the readers of the log have completed, as observers count them.
func (r *run) misses() map[string]int {
	all := map[string]int{}
	for _, name := range []string{exactName, unorderedName, unheardName} {
		all[name] = int(r.sum(running, wordCompleted+armNumber(name)))
	}
	return all
}

// waitCompleted waits until everything is published and acked, projectors are live, and their
// checkpoints are at the end of the log. Readers park suspects until then: it waits for those too.
func (r *run) waitCompleted(within time.Duration, projectors ...string) {
	r.waitDrained(within)
	begin := time.Now()
	at := ""
	done := r.awaitOr(r.suite.patience(), func() bool {
		at = ""
		err := r.pool.QueryRow(r.suite.ctx, `
			select coalesce(string_agg(format('%s %s %s', p, coalesce(mode, 'none'), position), ', '), '')
			from unnest($1::text[]) p left join kinora.checkpoints on projector = p
			where mode is distinct from 'live' or position < (select max(position) from kinora.events)`, projectors).Scan(&at)
		if err != nil || at != "" {
			return false
		}
		rest, putOff, err := r.backlog()
		at = fmt.Sprintf("%s, %d lanes delayed", rest, putOff)
		return err == nil && rest == "" && putOff == 0
	})
	r.measure("completed_ms", time.Since(begin))
	if !done {
		r.fail("not completed at the end of the log: %s", at)
	}
}

// pruneLimit is how long pruning may take in the full form.
const pruneLimit = 75 * time.Second

// waitPruned waits until projectors have no markers. Runners prune when they start and once a minute:
// in a short cell one is started again.
func (r *run) waitPruned(projectors ...string) {
	if !r.isLong() {
		runners := r.of(running)
		p := runners[len(runners)-1]
		p.stop()
		r.must(p.begin())
	}
	begin := time.Now()
	left := 0
	if !r.awaitOr(r.suite.patience(), func() bool {
		left = r.countOf(`select count(*) from kinora.markers where split_part(handler, '/', 1) = any($1)`, projectors)
		return left == 0
	}) {
		r.fail("%d markers are left after %s of quiet", left, time.Since(begin).Round(time.Second))
	}
	r.within("pruned_ms", "the markers were pruned", time.Since(begin), pruneLimit)
}

// tracedSince counts the messages for which runners have traced a word since begin, each once.
func tracedSince(dir, word string, begin int64) (int, error) {
	files, err := filepath.Glob(filepath.Join(dir, "trace-runner*"))
	if err != nil {
		return 0, err
	}
	ids := map[string]bool{}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return 0, err
		}
		lines := bufio.NewScanner(f)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			at, rest, _ := bytes.Cut(lines.Bytes(), []byte(" "))
			what, id, _ := bytes.Cut(rest, []byte(" "))
			if string(what) != word {
				continue
			}
			if when, err := strconv.ParseInt(string(at), 10, 64); err == nil && when >= begin {
				ids[string(id)] = true
			}
		}
		_ = f.Close()
		if err := lines.Err(); err != nil {
			return 0, err
		}
	}
	return len(ids), nil
}
