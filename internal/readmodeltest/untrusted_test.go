package readmodeltest_test

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// broker is a subscriber whose messages the test sends itself.
type broker chan *message.Message

func (b broker) Subscribe(context.Context, string) (<-chan *message.Message, error) { return b, nil }
func (broker) Close() error                                                         { return nil }

// deliver sends messages at once, and waits until they are acked.
func (b broker) deliver(msgs ...*message.Message) {
	for i, m := range msgs {
		msgs[i] = m.Copy()
		b <- msgs[i]
	}
	for _, m := range msgs {
		<-m.Acked()
	}
}

func (b broker) start(t *testing.T, db *database, cfg projector.RunnerConfig, p *projector.Projector[*sql.Tx]) (stop func() error) {
	t.Helper()
	r, err := projector.NewRunner(db.Provider, projector.Subscribe(b, "plants"), cfg, p)
	require.NoError(t, err)
	group, err := kinora.Start(t.Context(), r)
	require.NoError(t, err)
	return group.Stop
}

// logged are the events of a stream, and the messages of a relay for them.
type logged struct {
	log    provider.LogID
	events []eventstore.Raw
}

func readLogged(t *testing.T, store eventstore.Store, log provider.Log, stream string) (l logged) {
	t.Helper()
	var err error
	l.log, err = log.LogID(t.Context())
	require.NoError(t, err)
	for e, err := range store.ReadStream(t.Context(), stream, 0) {
		require.NoError(t, err)
		l.events = append(l.events, e)
	}
	return l
}

// real returns the message of an event.
func (l logged) real(i int) *message.Message {
	e := l.events[i]
	m := provider.FromEvent(e.Stream, e.Version, eventstore.Draft{ID: e.ID, Type: e.Type, Schema: e.Schema, Data: e.Data}, "plants")
	m.SetPlace(e.Position, l.log.String())
	return outbox.ToWatermill(outbox.Entry{OutboxMessage: m, CreatedAt: e.RecordedAt})
}

// forged returns a message that is published under the id of an event, and changes its headers.
func (l logged) forged(i int, headers ...string) *message.Message {
	m := l.real(i)
	m.Payload = []byte(`{"N":666}`)
	for i := 0; i < len(headers); i += 2 {
		if m.Metadata[headers[i]] = headers[i+1]; headers[i+1] == "" {
			delete(m.Metadata, headers[i])
		}
	}
	return m
}

// elsewhere are headers of another place.
var elsewhere = []string{
	provider.HeaderStream, "victim-1", outbox.HeaderKey, "victim-1", provider.HeaderVersion, "99", provider.HeaderPosition, "999",
	provider.HeaderRecordedAt, "2001-01-01T00:00:00Z", provider.HeaderSchema, "7",
}

// seen writes all that a message says, and fails for some numbers.
func seen(opts projector.Options, fails func(n int) bool) *projector.Projector[*sql.Tx] {
	return projector.Define("seen", types, opts, projector.On("plant", func(ctx context.Context, tx *sql.Tx, e eventstore.Event[planted]) error {
		if fails(e.Data.N) {
			return projector.Permanent(fmt.Errorf("no"))
		}
		_, err := tx.ExecContext(ctx, fmt.Sprintf(`insert into seen (line) values ('%s %s %d %d %d %d')`,
			e.ID, e.Stream, e.Version, e.Position, e.Schema, e.Data.N))
		return err
	}))
}

// Promise: G10.5
func TestMessagesOfAnUntrustedSourceAreTakenFromTheLog(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		opts      projector.Options
		elsewhere bool // the log is in another database
	}{
		"with the log": {projector.Options{Markers: true}, false}, "ordered": {projector.Options{Markers: true, Ordered: true}, false},
		"over the broker only": {projector.Options{Markers: true, BrokerOnly: true}, false}, "another database": {projector.Options{Markers: true}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onBoth(t, func(t *testing.T, db *database) {
				events, log := db.Store, db.log
				if c.elsewhere {
					other, err := memory.New(nil)
					require.NoError(t, err)
					events, log = other, other
				}
				untrusted(t, db, events, log, c.opts)
			})
		})
	}
}

