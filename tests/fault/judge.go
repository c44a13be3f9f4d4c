package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"
)

// drainLimit is how long a child may take to end after SIGTERM.
const drainLimit = 15 * time.Second

// judge drains all children and compares their results with the ledger.
func (r *run) judge() {
	for _, as := range []role{producing, relaying, running, reading} {
		for _, p := range r.of(as) {
			p.stop(r.drain)
		}
	}
	ctx := r.suite.ctx
	ledger, err := readLedgers(r.dir)
	r.must(err)
	events, err := readEvents(ctx, r.pool)
	r.must(err)
	exact, err := readModel(ctx, r.pool, "")
	r.must(err)
	control, err := readModel(ctx, r.pool, "control_")
	r.must(err)

	var v, without verdict
	h := judgeLog(ledger, events, &v)
	judgeModel(h, exact, &v)
	judgeModel(h, control, &without)
	for _, a := range r.arms {
		r.judgeArm(a, h)
	}
	for _, stream := range r.broker.wrong {
		v.find(&v.Misordered, stream, "a first publication was out of order")
	}
	for _, why := range v.reasons {
		r.trace.printf("verdict %s", why)
	}
	r.judgeHeldAgainst()
	parked, stuck := r.countOf(`select count(*) from kinora.parked`), r.countOf(`select count(*) from kinora.parked where state = 'stuck'`)
	if stuck > 0 {
		r.fail("%d messages are stuck", stuck)
	}
	r.result.ControlByFault = doubledBy(events, r.broker.copies(), control)
	r.count(ledger, &v, len(without.streams), parked)
}

// count fills in the report.
func (r *run) count(ledger map[string]*command, v *verdict, controlWrong, parked int) {
	r.tally(ledger, v)
	res := &r.result
	res.ControlWrong, res.Parked = controlWrong, parked
	res.Deliveries = r.broker.count("delivered")
	for _, kind := range []string{"twin", "again", "lost_reply", "republished", "redelivered", "late_ack"} {
		if n := r.broker.count(kind); n > 0 {
			r.inject(kind, n)
		}
	}
	if n := r.sum(relaying, wordLate); n > 0 {
		r.inject("late_mark", int(n))
	}
	broken, met, err := judgeClaims(r.dir, lease)
	r.must(err)
	if met > 0 {
		r.inject("late_mark_met_a_claim", met)
	}
	res.ClaimsBroken = len(broken)
	if len(broken) > 0 {
		r.fail("%d claims are broken: %s", len(broken), broken[0])
	}
	concurrent, err := concurrently(r.dir)
	r.must(err)
	r.inject("concurrent", concurrent)
	r.inject("units_of_many", int(r.sum(running, wordMany)))
	r.inject("units_of_one", int(r.sum(running, wordUnits)))
	if !v.ok() {
		r.fail("lost %d, doubled %d, phantom %d, misordered %d: %s", v.Lost, v.Doubled, v.Phantom, v.Misordered, v.reasons[0])
	}
	if parked > r.parked {
		r.fail("%d messages are parked, want %d", parked, r.parked)
	}
	r.requireKinds()
	if r.cell.redelivers && controlWrong == 0 {
		r.fail("the control arm is right: the cell proves nothing")
	}
	if (r.cell.byFault || r.cell.byFaultLong && r.length >= time.Minute) && res.ControlByFault == 0 {
		r.fail("the control arm has doubled only copied messages: the cell proves nothing")
	}
}

// tally fills in the counts of commands and violations.
func (r *run) tally(ledger map[string]*command, v *verdict) {
	res := &r.result
	for _, c := range ledger {
		res.Commands++
		switch c.outcome {
		case acked:
			res.Acked++
		case ambiguous:
			res.Ambiguous++
		case rejected:
			res.Rejected++
		}
	}
	res.Lost, res.Doubled, res.Phantom, res.Misordered = v.Lost, v.Doubled, v.Phantom, v.Misordered
	res.Judged = true
}

// requireKinds fails the cell if a kind was not injected that the cell requires.
func (r *run) requireKinds() {
	kinds := r.cell.requires
	if r.length >= time.Minute {
		kinds = append(kinds, r.cell.requiresLong...)
	}
	for _, kind := range kinds {
		if r.kinds()[kind] == 0 {
			r.fail("no %s was injected: the cell proves nothing", kind)
		}
	}
}

// keepHistory writes the remaining tables as text, and the server's log, to the cell's directory.
func (r *run) keepHistory() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if r.pg == nil {
		return
	}
	if err := r.dump(ctx); err != nil {
		r.say("could not save all tables: %v", err)
	}
	if err := copyFile(filepath.Join(r.dir, "postgres.log"), r.pg.Log()); err != nil {
		r.say("could not save the server's log: %v", err)
	}
}

func (r *run) dump(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, r.dsn)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	rows, err := conn.Query(ctx, `select format('%I.%I', schemaname, tablename) from pg_tables where schemaname in ('kinora', 'public')`)
	if err != nil {
		return err
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, name := range append(names, "pg_stat_activity", "pg_locks") {
		f, err := os.Create(filepath.Join(r.dir, "table-"+name))
		if err != nil {
			return err
		}
		_, err = conn.PgConn().CopyTo(ctx, f, "copy (select * from "+name+") to stdout (format csv, header)")
		_ = f.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func copyFile(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	_ = out.Close()
	return err
}
