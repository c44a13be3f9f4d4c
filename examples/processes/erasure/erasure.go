// Package erasure forgets a person: in the own database at once, and in other systems by calls that
// are retried. When the last system has done so, one event says it.
package erasure

import (
	"context"
	"database/sql"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/kinora-go/kinora/task"
)

// Erased is the event of a person whose data no system has any more.
type Erased struct{ Person string }

// Types gives the event its stored name.
var Types = eventstore.NewTypes(eventstore.Type[Erased]("person.erased"))

// System is another system that has data of persons.
type System interface {
	// Forget ignores a call with a key that it knows. If no retry can help, the error is a
	// task.Permanent.
	Forget(ctx context.Context, key, person string) error
}

// Service forgets persons.
type Service struct {
	db      *sqlite.DB
	persons *eventstore.Repository[person]
	forget  map[string]*task.Definition[*sql.Tx, string, bool] // one kind for each system
	all     *task.Group[*sql.Tx, string]
}

type person struct{}

func (person) Apply(any) {}

// New returns a service for these systems. Their names are part of the kinds of tasks.
func New(db *sqlite.DB, systems map[string]System) (*Service, error) {
	persons, err := eventstore.NewRepository(db, Types, "person", func(string) person { return person{} }, nil)
	s := &Service{db: db, persons: persons, forget: map[string]*task.Definition[*sql.Tx, string, bool]{}}
	for name, system := range systems {
		s.forget[name] = task.Define("erasure/"+name,
			func(ctx context.Context, r *task.Run[*sql.Tx], person string) (bool, error) {
				return true, system.Forget(ctx, r.Key(), person)
			})
	}
	s.all = task.DefineGroup("erasure/person", s.complete)
	return s, err
}

// complete runs once, in the transaction that makes the last task of the group done.
func (s *Service) complete(ctx context.Context, tx *sql.Tx, _, name string) ([]outbox.Message, error) {
	_, err := s.persons.UpdateTx(ctx, s.db.InTx(tx), name,
		func(person) ([]any, error) { return []any{Erased{name}}, nil })
	return nil, err
}

// Erase forgets a person. A repeated call changes nothing.
func (s *Service) Erase(ctx context.Context, name string) error {
	id := "erase-" + name
	var calls []task.Draft
	for system, kind := range s.forget {
		calls = append(calls, kind.New(id+"-"+system, name))
	}
	return s.db.Transact(ctx, func(ctx context.Context, tx *sql.Tx) error {
		// And your own statements that forget the person, through tx.
		return s.db.TasksIn(tx).EnqueueGroup(ctx, s.all.New(id, name, calls...))
	})
}

// Worker returns a worker of the calls.
func (s *Service) Worker(cfg task.WorkerConfig) (*task.Worker, error) {
	kinds := []task.Kind[*sql.Tx]{s.all}
	for _, kind := range s.forget {
		kinds = append(kinds, kind)
	}
	return task.NewWorker(s.db, cfg, kinds...)
}
