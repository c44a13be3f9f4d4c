package memory

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/taskrow"
	"github.com/kinora-go/kinora/provider"
)

// work is the part of the state that has the tasks.
type work struct {
	tasks  *tree[string, task] // by id
	groups *tree[string, group]
	trails *tree[string, *tree[int64, provider.TaskRecord]] // by id of the task and number
	number int64                                            // of the last record
	wakes  int64                                            // grows when tasks become due
	// ids of the open tasks by kind and time; tasks that are suspect are only in the second
	open, suspect *tree[string, *tree[string, string]]
	// ids of done and undone tasks, and of completed groups, by time
	ended, completed *tree[string, string]
}

// task is a stored task. Package taskrow has the changes that workers and answers make.
type task = taskrow.Row

// group is a stored group.
type group struct {
	provider.TaskGroup
	digest    string // of the tasks that were added with it
	completed time.Time
}

// timeKey is a key that is ordered by time and then by id. The zero time is last.
func timeKey(t time.Time, id string) string {
	if t.IsZero() {
		return "\xff" + id
	}
	seconds := uint64(t.Unix()) ^ 1<<63 //nolint:gosec // times before 1970 come first
	key := binary.BigEndian.AppendUint64(nil, seconds)
	return string(binary.BigEndian.AppendUint32(key, uint32(t.Nanosecond()))) + id //nolint:gosec // never negative
}

// index returns the index that lists t, or nil.
func (w *work) index(t task) **tree[string, *tree[string, string]] {
	switch {
	case !t.Status.Open():
		return nil
	case t.Suspect:
		return &w.suspect
	}
	return &w.open
}

// put stores t in place of was, which is the zero task if t is new.
func (w *work) put(was, t task) {
	w.unindex(was)
	w.tasks = w.tasks.put(t.ID, t)
	if index := w.index(t); index != nil {
		ids, _ := (*index).get(t.Kind)
		*index = (*index).put(t.Kind, ids.put(timeKey(t.NextAt, t.ID), t.ID))
	}
	if t.Status.Final() {
		w.ended = w.ended.put(timeKey(t.EndedAt, t.ID), t.ID)
	}
	if t.Status == provider.TaskPending {
		w.wakes++
	}
}

func (w *work) unindex(t task) {
	w.ended = w.ended.drop(timeKey(t.EndedAt, t.ID))
	if index := w.index(t); index != nil {
		*index = dropIn(*index, t.Kind, timeKey(t.NextAt, t.ID))
	}
}

// record adds rows to the trail of t.
func (w *work) record(t task, now time.Time, records ...taskrow.Record) {
	for _, r := range records {
		w.number++
		trail, _ := w.trails.get(t.ID)
		w.trails = w.trails.put(t.ID, trail.put(w.number, provider.TaskRecord{
			ID: fmt.Sprintf("%s/%d", t.ID, w.number), Task: t.ID, Kind: t.Kind, Group: t.Group,
			What: r.What, Detail: r.Detail, By: r.By, Reason: r.Reason, At: now,
		}))
	}
}

// TaskCandidates implements provider.Tasks.
func (db *Provider) TaskCandidates(ctx context.Context, q provider.TaskQuery, limit int) ([]provider.Task, error) {
	invalid := provider.CheckStorable("query.kinds", q.Kinds...)
	return query(ctx, db, "read task candidates", invalid, func(s *state, now time.Time) []provider.Task {
		return s.work.candidates(q, limit, now)
	})
}

func (w *work) candidates(q provider.TaskQuery, limit int, now time.Time) []provider.Task {
	type candidate struct {
		turn int
		provider.Task
	}
	index := w.open
	if q.Alone {
		index = w.suspect
	}
	var found []candidate
	for _, kind := range slices.Compact(slices.Sorted(slices.Values(q.Kinds))) {
		ids, _ := index.get(kind)
		turn := 0
		for _, id := range ids.from("") {
			t, _ := w.tasks.get(id)
			if turn >= limit || !t.IsDue(now) {
				break
			}
			turn++
			found = append(found, candidate{turn, t.Task})
		}
	}
	slices.SortFunc(found, func(a, b candidate) int {
		return cmp.Or(a.turn-b.turn, a.NextAt.Compare(b.NextAt), strings.Compare(a.ID, b.ID))
	})
	tasks := make([]provider.Task, min(limit, len(found)))
	for i := range tasks {
		tasks[i] = ownTask(found[i].Task)
	}
	return tasks
}

// ClaimTasks implements provider.Tasks. If nothing is due, it does not wait for the open transaction.
func (db *Provider) ClaimTasks(ctx context.Context, q provider.TaskQuery, t claim.Terms) ([]provider.Task, error) {
	if due, err := db.TaskCandidates(ctx, q, 1); err != nil || len(due) == 0 && !db.isInside(ctx) {
		return nil, err
	}
	return update(ctx, db, "claim tasks", nil, func(s *state, now time.Time) ([]provider.Task, error) {
		return claim.Portable(ctx, t,
			func(_ context.Context, limit int) ([]provider.Task, error) {
				return s.work.candidates(q, limit, now), nil
			},
			func(_ context.Context, c provider.Task, t claim.Terms) (provider.Task, bool, error) {
				c, ok := s.work.take(c, q, t, now)
				return c, ok, nil
			}, nil)
	})
}

