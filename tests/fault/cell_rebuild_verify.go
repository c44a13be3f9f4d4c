package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

var rebuildVerifyCell = &cell{
	// Promise: R7.1
	name: "rebuild-verify", number: 42,
	summary: "a verification finds nothing in a right read model under 500 commands a second and kill -9, and exactly the rows that were changed by SQL; a repair mends exactly these",
	full:    70 * time.Second, short: time.Second,
	requires: []string{"verified_right", "rows_changed", "rows_found", "rows_repaired"}, requiresLong: []string{"kill_builder"}, run: runRebuildVerify,
}

// quietFrom is the first slot of writePast whose stream gets no more events in this cell.
const quietFrom = 100

func runRebuildVerify(r *run) {
	r.startBuilt(8 * pastStreams)
	names := []string{heardName, readName}
	ps := []*process{r.builder(heardName+","+readName, nil), r.builder(heardName+","+readName, nil)}
	for _, p := range ps {
		p.awaitReady()
	}
	r.awaitApplied(names...)
	verifiers := map[string]*process{}
	round := r.intn(2)
	r.prove(func() {
		stop := r.flow()
		stopKills := r.killNow(ps, 500*time.Millisecond, 3*time.Second)
		for begin, first := time.Now(), round; round == first || time.Since(begin) < r.span; round++ {
			name := names[round%2]
			verify := func(how string) *projector.Verified { return r.verify(verifiers, name, how) }
			r.isEmpty(name, "of the right rows", verify("only").Differences)
			r.inject("verified_right", 1)
			want := r.changeRows(name)
			r.compareRows(name, "found", want, verify("only").Differences)
			result := verify("repair")
			r.compareRows(name, "found", want, result.Differences)
			r.compareRows(name, "repaired", want, result.Repaired)
			r.isEmpty(name, "after the repair", verify("only").Differences)
			r.inject("rows_changed", len(want))
		}
		stopKills()
		stop()
		for _, p := range ps {
			p.awaitReady()
		}
		r.waitDrained(10 * lease)
		r.awaitApplied(names...)
	})
	r.judgeBuilt(nil, names...)
}

// verify runs a verifier.
func (r *run) verify(all map[string]*process, name, how string) *projector.Verified {
	defer r.limitFlow(builtMost / 2)()
	begin := time.Now()
	p := all[name]
	if p == nil {
		p = r.builder(name, func(s *settings) { s.More["verify"], s.Name = how, "verifier-"+name })
		p.onEnd(func(code int) bool { return code == 0 })
		all[name] = p
	} else {
		p.More["verify"] = how
		r.must(p.begin())
	}
	result := r.verified(p)
	r.measure("verification_ms", time.Since(begin))
	return result
}

// killNow kills processes at random, until stop is called. No verification begins while messages are parked, so it kills
// no process then, and none that has not begun its work: on a slow machine, verifications would wait for ever.
func (r *run) killNow(ps []*process, least, most time.Duration) (stop func()) {
	ctx, cancel := context.WithCancel(r.suite.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for pause(ctx, r.between(least, most)); ctx.Err() == nil; pause(ctx, r.between(least, most)) {
			var parked int
			p := ps[r.intn(len(ps))]
			if err := r.pool.QueryRow(ctx, openParked).Scan(&parked); err != nil || parked > 0 || !p.isReady() {
				continue
			}
			p.restart()
		}
	}()
	return func() { cancel(); <-done }
}

func (r *run) isEmpty(name, what string, found []provider.Difference) {
	if len(found) > 0 {
		r.fail("lost 0, doubled 0, phantom %d, misordered 0: differences of %s %s, such as %s %s: %s, want %s",
			len(found), name, what, found[0].Table, found[0].Key, found[0].Got, found[0].Want)
	}
}

// rowChange is a row before and after it was changed, as JSON; empty if it did not exist.
type rowChange struct {
	want, got string
	moves     bool // more events follow
}

// changeRows changes rows of the live tables, and returns them by view and stream.
func (r *run) changeRows(name string) map[string]rowChange {
	suffix, sums, lists := "", name+"_sums", name+"_lists"
	for _, g := range r.generations(name) {
		if g.State == "live" {
			suffix = g.Suffix
		}
	}
	slots := r.rnd.Perm(pastStreams - quietFrom)
	quiet := func(i int) string { return fmt.Sprintf("%s-%d.0", category, quietFrom+slots[i]) }
	moving := fmt.Sprintf("%s-%d.0", category, r.intn(quietFrom))
	all := map[string]rowChange{}
	for i, c := range []struct{ table, stream, sql string }{
		{lists, quiet(0), `update %s set items = items || 7 where stream = $1`},
		{lists, quiet(1), `update %s set items = array[2, 1] where stream = $1`},
		{sums, quiet(1), `update %s set total = total + 1 where stream = $1`},
		{lists, quiet(2), `delete from %s where stream = $1`},
		{sums, quiet(3), `delete from %s where stream = $1`},
		{lists, category + "-extra", `insert into %s values ($1, '{1}')`},
		{sums, moving, `update %s set total = total + 1000000 where stream = $1`},
	} {
		row := func(when string) string {
			var texts []string
			rows, err := r.pool.Query(r.suite.ctx, `select to_jsonb(t)::text from `+c.table+suffix+` t where stream = $1`, c.stream)
			r.must(err)
			texts, err = pgx.CollectRows(rows, pgx.RowTo[string])
			r.must(err)
			return strings.Join(texts, when)
		}
		one := rowChange{want: row("before"), moves: i == 6}
		tag, err := r.pool.Exec(r.suite.ctx, fmt.Sprintf(c.sql, c.table+suffix), c.stream)
		r.must(err)
		if tag.RowsAffected() != 1 {
			r.fail("%s of %s changed %d rows", c.sql, c.table, tag.RowsAffected())
		}
		one.got = row("after")
		all[c.table+" "+c.stream] = one
	}
	return all
}

// compareRows compares differences with the changed rows.
func (r *run) compareRows(name, what string, want map[string]rowChange, found []provider.Difference) {
	left := maps.Clone(want)
	for _, d := range found {
		var key struct{ Stream string }
		r.must(json.Unmarshal(d.Key, &key))
		is := d.Table + " " + key.Stream
		c, ok := left[is]
		delete(left, is)
		switch {
		case !ok:
			r.fail("lost 0, doubled 0, phantom 1, misordered 0: %s of %s was %s: %s, want %s", is, name, what, d.Got, d.Want)
		case c.moves && (len(d.Want) == 0 || len(d.Got) == 0),
			!c.moves && (normal(d.Want) != normal([]byte(c.want)) || normal(d.Got) != normal([]byte(c.got))):
			r.fail("lost 0, doubled 0, phantom 1, misordered 0: %s of %s was %s as %s, want %s; it was %s and became %s",
				is, name, what, d.Got, d.Want, c.want, c.got)
		default:
			r.inject("rows_"+what, 1)
		}
	}
	for _, is := range slices.Sorted(maps.Keys(left)) {
		r.fail("lost 1, doubled 0, phantom 0, misordered 0: %s of %s was changed, and was not %s", is, name, what)
	}
}

// normal returns JSON without spaces and with ordered keys.
func normal(text []byte) string {
	if len(text) == 0 || string(text) == "null" {
		return ""
	}
	var v any
	if err := json.Unmarshal(text, &v); err != nil {
		return string(text)
	}
	again, _ := json.Marshal(v)
	return string(again)
}
