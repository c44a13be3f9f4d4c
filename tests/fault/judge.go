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

// judge drains all children and compares their results with the ledger.
func (r *run) judge() {
	for _, as := range []role{producing, relaying, running, reading} {
		for _, p := range r.of(as) {
			p.stop()
		}
	}
	exact, err := readModel(r.suite.ctx, r.pool, "")
	r.must(err)

	var v verdict
	ledger, h := r.judgeAppends(&v)
	judgeModel(h, exact, &v)
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
	r.count(ledger, &v, parked)
}

// commonGauges are the kinds that processes, the broker and the database count in every cell with a broker.
func (r *run) commonGauges() {
	for _, kind := range []string{"twin", "again", "lost_reply", "republished", "redelivered", "late_ack"} {
		r.gauge(kind, func() int { return r.broker.count(kind) })
	}
	for _, kind := range []string{"suspects", "failures", "late_handlers", "ended_idle", "attempts", "attempts_killed"} {
		r.gauge(kind, func() int { return r.heldAgainst(kind) })
	}
	r.gauge("late_mark", func() int { return int(r.sum(relaying, wordLate)) })
	r.gauge("late_mark_met_a_claim", func() int {
		_, met, err := judgeClaims(r.dir, lease)
		r.must(err)
		return met
	})
	r.gauge("concurrent", func() int {
		n, err := concurrently(r.dir)
		r.must(err)
		return n
	})
	r.gauge("units_of_many", func() int { return int(r.sum(running, wordMany)) })
	r.gauge("units_of_one", func() int { return int(r.sum(running, wordUnits)) })
}

// count fills in the report.
func (r *run) count(ledger map[string]*command, v *verdict, parked int) {
	r.tally(ledger, v)
	res := &r.result
	res.ControlWrong, res.ControlByFault = r.control()
	res.Parked = parked
	res.Deliveries = r.broker.count("delivered")
	r.readGauges(true)
	broken, _, err := judgeClaims(r.dir, lease)
	r.must(err)
	res.ClaimsBroken = len(broken)
	if len(broken) > 0 {
		r.fail("%d claims are broken: %s", len(broken), broken[0])
	}
	if !v.ok() {
		r.fail("lost %d, doubled %d, phantom %d, misordered %d: %s", v.Lost, v.Doubled, v.Phantom, v.Misordered, v.reasons[0])
	}
	if parked > r.parked {
		r.fail("%d messages are parked, want %d", parked, r.parked)
	}
	r.requireKinds()
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
