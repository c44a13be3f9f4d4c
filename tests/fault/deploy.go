package main

import (
	"context"
	"encoding/json"
	"maps"

	"github.com/jackc/pgx/v5"
	goredis "github.com/redis/go-redis/v9"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/redis"
	"github.com/kinora-go/kinora/task"
)

// The releases of the program of the cell deploy, in More["release"]. The later one has another form of "moved", the type
// "shifted" with a handler of its own, another name of the handler "moved", another version of the read models of builders,
// another name of the projector "former", and the kind of tasks "deploy/later". It no longer has the handler "noted".
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
type shifted movedLater

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

// defined returns a projector of the process's release, whose handlers apply commands. more are further handlers.
func defined[Tx any](w *work, name string, opts projector.Options, apply applies[Tx], more ...projector.Handler[Tx]) *projector.Projector[Tx] {
	is, handlers := types, []projector.Handler[Tx]{projector.OnEmit(movedAs, apply)}
	switch {
	case name == formerName:
		// What a projector parks stays under its name: the earlier release has this one prepared for the later events.
		is, handlers = laterTypes, appliers(apply)
	case name == renamedName:
		is, handlers = laterTypes, appliers(apply)
		handlers[0], handlers[1] = handlers[0].Was("former/applied"), handlers[1].Was("former/shifted")
	case w.More["release"] == later:
		opts.Removed = []string{"noted"}
		is, handlers = laterTypes, appliers(apply)
	case w.More["release"] == earlier:
		handlers = append(handlers, projector.On("noted", func(context.Context, Tx, eventstore.Event[moved]) error { return nil }))
	}
	return projector.Define(name, is, opts, append(handlers, more...)...)
}

// appliers are the handlers of the later release.
func appliers[Tx any](apply applies[Tx]) []projector.Handler[Tx] {
	return []projector.Handler[Tx]{
		projector.OnEmit("applied", func(ctx context.Context, tx Tx, e eventstore.Event[movedLater]) ([]outbox.Message, error) {
			return apply(ctx, tx, asMoved(e))
		}).Was(movedAs),
		projector.OnEmit(shiftedAs, func(ctx context.Context, tx Tx, e eventstore.Event[shifted]) ([]outbox.Message, error) {
			return apply(ctx, tx, asMoved(e))
		}),
	}
}

// asMoved returns an event of the later release as one of the earlier one.
func asMoved[E movedLater | shifted](e eventstore.Event[E]) eventstore.Event[moved] {
	d := movedLater(e.Data)
	return eventstore.Event[moved]{
		ID: e.ID, Stream: e.Stream, Version: e.Version, Position: e.Position, Type: e.Type, Schema: e.Schema,
		Data: moved{d.Command, d.Stream, d.N, d.Delta}, Metadata: e.Metadata, RecordedAt: e.RecordedAt,
	}
}

// draft returns a command as the process's release writes it. With More["shifts"] each third one is of the later type.
func (w *work) draft(c command) (eventstore.Draft, error) {
	d, data := eventstore.Draft{ID: c.ID, Type: movedAs, Schema: 1}, any(c.event())
	if w.More["release"] == later {
		d.Schema, data = 2, movedLater{c.ID, c.Stream, c.N, c.Amount}
		if w.More["shifts"] != "" && c.N%3 == 0 {
			d.Type, d.Schema, data = shiftedAs, 1, shifted{c.ID, c.Stream, c.N, c.Amount}
		}
	}
	var err error
	d.Data, err = json.Marshal(data)
	return d, err
}

// setRelease makes the next life of a process one of a release.
func (s *settings) setRelease(release string) {
	s.More = maps.Clone(s.More)
	if s.More == nil {
		s.More = map[string]string{}
	}
	s.More["release"], s.More["version"] = release, release
	if s.Role == running {
		s.Arms = []string{exactName, map[string]string{earlier: formerName, later: renamedName}[release]}
	}
}

// lagSQL records how long after its event a read model was changed.
const lagSQL = `insert into lags (projector, at, ms) values ($1, $2, (extract(epoch from clock_timestamp() - $2::timestamptz) * 1000)::bigint)`

// recordLag is called by handlers after they have applied an event.
func recordLag[Tx any](ctx context.Context, w *work, tx Tx, exec execFunc[Tx], projector string, e eventstore.Event[moved]) error {
	if w.More["release"] == "" {
		return nil
	}
	return exec(ctx, tx, lagSQL, projector, e.RecordedAt)
}

// readerToRedis returns a runner of a projector from the log, whose read model is in Redis.
func (w *work) readerToRedis(cfg projector.RunnerConfig) (r *projector.Runner, shut func(), err error) {
	client, err := w.redisClient()
	if err != nil {
		return nil, nil, err
	}
	shut = func() { _ = client.Close() }
	own, err := redis.New(client, &redis.Config{OwnMarkers: true})
	if err != nil {
		return nil, shut, err
	}
	w.status.set(wordCalm, 1)
	apply := w.applyRedis(redisName, nil)
	r, err = projector.NewRunner(provider.Combine(own, w.db), projector.FromLog(w.db), cfg, defined(w, redisName, projector.Options{},
		func(ctx context.Context, tx goredis.Pipeliner, e eventstore.Event[moved]) ([]outbox.Message, error) {
			if err := apply(ctx, tx, e); err != nil || e.Position%10 > 0 { // each commit for a figure alone delays the rest
				return nil, err
			}
			_, err := w.db.Pool().Exec(ctx, lagSQL, redisName, e.RecordedAt) // a second time if the event is applied again
			return nil, err
		}))
	return r, shut, err
}

// redisName is the projector of a reader whose read model is in Redis.
const redisName = "in-redis"

// deployed is the program of the workers.
func (w *work) deployed() []task.Kind[pgx.Tx] {
	of := func(kind string) task.Kind[pgx.Tx] {
		return task.Define("deploy/"+kind, func(ctx context.Context, r *task.Run[pgx.Tx], _ string) (string, error) {
			defer w.busy()()
			return w.call(ctx, "shop", r.Key())
		})
	}
	if w.More["release"] == later {
		return []task.Kind[pgx.Tx]{of("always"), of("later")}
	}
	return []task.Kind[pgx.Tx]{of("always")}
}
