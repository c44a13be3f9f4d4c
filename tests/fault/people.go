package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/task"
)

// A person is erased in three systems, by a group of tasks with one completion event. crm replies at
// once; mail is asked, and answers later, twice; ads replies at once, and is down for a while.
const erasedAs = "erased"

// people is the program. A subject's id is its group's.
func (w *work) people() []task.Kind[pgx.Tx] {
	direct := func(system string) task.Kind[pgx.Tx] {
		return task.Define("people/"+system, func(ctx context.Context, r *task.Run[pgx.Tx], _ string) (string, error) {
			defer w.busy()()
			return w.call(ctx, system, r.Key())
		})
	}
	mail := task.Define("people/mail", func(ctx context.Context, r *task.Run[pgx.Tx], _ string) (string, error) {
		defer w.busy()()
		ask := func(ctx context.Context, key string) (string, error) { return w.call(ctx, "mail", key) }
		if _, err := task.Step(ctx, r, "ask", ask, nil); err != nil {
			return "", err
		}
		return task.Wait[string](ctx, r, "confirmed", 0)
	})
	complete := task.DefineGroup("people/subject", func(ctx context.Context, tx pgx.Tx, id string, _ string) ([]outbox.Message, error) {
		_, err := w.db.InTx(tx).Append(ctx, eventstore.StreamName("person", id), eventstore.Any, []eventstore.Draft{{
			ID: uuid.NewString(), Type: erasedAs, Schema: 1, Data: json.RawMessage(`{}`),
		}})
		return nil, err
	})
	return []task.Kind[pgx.Tx]{direct("crm"), direct("ads"), mail, complete}
}

func subjectID(n int) string { return fmt.Sprintf("subject-%d", n) }

// subject returns the group of a subject.
func subject(id string) provider.TaskGroupDraft {
	g := provider.TaskGroupDraft{ID: id, Kind: "people/subject", Data: json.RawMessage(`""`)}
	for _, system := range []string{"ads", "crm", "mail"} {
		g.Tasks = append(g.Tasks, taskDraft("people/"+system, id+"/"+system, id))
	}
	return g
}

// subjectOf returns the subject of a key.
func subjectOf(key string) string { id, _, _ := strings.Cut(key, "/"); return id }
