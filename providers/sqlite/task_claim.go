package sqlite

import (
	"context"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/taskrow"
	"github.com/kinora-go/kinora/provider"
)

// taskCandidates walks the due tasks of each kind of ?2 separately, up to the limit ?1, so that
// tasks of other kinds and tasks that wait cost nothing. The kinds take turns. It reads the
// clock once, and the long columns only of the tasks that it returns.
const (
	taskCandidates    = `with` + turnsOf + `kinora_tasks_due where open = 1 and suspect = 0` + inTurns
	suspectCandidates = `with` + turnsOf + `kinora_tasks_suspect where open = 1 and suspect = 1` + inTurns

	turnsOf = ckOnce + `,
kinds (kind) as materialized (select distinct value from json_each(?2)),
turns (task, due, turn) as materialized (
	select p.id, p.next_at, row_number() over (partition by p.kind order by p.next_at, p.id)
	from kinds cross join kinora_tasks p on p.id in (
		select id from kinora_tasks indexed by `

	inTurns = ` and kind = kinds.kind and next_at <= (select t from ck)
		order by next_at, id limit ?1))
select ` + taskColumns + `
from (select * from turns order by turn, due, task limit ?1) cross join kinora_tasks o on o.id = task
order by turn, due, task`
)

// TaskCandidates implements provider.Tasks.
func (d *Provider) TaskCandidates(ctx context.Context, q provider.TaskQuery, limit int) ([]provider.Task, error) {
	if err := provider.CheckStorable("query.kinds", q.Kinds...); err != nil {
		return nil, wrap("read task candidates", err)
	}
	rows, err := taskCandidatesOf(ctx, d.reads, q, limit)
	return result(tasksOf(rows), "read task candidates", err)
}

func taskCandidatesOf(ctx context.Context, from querier, q provider.TaskQuery, limit int) ([]taskrow.Row, error) {
	query := taskCandidates
	if q.Alone {
		query = suspectCandidates
	}
	return taskRowsOf(ctx, from, query, max(limit, 0), listOf(q.Kinds))
}

const (
	// takeTask changes task ?1 if it is still as ?12 to ?15 say, and due at ?16.
	takeTask = `
update kinora_tasks set
	status = ?2, suspect = ?3, token = ?4, claimed_by = ?5, next_at = ?6, doubt = ?7, attempted_at = ?8, attempts = ?9, vanished = ?10, code = ?11
where id = ?1 and open = 1 and version = ?12 and status = ?13 and attempts = ?14 and token is ?15 and next_at <= ?16`

	// damageTask abandons task ?1.
	damageTask = `
update kinora_tasks set
	status = 'abandoned', open = 0, suspect = 0, token = null, code = '` + codeMalformed + `', version = min(version, 9007199254740991) + 1,
	ended_at = ` + clock + `
where id = ?1`
)

const readClock = `select ` + clock

func (s session) now(ctx context.Context) (time.Time, error) {
	var ms int64
	err := one(ctx, s, []any{&ms}, readClock)
	return timeOf(ms), err
}

// takeTask claims the task that was read as r. It abandons a task whose state is malformed, because every
// claim would find the task again.
func (s session) takeTask(ctx context.Context, r taskrow.Row, q provider.TaskQuery, t claim.Terms, now time.Time) (taken provider.Task, ok bool, err error) {
	is, records, taken, ok := r.Take(q.Attempts, t, now)
	n, err := s.changed(ctx, takeTask, r.ID, string(is.Status), is.Suspect, tokenOf(is.Token), is.ClaimedBy, msOf(is.NextAt), is.Doubt, msOf(is.LastAttemptedAt),
		is.Attempts, is.Vanished, is.Code, r.Version, string(r.Status), r.Attempts, tokenOf(r.Token), now.UnixMilli())
	if err != nil || n == 0 {
		return taken, false, err
	}
	if err = s.recordAll(ctx, r.ID, records); err == nil && r.State == nil {
		if _, err = s.exec(ctx, damageTask, r.ID); err == nil {
			err = s.record(ctx, r.ID, provider.WhatAbandoned, codeMalformed, provider.Decision{By: t.Holder})
		}
		ok = false
	}
	return taken, ok, err
}

// ClaimTasks implements provider.Tasks, as ClaimEntries does: it reads the candidates
// before the transaction begins, so that an idle worker takes no write lock.
func (d *Provider) ClaimTasks(ctx context.Context, q provider.TaskQuery, t claim.Terms) (taken []provider.Task, err error) {
	if t, err = t.WithDefaults(); err != nil {
		return nil, err
	}
	if q.Alone {
		t.Limit = 1
	}
	err = provider.CheckStorable("query.kinds", q.Kinds...)
	if err == nil {
		err = d.notInside(ctx) // also if there is nothing to claim
	}
	if err != nil {
		return nil, fmt.Errorf("claim tasks: %w", err)
	}
	rows, err := taskCandidatesOf(ctx, d.reads, q, t.Limit)
	if err != nil || len(rows) == 0 {
		return nil, wrap("read task candidates", err)
	}
	err = d.writeTx(ctx, func(u *unit) error {
		taken, err = u.claimTasks(ctx, rows, q, t)
		if err != nil || len(taken) > 0 {
			return err
		}
		// Another worker claimed the candidates first, or none of them can run. No worker can claim
		// while this transaction holds the lock.
		if rows, err = taskCandidatesOf(ctx, u, q, t.Limit); err == nil {
			taken, err = u.claimTasks(ctx, rows, q, t)
		}
		return err
	})
	return result(taken, "claim tasks", err)
}

func (s session) claimTasks(ctx context.Context, rows []taskrow.Row, q provider.TaskQuery, t claim.Terms) (taken []provider.Task, err error) {
	now, err := s.now(ctx)
	for i := 0; err == nil && i < len(rows); i++ {
		var got provider.Task
		var ok bool
		if got, ok, err = s.takeTask(ctx, rows[i], q, t, now); ok {
			taken = append(taken, got)
		}
	}
	return taken, err
}
