package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/kinora-go/kinora/claim"
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
	tasks, err := taskCandidatesOf(ctx, d.reads, q, limit)
	return result(tasks, "read task candidates", err)
}

func taskCandidatesOf(ctx context.Context, from querier, q provider.TaskQuery, limit int) ([]provider.Task, error) {
	query := taskCandidates
	if q.Alone {
		query = suspectCandidates
	}
	return tasksOf(ctx, from, query, max(limit, 0), listOf(q.Kinds))
}

const (
	// takeTask claims task ?1 for token ?6, if the task is still as ?2 to ?5 say. The claim of a
	// claimed and due task has vanished: at the limit ?9 of attempts the task is spent, and the second
	// time in a row it becomes a suspect.
	takeTask = `
update kinora_tasks set
	status     = iif(` + secondInRow + `, 'failed', 'claimed'),
	suspect    = suspect or ` + secondInRow + `,
	token      = iif(` + secondInRow + `, null, ?6),
	claimed_by = iif(` + secondInRow + `, claimed_by, ?7),
	next_at    = iif(` + secondInRow + `, next_at, ` + claimedAt + ` + ?8),
	doubt      = doubt or undo = 0,
	attempted_at = iif(` + secondInRow + ` or ` + isSpent + `, attempted_at, ` + claimedAt + `),
	attempts   = iif(` + secondInRow + ` or ` + isSpent + `, attempts, min(attempts, 999999999) + 1),
	vanished   = iif(status = 'claimed', min(vanished, 999999999) + 1, vanished),
	code       = iif(status = 'claimed', 'vanished', code)
where id = ?1 and open = 1 and version = ?2 and status = ?3 and attempts = ?4 and token is ?5 and next_at <= ` + claimedAt + `
returning ` + taskColumns + `, coalesce(wait_until <= ` + claimedAt + `, 0)`

	claimedAt   = `coalesce(?10, ` + clock + `)`
	isSpent     = `(status = 'claimed' and ?9 > 0 and attempts >= ?9)`
	secondInRow = `(status = 'claimed' and suspect = 0 and vanished > 0 and not ` + isSpent + `)`

	// damageTask abandons task ?1.
	damageTask = `
update kinora_tasks set
	status = 'abandoned', open = 0, suspect = 0, token = null, code = '` + codeMalformed + `', version = min(version, 9007199254740991) + 1,
	ended_at = ` + clock + `
where id = ?1`
)

const readClock = `select ` + clock

// takeTask claims c at a time (int64), or now (nil). It abandons a task whose state is malformed,
// because every claim would find the task again.
func (s session) takeTask(ctx context.Context, c provider.Task, q provider.TaskQuery, t claim.Terms, at any) (taken provider.Task, ok bool, err error) {
	found := sql.ErrNoRows
	err = eachRow(ctx, s, func(rows *sql.Rows) error {
		var timedOut bool
		r, err := scanTask(rows, &timedOut)
		taken, found = r.Task, err
		taken.TimedOut = timedOut
		return nil
	}, takeTask, c.ID, c.Version, string(c.Status), c.Attempts, tokenOf(c.Token), tokenOf(t.Token), t.Holder, millis(t.Lease), q.Attempts, at)
	switch {
	case err == nil && errors.Is(found, sql.ErrNoRows):
		return c, false, nil
	case err != nil || found != nil:
		return c, false, errors.Join(err, found)
	}
	if c.Status == provider.TaskClaimed {
		if err = s.record(ctx, c.ID, provider.WhatFailed, provider.CodeVanished, provider.Decision{By: c.ClaimedBy}); err != nil {
			return c, false, err
		}
	}
	switch {
	case taken.State == nil:
		if _, err = s.exec(ctx, damageTask, c.ID); err == nil {
			err = s.record(ctx, c.ID, provider.WhatAbandoned, codeMalformed, provider.Decision{By: t.Holder})
		}
		return c, false, err
	case taken.Status != provider.TaskClaimed:
		return c, false, nil
	}
	taken.Doubt = c.Doubt
	taken.Spent = c.Status == provider.TaskClaimed && q.Attempts > 0 && c.Attempts >= q.Attempts
	return taken, true, nil
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
	if err = d.notInside(ctx); err != nil { // also if there is nothing to claim
		return nil, fmt.Errorf("claim tasks: %w", err)
	}
	read, err := d.TaskCandidates(ctx, q, t.Limit)
	if err != nil || len(read) == 0 {
		return nil, err
	}
	err = d.writeTx(ctx, func(u *unit) error {
		taken, err = u.claimTasks(ctx, q, t, func(context.Context, int) ([]provider.Task, error) { return read, nil })
		if err != nil || len(taken) > 0 {
			return err
		}
		// Another worker claimed the candidates first, or none of them can run. No worker can claim
		// while this transaction holds the lock.
		taken, err = u.claimTasks(ctx, q, t, func(ctx context.Context, limit int) ([]provider.Task, error) {
			return taskCandidatesOf(ctx, u, q, limit)
		})
		return err
	})
	return result(taken, "claim tasks", err)
}

func (s session) claimTasks(ctx context.Context, q provider.TaskQuery, t claim.Terms, read func(context.Context, int) ([]provider.Task, error)) ([]provider.Task, error) {
	var now int64
	if err := one(ctx, s, []any{&now}, readClock); err != nil {
		return nil, err
	}
	return claim.Portable(ctx, t, read,
		func(ctx context.Context, c provider.Task, t claim.Terms) (provider.Task, bool, error) {
			return s.takeTask(ctx, c, q, t, now)
		}, nil)
}