func (w *work) take(c provider.Task, q provider.TaskQuery, t claim.Terms, now time.Time) (provider.Task, bool) {
	was, _ := w.tasks.get(c.ID)
	if !was.IsAsRead(&c) || !was.IsDue(now) {
		return c, false
	}
	is, records, taken, ok := was.Take(q.Attempts, t, now)
	w.put(was, is)
	w.record(was, now, records...)
	if !ok {
		return c, false
	}
	return ownTask(taken), true
}

// RenewTasks implements provider.Tasks. It waits until no other transaction is open or ctx ends.
func (db *Provider) RenewTasks(ctx context.Context, tasks []provider.Task, lease time.Duration) ([]string, error) {
	return update(ctx, db, "renew tasks", nil, func(s *state, now time.Time) (late []string, err error) {
		for _, c := range tasks {
			was, _ := s.work.tasks.get(c.ID)
			if was.Status != provider.TaskClaimed || was.Token != c.Token {
				late = append(late, c.ID)
				continue
			}
			is := was
			is.NextAt = now.Add(lease)
			s.work.put(was, is)
		}
		return late, nil
	})
}

// TaskKinds implements provider.Tasks.
func (db *Provider) TaskKinds(ctx context.Context, domain string) ([]string, error) {
	return query(ctx, db, "list kinds of tasks", provider.CheckStorable("domain", domain), func(s *state, _ time.Time) (kinds []string) {
		for _, index := range []*tree[string, *tree[string, string]]{s.work.open, s.work.suspect} {
			for kind := range index.from(domain + "/") {
				if !strings.HasPrefix(kind, domain+"/") {
					break
				}
				kinds = append(kinds, kind)
			}
		}
		slices.Sort(kinds)
		return slices.Compact(kinds)
	})
}

// DeleteTasks implements provider.Tasks.
func (db *Provider) DeleteTasks(ctx context.Context, keep provider.TaskRetention, limit int) (int, error) {
	return update(ctx, db, "delete tasks", nil, func(s *state, now time.Time) (n int, err error) {
		w, longest := &s.work, now.Add(-min(keep.Done, keep.Undone))
		for _, id := range w.ended.from("") {
			t, _ := w.tasks.get(id)
			if n >= limit || !t.EndedAt.Before(longest) {
				break
			}
			kept := map[provider.TaskStatus]time.Duration{provider.TaskDone: keep.Done, provider.TaskUndone: keep.Undone}
			if g, _ := w.groups.get(t.Group); t.Group != "" && g.Open > 0 {
				continue
			}
			if t.EndedAt.Before(now.Add(-kept[t.Status])) {
				w.unindex(t)
				w.tasks, w.trails = w.tasks.drop(id), w.trails.drop(id)
				n++
			}
		}
		if n >= limit {
			return n, nil // the tasks of a group are deleted before the group
		}
		for key, id := range w.completed.from("") {
			if g, _ := w.groups.get(id); g.completed.Before(now.Add(-keep.Done)) {
				w.groups, w.completed = w.groups.drop(id), w.completed.drop(key)
			}
		}
		return n, nil
	})
}

// TasksDue implements provider.TaskWaker. Every commit that makes a task pending closes the channel.
func (db *Provider) TasksDue() <-chan struct{} { return db.committed.Load().tasksDue }

// ownTask copies the bytes and maps of a task, as own does for an event.
func ownTask(t provider.Task) provider.Task {
	t.Input, t.Result, t.State = bytes.Clone(t.Input), bytes.Clone(t.Result), taskrow.CloneState(t.State)
	return t
}

// ChangeTasks implements provider.Tasks.
func (db *Provider) ChangeTasks(ctx context.Context, changes []provider.TaskChange) ([]provider.TaskChanged, error) {
	return update(ctx, db, "change tasks", provider.CheckTaskChanges(changes), func(s *state, now time.Time) ([]provider.TaskChanged, error) {
		changed := make([]provider.TaskChanged, len(changes))
		for i := range changes {
			changed[i] = s.work.change(&changes[i], now)
		}
		return changed, nil
	})
}

// change applies c to its task if the task does not refuse it.
func (w *work) change(c *provider.TaskChange, now time.Time) provider.TaskChanged {
	was, known := w.tasks.get(c.ID)
	if !known {
		return provider.TaskChanged{}
	}
	is, records, ok := was.Change(c, now)
	if !ok {
		return provider.TaskChanged{Now: ownTask(was.Task)}
	}
	w.put(was, is)
	w.record(is, now, records...)
	return provider.TaskChanged{
		Applied: true, Now: provider.Task{ID: is.ID, Undo: is.Undo, Version: is.Version, Group: is.Group},
	}
}

// decide applies a decision to a task that it does not refuse.
func (w *work) decide(was task, d taskrow.Decision, by provider.Decision, now time.Time) bool {
	is, ok := was.Decide(d, now)
	if ok {
		w.put(was, is)
		w.record(is, now, taskrow.Record{What: d.What, Decision: by})
	}
	return ok
}