func untrusted(t *testing.T, db *database, events eventstore.Store, log provider.Log, opts projector.Options) {
	db.exec(t, `create table seen (line text not null)`)
	const stream = "plants-1"
	later := uuid.NewString() // the id of an event that is not appended yet
	fails := true
	cfg := quiet
	cfg.Log, cfg.Grace, cfg.Untrusted = log, time.Hour, true
	p := seen(opts, func(n int) bool { return n == 6 && fails })
	b := make(broker)
	stop := b.start(t, db, cfg, p)
	patience.Until(t, func() bool {
		c, err := db.Checkpoint(t.Context(), provider.Build{Projector: "seen"})
		return err == nil && (opts.BrokerOnly || c.Mode == provider.ModeLive)
	}, "the projector is live")
	add := func(ids ...string) {
		for _, id := range ids {
			n := len(readLogged(t, events, log, stream).events) + 1
			_, err := events.Append(t.Context(), stream, eventstore.Any,
				[]eventstore.Draft{{ID: id, Type: "planted", Schema: 1, Data: fmt.Appendf(nil, `{"N":%d}`, n)}})
			require.NoError(t, err)
		}
	}
	for range 6 {
		add(uuid.NewString())
	}
	l := readLogged(t, events, log, stream)
	b.deliver(l.forged(0), l.real(0))                               // before
	b.deliver(l.real(1))                                            // after, with another place
	b.deliver(l.forged(1, elsewhere...))                            //
	b.deliver(l.forged(2, provider.HeaderType, "other"), l.real(2)) // another type, in one unit perhaps
	b.deliver(l.forged(3, provider.HeaderLog, "", provider.HeaderStream, "victim-1"), l.forged(3, provider.HeaderLog, "another/1"), l.real(3))
	unknown := l.forged(4)
	unknown.UUID = later
	other := unknown.Copy()
	other.UUID, other.Metadata[provider.HeaderLog] = "order 1", ""
	b.deliver(unknown, other)
	b.deliver(l.forged(4, elsewhere...)) // its key is not held
	b.deliver(l.forged(5, elsewhere...)) // its handler fails
	parked := func(states ...projector.ParkedState) []projector.Parked {
		list, err := db.Parked(t.Context(), projector.ParkedFilter{Projector: "seen", States: states, Limit: 100})
		require.NoError(t, err)
		return slices.DeleteFunc(list, func(p projector.Parked) bool { return p.Topic != "plants" })
	}
	for i, want := range []string{"unknown " + later + "  no_event", "unknown order 1  no_event", l.events[5].ID + " " + stream + " "} {
		row := parked()[i]
		require.Equal(t, want, row.MessageID+" "+row.Key+" "+row.Code)
		require.Equal(t, projector.StateStuck, row.State)
	}
	require.JSONEq(t, `{"N":6}`, string(parked()[2].Payload), "an event is parked as the log has it")
	add(later) // and then its event is appended and delivered
	l = readLogged(t, events, log, stream)
	fails = false
	replay := func() {
		_, err := projector.Replay(t.Context(), db.Provider, projector.ParkedFilter{Projector: "seen"}, ann)
		require.NoError(t, err)
	}
	var want []string
	for _, e := range l.events {
		want = append(want, fmt.Sprintf(`%s %s %d %d %d %d`, e.ID, stream, e.Version, e.Position, e.Schema, e.Version))
	}
	slices.Sort(want)
	replay()
	require.NoError(t, stop())
	trusting := quiet
	trusting.Log, trusting.Grace = log, time.Hour
	require.NoError(t, p.ApplyParked(t.Context(), db.Provider, &trusting))
	require.Equal(t, []string{"unknown order 1"}, []string{parked()[0].MessageID}, "a tool takes from the log what was rejected")
	require.Equal(t, want, db.rows(t, `select line from seen`))

	stop = b.start(t, db, cfg, p)
	for i := range l.events {
		b.deliver(l.forged(i, elsewhere...), l.real(i))
	}
	require.NoError(t, stop())
	require.Equal(t, want, db.rows(t, `select line from seen`))
	_, err := projector.Skip(t.Context(), db.Provider, projector.ParkedFilter{Projector: "seen"}, ann)
	require.NoError(t, err)
}
