// Package rooms books rooms by the night. If a booking is canceled, the first guest of the waiting list gets the room,
// and a mail.
package rooms

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/kinora-go/kinora/task"
)

// Events of a night in a room.
type (
	// Booked is the event of a guest who has the room.
	Booked struct{ Guest string }
	// Queued is the event of a guest who waits for the room.
	Queued struct{ Guest string }
	// Canceled is the event of a guest who gave up the room, or the place in the queue.
	Canceled struct{ Guest string }
)

var types = eventstore.NewTypes(
	eventstore.Type[Booked]("night.booked"), eventstore.Type[Queued]("night.queued"), eventstore.Type[Canceled]("night.canceled"))

// Night is the state of one night in one room.
type Night struct {
	guest string
	queue []string
}

// Apply adds one event to the state.
func (n *Night) Apply(event any) {
	switch e := event.(type) {
	case Booked:
		n.guest = e.Guest
		n.leaveQueue(e.Guest)
	case Queued:
		n.queue = append(n.queue, e.Guest)
	case Canceled:
		if n.guest == e.Guest {
			n.guest = ""
		}
		n.leaveQueue(e.Guest)
	}
}

func (n *Night) leaveQueue(guest string) {
	n.queue = slices.DeleteFunc(n.queue, func(g string) bool { return g == guest })
}

// Book books the room, or puts the guest into the queue.
func (n *Night) Book(guest string) ([]any, error) {
	switch {
	case guest == "":
		return nil, errors.New("the guest has no name")
	case n.guest == guest || slices.Contains(n.queue, guest):
		return nil, nil
	case n.guest == "" && len(n.queue) == 0:
		return []any{Booked{guest}}, nil
	}
	return []any{Queued{guest}}, nil
}

// Cancel gives up the room, or the place in the queue.
func (n *Night) Cancel(guest string) ([]any, error) {
	if n.guest != guest && !slices.Contains(n.queue, guest) {
		return nil, nil
	}
	return []any{Canceled{guest}}, nil
}

// Offer gives a free room to the first guest who waits.
func (n *Night) Offer() ([]any, error) {
	if n.guest != "" || len(n.queue) == 0 {
		return nil, nil
	}
	return []any{Booked{n.queue[0]}}, nil
}

// Mails sends mails. It ignores a repeated call with the same key.
type Mails interface {
	Send(ctx context.Context, key, guest, night string) error
}

// Mail is the input of a task.
type Mail struct{ Guest, Night string }

// Hotel has the rooms of a database.
type Hotel struct {
	db     *sqlite.DB
	nights *eventstore.Repository[*Night]
	offer  *task.Definition[*sql.Tx, string, bool]
	mail   *task.Definition[*sql.Tx, Mail, bool]
}

// New returns the hotel of a database.
func New(db *sqlite.DB, mails Mails) (*Hotel, error) {
	nights, err := eventstore.NewRepository(db, types, "night", func(string) *Night { return &Night{} }, nil)
	h := &Hotel{db: db, nights: nights}
	h.offer = task.DefineTx("rooms/offer", func(ctx context.Context, tx *sql.Tx, night string) (bool, []outbox.Message, error) {
		at, err := nights.UpdateTx(ctx, db.InTx(tx), night, (*Night).Offer)
		return at.Count > 0, nil, err
	})
	h.mail = task.Define("rooms/mail", func(ctx context.Context, r *task.Run[*sql.Tx], m Mail) (bool, error) {
		return true, mails.Send(ctx, r.Key(), m.Guest, m.Night)
	})
	return h, err
}

// Do runs a command on a night of a room.
func (h *Hotel) Do(ctx context.Context, room, day string, command func(*Night) ([]any, error)) (eventstore.Appended, error) {
	return h.nights.Update(ctx, eventstore.JoinID(room, day), command)
}

// Bookings keeps the table of bookings, and adds tasks: an offer after each cancellation, a mail for each booking.
func (h *Hotel) Bookings() *projector.Projector[*sql.Tx] {
	return projector.Define("bookings", types, projector.Options{Markers: true, Tables: []string{"bookings"}},
		projector.On("booked", func(ctx context.Context, tx *sql.Tx, e eventstore.Event[Booked]) error {
			_, err := tx.ExecContext(ctx, `insert into bookings (night, guest) values (?, ?)`, e.Stream, e.Data.Guest)
			if err != nil || projector.Replaying(ctx) {
				return err
			}
			return h.db.TasksIn(tx).Enqueue(ctx, h.mail.New("mail-"+e.ID, Mail{e.Data.Guest, e.Stream}))
		}),
		projector.On("canceled", func(ctx context.Context, tx *sql.Tx, e eventstore.Event[Canceled]) error {
			_, err := tx.ExecContext(ctx, `delete from bookings where night = ? and guest = ?`, e.Stream, e.Data.Guest)
			if err != nil || projector.Replaying(ctx) {
				return err
			}
			_, id, _ := strings.Cut(e.Stream, "-") // behind the category
			return h.db.TasksIn(tx).Enqueue(ctx, h.offer.New("offer-"+e.ID, id))
		}))
}

// CreateTables creates the table of bookings.
func CreateTables(ctx context.Context, db *sqlite.DB) error {
	_, err := db.SQL().ExecContext(ctx, `create table if not exists bookings (night text primary key, guest text not null) strict`)
	return err
}

// Services returns the services of the hotel.
func (h *Hotel) Services(bookings *projector.Projector[*sql.Tx]) ([]kinora.Service, error) {
	runner, err := projector.NewRunner(h.db, projector.FromLog(h.db), projector.RunnerConfig{}, bookings)
	if err != nil {
		return nil, err
	}
	worker, err := task.NewWorker(h.db, task.WorkerConfig{}, h.offer, h.mail)
	return []kinora.Service{runner, worker}, err
}
