package main

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/task"
)

// The versions of the program of the cell deploy, in More["version"]. The later one has another form of "moved", the type
// "shifted" with a handler of its own, another name of the handler "moved", and the kind of tasks "deploy/later". It no longer
// has the handler "noted".
const (
	earlier = "1"
	later   = "2"
)

// movedLater is "moved" in schema version 2: the amount has another name.
type movedLater struct {
	Command string `json:"command"`
	Stream  string `json:"stream"`
	N       int    `json:"n"`
	Delta   int64  `json:"delta"`
}

// shifted is a command as an event of another type.
type shifted struct {
	Command string `json:"command"`
	Stream  string `json:"stream"`
	N       int    `json:"n"`
	Delta   int64  `json:"delta"`
}

const shiftedAs = "shifted"

var laterTypes = eventstore.NewTypes(
	eventstore.Type[movedLater](movedAs, func(old json.RawMessage) (json.RawMessage, error) {
		var m moved
		err := json.Unmarshal(old, &m)
		if err != nil {
			return nil, err
		}
		return json.Marshal(movedLater{m.Command, m.Stream, m.N, m.Amount})
	}),
	eventstore.Type[shifted](shiftedAs),
)

// applies applies a command to a read model.
type applies[Tx any] func(ctx context.Context, tx Tx, e eventstore.Event[moved]) ([]outbox.Message, error)

// defined returns a projector of the process's version, whose handlers apply commands.
func defined[Tx any](w *work, name string, opts projector.Options, apply applies[Tx]) *projector.Projector[Tx] {
	switch w.More["version"] {
	case earlier:
		noted := func(context.Context, Tx, eventstore.Event[moved]) error { return nil }
		return projector.Define(name, types, opts, projector.OnEmit(movedAs, apply), projector.On("noted", noted))
	case later:
		opts.Removed = []string{"noted"}
		return projector.Define(name, laterTypes, opts,
			projector.OnEmit("applied", func(ctx context.Context, tx Tx, e eventstore.Event[movedLater]) ([]outbox.Message, error) {
				return apply(ctx, tx, as(e, moved{e.Data.Command, e.Data.Stream, e.Data.N, e.Data.Delta}))
			}).Was(movedAs),
			projector.OnEmit(shiftedAs, func(ctx context.Context, tx Tx, e eventstore.Event[shifted]) ([]outbox.Message, error) {
				return apply(ctx, tx, as(e, moved{e.Data.Command, e.Data.Stream, e.Data.N, e.Data.Delta}))
			}))
	}
	return projector.Define(name, types, opts, projector.OnEmit(movedAs, apply))
}

// as returns an event with other data.
func as[E any](e eventstore.Event[E], data moved) eventstore.Event[moved] {
	return eventstore.Event[moved]{
		ID: e.ID, Stream: e.Stream, Version: e.Version, Position: e.Position, Type: e.Type, Schema: e.Schema,
		Data: data, Metadata: e.Metadata, RecordedAt: e.RecordedAt,
	}
}

// draft returns a command as the process's version writes it. With More["shifts"] each third one is of the later type.
func (w *work) draft(c command) (eventstore.Draft, error) {
	d, data := eventstore.Draft{ID: c.ID, Type: movedAs, Schema: 1}, any(c.event())
	if w.More["version"] == later {
		d.Schema, data = 2, movedLater{c.ID, c.Stream, c.N, c.Amount}
		if w.More["shifts"] != "" && c.N%3 == 0 {
			d.Type, d.Schema, data = shiftedAs, 1, shifted{c.ID, c.Stream, c.N, c.Amount}
		}
	}
	var err error
	d.Data, err = json.Marshal(data)
	return d, err
}

// lagSQL records how long after its event a read model was changed.
const lagSQL = `insert into lags (projector, at, ms) values ($1, clock_timestamp(), (extract(epoch from clock_timestamp() - $2::timestamptz) * 1000)::bigint)`

// deployed is the program of the workers.
func (w *work) deployed() []task.Kind[pgx.Tx] {
	of := func(kind string) task.Kind[pgx.Tx] {
		return task.Define("deploy/"+kind, func(ctx context.Context, r *task.Run[pgx.Tx], _ string) (string, error) {
			defer w.busy()()
			return w.call(ctx, "shop", r.Key())
		})
	}
	if w.More["version"] == later {
		return []task.Kind[pgx.Tx]{of("always"), of("later")}
	}
	return []task.Kind[pgx.Tx]{of("always")}
}

func deployID(kind string, n int) string { return fmt.Sprintf("%s-%d", kind, n) }
