package task

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"

	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Kind is a kind of tasks or of groups: a *Definition or a *Group.
type Kind[Tx any] interface {
	define(*kinds[Tx]) error
}

// Definition says how tasks of a kind are handled. Declare it at package level with Define or
// DefineTx, which cannot fail: NewWorker returns the errors of a definition.
type Definition[Tx, In, Out any] struct {
	name string
	was  []string
	run  func(ctx context.Context, r *Run[Tx], in In) (Out, error)
	tx   func(ctx context.Context, tx Tx, in In) (Out, []outbox.Message, error)
}

// Define returns a kind of tasks that fn handles, outside of any transaction. Stored tasks have the
// kind, "domain/name", so do not change it. Both parts must match ^[a-z][a-z0-9_-]{0,40}$.
//
//   - fn may run any number of times: after a crash, after a failure, after a wait. It runs from its
//     beginning, and Step, StepTx and Wait return the recorded results. So everything that has an effect,
//     or may have another result the second time, belongs in a step.
//   - A handler without steps calls the other system itself, with r.Key() as the idempotency key.
//   - Tasks that have begun must find the steps that they began with, in the same order. Otherwise
//     they are abandoned with the code "changed", and nothing is done twice. For other steps,
//     define another kind, and keep the old one until its tasks have ended.
//   - What fn returns is the task's result. An error is retried (WorkerConfig.Backoff); see GiveUp
//     and Permanent for other ends.
func Define[Tx, In, Out any](kind string, fn func(ctx context.Context, r *Run[Tx], in In) (Out, error)) *Definition[Tx, In, Out] {
	return &Definition[Tx, In, Out]{name: kind, run: fn}
}

// DefineTx returns a kind of tasks that are one transaction each: the writes of fn through tx, the
// messages that it returns, and the end of the task are committed together, once. fn may run again
// after it was rolled back. It has no steps and must not call other systems. Use only tx in it: on
// SQLite a write through the database itself is provider.ErrInTransaction.
func DefineTx[Tx, In, Out any](kind string, fn func(ctx context.Context, tx Tx, in In) (Out, []outbox.Message, error)) *Definition[Tx, In, Out] {
	return &Definition[Tx, In, Out]{name: kind, tx: fn}
}

// Was returns d with earlier names of the kind: d also handles tasks that were added under them. Such
// a task keeps its kind: to add its id again under the new one is ErrIDReused.
func (d *Definition[Tx, In, Out]) Was(kinds ...string) *Definition[Tx, In, Out] {
	c := *d
	c.was = append(append([]string{}, d.was...), kinds...)
	return &c
}

// New returns a task of this kind to be added. The id is chosen by the caller: a second task with
// the same id, kind and input is ignored, also for 7 days after the first one is done, and for 30
// days after it is undone (WorkerConfig.Keep). So a timer that can be needed again requires an id
// for each occurrence, such as the cart's id and the event's id.
func (d *Definition[Tx, In, Out]) New(id string, in In) Draft {
	data, err := json.Marshal(in)
	return Draft{ID: id, Kind: d.name, Input: data, Err: err}
}

// Result decodes the result of a task of this kind. ErrNotDone: it has none (yet).
func (d *Definition[Tx, In, Out]) Result(t Task) (Out, error) {
	var out Out
	if t.Status != Done {
		return out, fmt.Errorf("%w: task %s is %s", ErrNotDone, t.ID, t.Status)
	}
	if err := decode(t.Result, &out); err != nil {
		return out, fmt.Errorf("result of task %s, a %s: %w", t.ID, t.Kind, err)
	}
	return out, nil
}

// Group says what happens when all tasks of a group are done.
type Group[Tx, Data any] struct {
	name     string
	complete func(ctx context.Context, tx Tx, id string, data Data) ([]outbox.Message, error)
}

// DefineGroup returns a kind of groups. complete runs in the transaction that makes the last task of
// a group done: its writes through tx, and the messages that it returns, are committed with that, once. If
// it fails, that task fails with it, and is tried again. An abandoned or undone task keeps its group
// from being complete. Give the group to each worker that has the kinds of its tasks: one that does not define it leaves
// the last task to one that does.
func DefineGroup[Tx, Data any](kind string, complete func(ctx context.Context, tx Tx, id string, data Data) ([]outbox.Message, error)) *Group[Tx, Data] {
	return &Group[Tx, Data]{name: kind, complete: complete}
}

