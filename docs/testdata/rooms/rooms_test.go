package rooms

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/projector/projectortest"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/kinora-go/kinora/task"
)

func open(t testing.TB) *sqlite.DB {
	db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "rooms.db"), nil)
	check(t, err)
	t.Cleanup(func() { check(t, db.Close()) })
	check(t, db.Migrate(t.Context()))
	check(t, CreateTables(t.Context(), db))
	return db
}

// mails records the mails by key. The reply of each third call is lost.
type mails struct {
	mu    sync.Mutex
	calls int
	sent  map[string]string
}

func (m *mails) Send(_ context.Context, key, guest, night string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sent[key] = night + " " + guest
	if m.calls++; m.calls%3 == 0 {
		return &provider.Error{Class: provider.ClassTransient, Code: "lost", Err: errors.New("the reply was lost")}
	}
	return nil
}

// Guests book and cancel at random. The oracle reads the log: who waited, who has each room, and who got a mail.
func TestWaitingList(t *testing.T) {
	t.Parallel()
	db, sent := open(t), &mails{sent: map[string]string{}}
	hotel, err := New(db, sent)
	check(t, err)
	bookings := hotel.Bookings()
	services, err := hotel.Services(bookings)
	check(t, err)
	running, err := kinora.Start(t.Context(), services...)
	check(t, err)
	t.Cleanup(func() { check(t, running.Stop()) })

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	rooms, guests := []string{"1", "2"}, []string{"ann", "ben", "cy", "dee"}
	var clients sync.WaitGroup
	for range 3 {
		clients.Go(func() {
			for range 30 {
				guest := guests[rand.N(len(guests))]
				command := func(n *Night) ([]any, error) { return n.Book(guest) }
				if rand.N(2) == 0 {
					command = func(n *Night) ([]any, error) { return n.Cancel(guest) }
				}
				room, err := rooms[rand.N(len(rooms))], error(eventstore.ErrConflict)
				for errors.Is(err, eventstore.ErrConflict) && ctx.Err() == nil { // all of them want two rooms
					_, err = hotel.Do(ctx, room, "2026-11-24", command)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	clients.Wait()
	settle(ctx, t, db, bookings)

	has, queue, mailed := map[string]string{}, map[string][]string{}, map[string]string{}
	for e, err := range db.ReadLog(ctx, eventstore.From{}, eventstore.LogFilter{}) {
		check(t, err)
		decoded, err := eventstore.Decode[any](types, e)
		check(t, err)
		switch d := decoded.Data.(type) {
		case Booked:
			if has[e.Stream] != "" {
				t.Errorf("position %d: %s is booked twice", e.Position, e.Stream)
			}
			if q := queue[e.Stream]; len(q) > 0 && q[0] != d.Guest {
				t.Errorf("position %d: %s got the room before %s", e.Position, d.Guest, q[0])
			}
			has[e.Stream] = d.Guest
			queue[e.Stream] = without(queue[e.Stream], d.Guest)
			mailed["mail-"+e.ID] = e.Stream + " " + d.Guest
		case Queued:
			queue[e.Stream] = append(queue[e.Stream], d.Guest)
		case Canceled:
			if has[e.Stream] == d.Guest {
				delete(has, e.Stream)
			}
			queue[e.Stream] = without(queue[e.Stream], d.Guest)
		}
	}
	var want []string
	for _, room := range rooms {
		night := eventstore.StreamName("night", eventstore.JoinID(room, "2026-11-24"))
		if has[night] != "" {
			want = append(want, night+" | "+has[night])
		} else if len(queue[night]) > 0 {
			t.Errorf("%s is free while %v wait", night, queue[night])
		}
	}
	got, err := rows(ctx, db)
	check(t, err)
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
	sent.mu.Lock()
	defer sent.mu.Unlock()
	if fmt.Sprint(sent.sent) != fmt.Sprint(mailed) || sent.calls <= len(mailed) {
		t.Errorf("%d calls sent %v, want %v", sent.calls, sent.sent, mailed)
	}
}

// settle waits until every event is applied and every task is done.
func settle(ctx context.Context, t *testing.T, db *sqlite.DB, bookings *projector.Projector[*sql.Tx]) {
	t.Helper()
	for ctx.Err() == nil {
		before, err := bookings.Lag(ctx, db)
		check(t, err)
		counts, err := db.TaskCounts(ctx, "")
		check(t, err)
		after, err := bookings.Lag(ctx, db)
		check(t, err)
		all := int64(0)
		for _, n := range counts {
			all += n
		}
		if before.Events == 0 && after.Events == 0 && before.Position == after.Position && counts[task.Done] == all {
			return
		}
		time.Sleep(5 * time.Millisecond) // between two polls
	}
	t.Fatal("the hotel does not come to rest")
}

func rows(ctx context.Context, db *sqlite.DB) ([]string, error) {
	return projectortest.Rows(ctx, db.SQL().QueryContext, `select night, guest from bookings order by night`)
}

func without(list []string, guest string) (rest []string) {
	for _, g := range list {
		if g != guest {
			rest = append(rest, g)
		}
	}
	return rest
}

func TestExactlyOnce(t *testing.T) {
	t.Parallel()
	kit := projectortest.New(open, nil, rows)
	kit.Projector = func(db *sqlite.DB) *projector.Projector[*sql.Tx] {
		hotel, err := New(db, nil)
		check(t, err)
		return hotel.Bookings()
	}
	kit.Skip = []any{Queued{}}
	events := []projectortest.Event{
		projectortest.In("night-1-a", Booked{"ann"}), projectortest.In("night-1-b", Booked{"ann"}),
		projectortest.In("night-1-a", Queued{"ben"}), projectortest.In("night-1-a", Canceled{"ann"}),
		projectortest.In("night-1-a", Booked{"ben"}),
	}
	kit.Given(t, events...).Redeliver().Then("night-1-a | ben", "night-1-b | ann")
	kit.ExactlyOnce(t, events...)
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
