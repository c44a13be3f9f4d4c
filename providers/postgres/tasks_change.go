package postgres

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

const (
	changeTasksSQL = `
select n, undo, version, group_id
from kinora.change_tasks($1::text[], $2::text[]::uuid[], $3::text[], $4::bigint[], $5::jsonb[], $6::text[], $7::boolean[], $8::text[], $9::boolean[], $10::jsonb[], $11::text[])`

	tasksByIDSQL = `
select ` + taskColumns + ` from unnest($1::text[]) n(id), lateral (select * from kinora.tasks where id = n.id limit 1) o`

	countTaskSQL = `
update kinora.task_groups set open = open - 1, completed_at = case when open = 1 then clock_timestamp() end
where id = $1::text returning kind, data, total, open`
)

// changeTasks applies changes with one statement. A second one reads the tasks whose changes are
// refused.
func (db *Provider) changeTasks(ctx context.Context, on querier, changes []provider.TaskChange) ([]provider.TaskChanged, error) {
	if err := provider.CheckTaskChanges(changes); err != nil {
		return nil, wrap("change tasks", err)
	}
	order := inOrder(changes)
	args, err := changeArgs(changes, order)
	if err != nil {
		return nil, wrap("change tasks", err)
	}
	changed := make([]provider.TaskChanged, len(changes))
	rows, _ := on.Query(ctx, db.q(changeTasksSQL), db.described(args)...) // the rows return its error too
	var n, applied int
	var now provider.Task
	_, err = pgx.ForEachRow(rows, []any{&n, &now.Undo, &now.Version, &now.Group}, func() error {
		at := order[n-1]
		now.ID = changes[at].ID
		changed[at] = provider.TaskChanged{Applied: true, Now: now}
		applied++
		return nil
	})
	if err == nil && applied < len(changes) {
		err = db.readRefused(ctx, on, changes, changed)
	}
	return changed, wrap("change tasks", explain(err))
}

// readRefused sets the stored tasks of refused changes.
func (db *Provider) readRefused(ctx context.Context, on querier, changes []provider.TaskChange, changed []provider.TaskChanged) error {
	var ids []string
	for i := range changed {
		if !changed[i].Applied {
			ids = append(ids, changes[i].ID)
		}
	}
	tasks, err := collect(ctx, on, scanTask, db.q(tasksByIDSQL), planned, ids)
	byID := make(map[string]provider.Task, len(tasks))
	for _, t := range tasks {
		byID[t.ID] = t
	}
	for i := range changed {
		if !changed[i].Applied {
			changed[i].Now = byID[changes[i].ID]
		}
	}
	return err
}

// inOrder returns the indexes of changes in order of their ids: all statements that lock several
// tasks lock them in this order.
func inOrder(changes []provider.TaskChange) []int {
	order := make([]int, len(changes))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return strings.Compare(changes[a].ID, changes[b].ID) })
	return order
}

// changeArgs returns the arguments of changeTasksSQL, in this order.
func changeArgs(changes []provider.TaskChange, order []int) ([]any, error) {
	n := len(changes)
	ids, tokens, to, after := make([]string, n), make([]string, n), make([]string, n), make([]int64, n)
	slots, open, progress := make([]*string, n), make([]string, n), make([]bool, n)
	gaveUp, doubts, results, codes := make([]string, n), make([]bool, n), make([]*string, n), make([]string, n)
	for i, at := range order {
		c := &changes[at]
		ids[i], tokens[i], to[i], open[i], progress[i] = c.ID, uuid.UUID(c.Token).String(), string(c.To), c.Open, c.Progress
		gaveUp[i], doubts[i], codes[i] = c.GiveUp, c.Doubt, c.Code
		if after[i] = c.After.Microseconds(); c.After > 0 {
			after[i] = max(after[i], 1)
		}
		if len(c.Slots) > 0 {
			text, err := json.Marshal(c.Slots)
			if err == nil && len(text) > provider.MaxTaskState {
				err = &eventstore.InvalidError{Field: fmt.Sprintf("changes[%d].slots", at), Reason: fmt.Sprintf("%d bytes: at most %d are allowed", len(text), provider.MaxTaskState)}
			}
			if err != nil {
				return nil, err
			}
			slots[i] = new(string)
			*slots[i] = string(text)
		}
		if c.Result != nil {
			results[i] = new(string)
			*results[i] = string(c.Result)
		}
	}
	return []any{ids, tokens, to, after, slots, open, progress, gaveUp, doubts, results, codes}, nil
}

// ChangeTasks implements provider.Tasks.
func (db *Provider) ChangeTasks(ctx context.Context, changes []provider.TaskChange) ([]provider.TaskChanged, error) {
	if len(changes) == 0 {
		return nil, nil
	}
	crash.Point("change tasks: before")
	changed, err := db.changeTasks(ctx, db.pool, changes)
	crash.Point("change tasks: after")
	if err != nil {
		return nil, classifyOwn(ctx, err)
	}
	for i := range changed {
		if changed[i].Applied && changes[i].To == provider.TaskPending {
			db.tasksDue()
			break
		}
	}
	return changed, nil
}

// A renewal waits for no lock: the transaction that has locked a row is that of the task's own
// step, or of an answer. The last part sees the rows as they were before the renewal.
const renewTasksSQL = `
with c as materialized (select * from unnest($1::text[], $2::uuid[]) c(id, token)),
locked as materialized (
	select o.id, o.token from kinora.tasks o where o.id = any($1::text[]) and o.status = 'claimed' and o.token = any($2::uuid[])
	order by o.id for update skip locked),
renewed as (
	update kinora.tasks o set next_at = clock_timestamp() + $3::bigint * interval '1 microsecond'
	from locked l, c where o.id = l.id and c.id = l.id and c.token = l.token)
select distinct c.id from c left join lateral (select o.status, o.token from kinora.tasks o where o.id = c.id limit 1) o on true
where (o.status = 'claimed' and o.token = c.token) is not true`

// RenewTasks implements provider.Tasks.
func (db *Provider) RenewTasks(ctx context.Context, tasks []provider.Task, lease time.Duration) (late []string, err error) {
	ids := mapSlice(tasks, func(t *provider.Task) string { return t.ID })
	if err := provider.CheckStored("task id", ids...); err != nil {
		return nil, wrap("renew the leases of tasks", err)
	}
	tokens := mapSlice(tasks, func(t *provider.Task) claim.Token { return t.Token })
	crash.Point("renew tasks: before")
	late, err = collect(ctx, db.pool, pgx.RowTo[string], db.q(renewTasksSQL), planned, ids, uuids(tokens), lease.Microseconds())
	crash.Point("renew tasks: after")
	return late, classifyOwn(ctx, wrap("renew the leases of tasks", explain(err)))
}

func uuids(tokens []claim.Token) []uuid.UUID {
	return mapSlice(tokens, func(t *claim.Token) uuid.UUID { return uuid.UUID(*t) })
}