// New returns a group to be added with all its tasks. No task can be added to it later.
func (g *Group[Tx, Data]) New(id string, data Data, tasks ...Draft) provider.TaskGroupDraft {
	raw, err := json.Marshal(data)
	return provider.TaskGroupDraft{ID: id, Kind: g.name, Data: raw, Tasks: tasks, Err: err}
}

// kinds are the definitions of a worker, with their types erased.
type kinds[Tx any] struct {
	handlers map[string]handler[Tx]
	groups   map[string]func(ctx context.Context, tx Tx, g *provider.TaskGroup) ([]outbox.Message, error)
}

// handler has one of the two functions of a definition.
type handler[Tx any] struct {
	run func(ctx context.Context, r *Run[Tx], in json.RawMessage) (json.RawMessage, error)
	tx  func(ctx context.Context, tx Tx, in json.RawMessage) (json.RawMessage, []outbox.Message, error)
}

func (d *Definition[Tx, In, Out]) define(all *kinds[Tx]) error {
	if d == nil {
		return errors.New("a definition is nil: leave it out")
	}
	h := handler[Tx]{}
	switch {
	case d.run != nil:
		h.run = func(ctx context.Context, r *Run[Tx], raw json.RawMessage) (json.RawMessage, error) {
			var in In
			if err := decode(raw, &in); err != nil {
				return nil, permanent(codeUndecodable, err)
			}
			out, err := d.run(ctx, r, in)
			if err != nil {
				return nil, err
			}
			return encode(out)
		}
	case d.tx != nil:
		h.tx = func(ctx context.Context, tx Tx, raw json.RawMessage) (json.RawMessage, []outbox.Message, error) {
			var in In
			if err := decode(raw, &in); err != nil {
				return nil, nil, permanent(codeUndecodable, err)
			}
			out, ms, err := d.tx(ctx, tx, in)
			if err != nil {
				return nil, nil, err
			}
			data, err := encode(out)
			return data, ms, err
		}
	default:
		return fmt.Errorf("kind %q: create it with Define or DefineTx, and a function that is not nil", d.name)
	}
	for _, name := range append([]string{d.name}, d.was...) {
		if err := provider.CheckKind(fmt.Sprintf("kind %q", name), name); err != nil {
			return err
		}
		if _, ok := all.handlers[name]; ok {
			return fmt.Errorf("kind %q is defined twice: use each name once", name)
		}
		all.handlers[name] = h
	}
	return nil
}

func (g *Group[Tx, Data]) define(all *kinds[Tx]) error {
	if g == nil {
		return errors.New("a group is nil: leave it out")
	}
	if g.complete == nil {
		return fmt.Errorf("group kind %q: create it with DefineGroup, and a function that is not nil", g.name)
	}
	if err := provider.CheckKind(fmt.Sprintf("group kind %q", g.name), g.name); err != nil {
		return err
	}
	if _, ok := all.groups[g.name]; ok {
		return fmt.Errorf("group kind %q is defined twice: use each name once", g.name)
	}
	all.groups[g.name] = func(ctx context.Context, tx Tx, s *provider.TaskGroup) ([]outbox.Message, error) {
		var data Data
		if err := decode(s.Data, &data); err != nil {
			return nil, permanent(codeUndecodable, err)
		}
		return g.complete(ctx, tx, s.ID, data)
	}
	return nil
}

// decode decodes an input, a result, an answer or the data of a group. It brings them into one form first: a
// store may return another one than it got. JSON's null is an error unless its type can be null.
func decode(data []byte, into any) error {
	if t := reflect.TypeOf(into).Elem(); check.IsNull(data) && !check.TakesNull(t) {
		return fmt.Errorf("null is no %s", t)
	}
	return json.Unmarshal(check.CanonicalJSON(data), into)
}

// encode encodes a result. It refuses what no provider can store.
func encode(v any) (json.RawMessage, error) {
	data, err := json.Marshal(v)
	if err == nil {
		err = provider.CheckTaskResult(data)
	}
	if err != nil {
		return nil, permanent(codeUnencodable, err)
	}
	return data, nil
}
