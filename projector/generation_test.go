package projector_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// sending is emitting with a new id for each message, so that the outbox shows each one. It fails for
// the stars of bad while isBad is true.
func sending(opts projector.Options, isBad *atomic.Bool, bad ...int) *projector.Projector[txn] {
	opts.Tables = []string{"notes"}
	return projector.Define("p", types, opts,
		projector.OnCreate(func(context.Context, txn) error { return nil }),
		projector.OnEmit("a", func(ctx context.Context, tx txn, e eventstore.Event[posted]) ([]outbox.Message, error) {
			if isBad != nil && isBad.Load() && slices.Contains(bad, e.Data.Stars) {
				return nil, errNever
			}
			m := outbox.Message{ID: uuid.NewString(), Topic: "sent", Payload: []byte(fmt.Sprint(e.Data.Stars))}
			return []outbox.Message{m}, note(projector.Table(ctx, "notes"))(ctx, tx, e)
		}))
}

// stalled is a store whose lists of generations do not come while it is stalled.
type stalled struct {
	unit
	is         atomic.Bool
	checkpoint func()
}

func (s *stalled) Generations(ctx context.Context, name string) ([]provider.Generation, error) {
	for s.is.Load() {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
	return s.unit.Generations(ctx, name)
}

func (s *stalled) Checkpoint(ctx context.Context, b provider.Build) (provider.Checkpoint, error) {
	if f := s.checkpoint; f != nil {
		s.checkpoint = nil
		f()
	}
	return s.unit.Checkpoint(ctx, b)
}

// setState changes the state of a generation, as another program does.
func setState(t *testing.T, db *memory.DB, number int, to provider.GenerationState) {
	t.Helper()
	for {
		rows, err := db.Generations(t.Context(), "p")
		require.NoError(t, err)
		g := rows[number-1]
		g.State = to
		changed, err := db.SetGeneration(t.Context(), g)
		require.NoError(t, err)
		if changed {
			return
		}
	}
}

// A program that does not know yet that its generation is no longer live does not get ahead of the live
// one, and sends nothing.
// Promise: R5.1
func TestAProgramThatMissedASwitchStaysBehindTheLiveGeneration(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, f subscription, src projector.Source) {
		write(t, db, "k-1", upTo(10)...)
		slow := &stalled{unit: db}
		one := sending(projector.Options{Markers: true}, nil)
		stop := start(t, newRunner(t, slow, src, projector.RunnerConfig{Log: db}, one))
		time.Sleep(10 * time.Second)
		slow.is.Store(true)
		two := sending(projector.Options{Markers: true, Version: 2, RebuildOnChange: projector.BlueGreen}, nil)
		stopTwo := start(t, newRunner(t, db, src, projector.RunnerConfig{}, two))
		state(t, db, two, 2, "live")
		time.Sleep(time.Second)
		require.NoError(t, stopTwo())
		write(t, db, "k-1", 11, 12, 13)
		time.Sleep(20 * time.Second)
		require.Equal(t, upTo(10), noted(db, "notes", "k-1"))
		require.Equal(t, upTo(10), noted(db, "notes_g1", "k-1"))
		require.Equal(t, once(10), sent(t, db))
		slow.is.Store(false)
		require.NoError(t, projector.Control(t.Context(), db, "p", 1, projector.Promote, person))
		state(t, db, one, 1, "live")
		time.Sleep(20 * time.Second)
		require.Equal(t, upTo(13), noted(db, "notes", "k-1"))
		require.Equal(t, once(13), sent(t, db))
		require.NoError(t, stop())
	})
}

// A program whose generation is retired while it starts feeds the new one.
// Promise: R6.1
func TestAGenerationIsRetiredWhileAProgramStarts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(10)...)
		p := built(projector.Options{Markers: true}, 1)
		r := newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, p)
		stop := start(t, r)
		time.Sleep(time.Second)
		late := &stalled{unit: db, checkpoint: func() {
			require.NoError(t, rebuild(t, r, request(projector.InPlace)))
		}}
		other := newRunner(t, late, projector.FromLog(db), projector.RunnerConfig{Log: db}, p)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- other.Run(ctx) }()
		time.Sleep(30 * time.Second)
		select {
		case <-other.Running():
		default:
			require.Fail(t, "it does not start")
		}
		require.NoError(t, <-done)
		require.NoError(t, stop())
	})
}

// A rebuild that begins while an in-place rebuild is going on sends nothing twice.
// Promise: R8.1
func TestARebuildDuringARebuildInPlaceSendsOutputOnce(t *testing.T) {
	t.Parallel()
	for _, how := range []projector.RebuildHow{projector.InPlace, projector.BlueGreen} {
		t.Run(how.String(), func(t *testing.T) {
			t.Parallel()
			sources(t, func(t *testing.T, db *memory.DB, _ subscription, src projector.Source) {
				write(t, db, "k-1", upTo(2000)...)
				stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, sending(projector.Options{Markers: true}, nil)))
				time.Sleep(10 * time.Second)
				require.Equal(t, once(2000), sent(t, db))
				ask := request(projector.InPlace)
				ask.Rate = 200
				_, err := projector.RequestRebuild(t.Context(), db, "p", ask)
				require.NoError(t, err)
				time.Sleep(5 * time.Second)
				list := noted(db, "notes", "k-1")
				require.True(t, len(list) > 0 && len(list) < 2000, "the rebuild is going on")
				require.NoError(t, stop())
				two := sending(projector.Options{Markers: true, Version: 2, RebuildOnChange: how}, nil)
				stop = start(t, newRunner(t, db, src, projector.RunnerConfig{}, two))
				state(t, db, two, 3, "live")
				time.Sleep(20 * time.Second)
				require.Equal(t, upTo(2000), noted(db, "notes", "k-1"))
				require.Equal(t, once(2000), sent(t, db))
				write(t, db, "k-1", 2001)
				time.Sleep(20 * time.Second)
				require.Equal(t, once(2001), sent(t, db))
				require.NoError(t, stop())
			})
		})
	}
}

// A switch waits for a parked message that is tried again: readers would miss its event.
// Promise: R2.2
func TestASwitchWaitsForParkedMessages(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, _ subscription, src projector.Source) {
		write(t, db, "k-1", upTo(10)...)
		stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, built(projector.Options{Markers: true}, 1)))
		time.Sleep(10 * time.Second)
		tries := 0
		two := projector.Define("p", types, projector.Options{Markers: true, Version: 2, RebuildOnChange: projector.BlueGreen, Tables: []string{"notes"}},
			projector.OnCreate(func(context.Context, txn) error { return nil }),
			projector.On("a", func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
				if e.Data.Stars == 5 && tries < 3 {
					tries++
					return errors.New("it fails three times")
				}
				return note(projector.Table(ctx, "notes"))(ctx, tx, e)
			}))
		stopTwo := start(t, newRunner(t, db, src, projector.RunnerConfig{Log: db}, two))
		for range 3000 {
			require.Equal(t, upTo(10), noted(db, "notes", "k-1"))
			time.Sleep(10 * time.Millisecond)
		}
		state(t, db, two, 2, "live")
		require.Equal(t, 3, tries)
		require.NoError(t, stop())
		require.NoError(t, stopTwo())
	})
}

// An event that is parked in a generation, and was applied by the one before, is not sent by the next one
// either.
// Promise: R8.1
func TestARebuildAfterARollbackSendsOutputOnce(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, _ subscription, src projector.Source) {
		write(t, db, "k-1", upTo(10)...)
		var isBad atomic.Bool
		stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, sending(projector.Options{Markers: true}, &isBad, 12)))
		time.Sleep(10 * time.Second)
		two := sending(projector.Options{Markers: true, Version: 2, RebuildOnChange: projector.BlueGreen}, nil)
		stopTwo := start(t, newRunner(t, db, src, projector.RunnerConfig{}, two))
		state(t, db, two, 2, "live")
		isBad.Store(true)
		write(t, db, "k-1", 11, 12, 13)
		time.Sleep(20 * time.Second)
		require.Equal(t, once(13), sent(t, db))
		require.Equal(t, upTo(11), noted(db, "notes_g1", "k-1"))
		require.NoError(t, projector.Control(t.Context(), db, "p", 1, projector.Promote, person))
		state(t, db, two, 1, "live")
		time.Sleep(20 * time.Second)
		isBad.Store(false)
		_, err := projector.RequestRebuild(t.Context(), db, "p", request(projector.InPlace))
		require.NoError(t, err)
		time.Sleep(time.Minute)
		require.Equal(t, upTo(13), noted(db, "notes", "k-1"))
		require.Equal(t, once(13), sent(t, db))
		require.NoError(t, stop())
		require.NoError(t, stopTwo())
	})
}

// While one generation applies an event that is parked in the live one, that one waits.
// Promise: R8.1
func TestGenerationsThatApplyAParkedEventAtOnceSendOutputOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(10)...)
		var isGood atomic.Bool
		run := func(version int) (stop func() error) {
			opts := projector.Options{Markers: true, Version: version, RebuildOnChange: projector.BlueGreen, Tables: []string{"notes"}}
			p := projector.Define("p", types, opts, projector.OnCreate(func(context.Context, txn) error { return nil }),
				projector.OnEmit("a", func(ctx context.Context, tx txn, e eventstore.Event[posted]) ([]outbox.Message, error) {
					switch {
					case e.Data.Stars == 5 && version == 2:
						isGood.Store(true)
						time.Sleep(3 * time.Second)
					case e.Data.Stars == 5 && !isGood.Load():
						return nil, errors.New("it fails at first")
					}
					m := outbox.Message{ID: uuid.NewString(), Topic: "sent", Payload: []byte(fmt.Sprint(e.Data.Stars))}
					return []outbox.Message{m}, note(projector.Table(ctx, "notes"))(ctx, tx, e)
				}))
			retry := claim.Backoff{Base: time.Second, Max: time.Second, Attempts: 1000}
			return start(t, newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{Retry: retry}, p))
		}
		stop := run(1)
		time.Sleep(10 * time.Second)
		stopTwo := run(2)
		time.Sleep(time.Minute)
		require.Equal(t, once(10), sent(t, db))
		require.Equal(t, upTo(10), noted(db, "notes", "k-1"))
		require.NoError(t, stop())
		require.NoError(t, stopTwo())
	})
}

// A verification sends nothing, also for an event that is parked in the live read model.
// Promise: R8.1
func TestVerifySendsNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(10)...)
		var isBad atomic.Bool
		isBad.Store(true)
		p := sending(projector.Options{Markers: true, Parking: projector.ParkMessage}, &isBad, 7)
		stop := fromLog(t, db, projector.RunnerConfig{}, p)
		time.Sleep(10 * time.Second)
		isBad.Store(false)
		_, err := p.Verify(t.Context(), db, projector.Verification{}, nil)
		require.ErrorIs(t, err, projector.ErrGeneration, "it would be repaired, and then applied again")
		require.Zero(t, sent(t, db)["7"])
		require.NoError(t, stop())
	})
}

// A parked message of a generation that stands by is applied there, and its output is not sent again.
// Promise: R8.1
func TestAReplayInAStandbyGenerationSendsNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(10)...)
		var isBad atomic.Bool
		isBad.Store(true)
		p := sending(projector.Options{Markers: true, Parking: projector.ParkMessage}, &isBad, 7)
		r := newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, p)
		stop := start(t, r)
		time.Sleep(10 * time.Second)
		isBad.Store(false)
		require.NoError(t, rebuild(t, r, request(projector.BlueGreen)))
		time.Sleep(5 * time.Second)
		require.Equal(t, once(10), sent(t, db))
		require.Equal(t, 1, replayAll(t, db, all))
		time.Sleep(5 * time.Second)
		require.Empty(t, parked(t, db))
		require.Len(t, noted(db, "notes_g1", "k-1"), 10)
		require.Equal(t, once(10), sent(t, db))
		require.NoError(t, stop())
	})
}

// After the process of a verification was killed, rebuilds take place.
// Promise: R7.2
func TestAVerificationThatWasKilledBlocksNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(10)...)
		p := built(projector.Options{}, 1)
		stop := fromLog(t, db, projector.RunnerConfig{}, p)
		time.Sleep(time.Second)
		ok, err := db.SetGeneration(t.Context(), provider.Generation{
			Build: provider.Build{Projector: "p", Generation: 2}, State: provider.GenerationBuilding,
			Data: []byte(`{"how":3,"oldest":1,"newest":1,"source":1,"suffix":"_g2","tables":["notes_g2"],"handlers":["p/a"]}`),
		})
		require.NoError(t, err)
		require.True(t, ok)
		time.Sleep(time.Minute)
		n, err := projector.RequestRebuild(t.Context(), db, "p", request(projector.BlueGreen))
		require.NoError(t, err)
		state(t, db, p, n, "live")
		require.NoError(t, stop())
	})
}

// leaseOnce is a store that extends no lease.
type leaseOnce struct{ unit }

func (l leaseOnce) AcquireLease(ctx context.Context, name string, t claim.Terms) (bool, error) {
	time.Sleep(time.Second) // less than a lease
	if time.Now().Second() > 10 {
		return false, errNever
	}
	return l.unit.AcquireLease(ctx, name, t)
}

// Promise: R7.2
func TestAVerificationThatLosesItsLease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(1000)...)
		p := built(projector.Options{Markers: true}, 1)
		stop := fromLog(t, db, projector.RunnerConfig{}, p)
		time.Sleep(5 * time.Second)
		require.NoError(t, stop())
		_, err := p.Verify(t.Context(), leaseOnce{db}, projector.Verification{Rate: 10}, &projector.RunnerConfig{Log: db})
		require.ErrorIs(t, err, projector.ErrGeneration)
		require.ErrorContains(t, err, "lease")
		_, err = p.Verify(t.Context(), db, projector.Verification{}, nil)
		require.NoError(t, err)
	})
}

// A verification is not ended by another one, however slow it is.
// Promise: R7.2
func TestTwoVerifications(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(300)...)
		p := built(projector.Options{}, 1)
		stop := fromLog(t, db, projector.RunnerConfig{}, p)
		time.Sleep(time.Second)
		done := make(chan error, 1)
		go func() {
			_, err := p.Verify(t.Context(), db, projector.Verification{Rate: 10}, nil)
			done <- err
		}()
		time.Sleep(10 * time.Second)
		_, err := p.Verify(t.Context(), db, projector.Verification{}, nil)
		require.ErrorIs(t, err, projector.ErrGeneration)
		time.Sleep(time.Minute)
		require.NoError(t, <-done)
		require.NoError(t, stop())
	})
}

// A verification whose generation was retired ends with an error.
func TestAVerificationThatWasRetiredEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(300)...)
		p := built(projector.Options{}, 1)
		stop := fromLog(t, db, projector.RunnerConfig{}, p)
		time.Sleep(time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		done := make(chan error, 1)
		go func() {
			_, err := p.Verify(ctx, db, projector.Verification{Rate: 10}, nil)
			done <- err
		}()
		time.Sleep(5 * time.Second)
		setState(t, db, 2, provider.GenerationRetired)
		err := <-done
		require.Error(t, err)
		require.NoError(t, ctx.Err())
		require.NoError(t, stop())
	})
}

// A verification does not compare, or repair, the read model of another version.
// Promise: R7.1
func TestVerifyNextToARollback(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(100)...)
		stop := fromLog(t, db, projector.RunnerConfig{}, built(projector.Options{}, 1))
		time.Sleep(time.Second)
		two := built(projector.Options{Version: 2, RebuildOnChange: projector.BlueGreen}, 10)
		stopTwo := fromLog(t, db, projector.RunnerConfig{}, two)
		state(t, db, two, 2, "live")
		done := make(chan error, 1)
		go func() {
			_, err := two.Verify(t.Context(), db, projector.Verification{Rate: 10, Repair: person}, nil)
			done <- err
		}()
		time.Sleep(5 * time.Second)
		require.NoError(t, projector.Control(t.Context(), db, "p", 1, projector.Promote, person))
		state(t, db, two, 1, "live")
		require.ErrorIs(t, <-done, projector.ErrGeneration)
		require.Equal(t, upTo(100), noted(db, "notes", "k-1"))
		require.NoError(t, stop())
		require.NoError(t, stopTwo())
	})
}

// A comparison may take longer than RunnerConfig.Timeout.
func TestVerifyComparesForLongerThanATimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(100)...)
		p := built(projector.Options{}, 1)
		stop := fromLog(t, db, projector.RunnerConfig{}, p)
		time.Sleep(time.Second)
		slow := &faulty{unit: db, do: func(ctx context.Context, u provider.Unit, run handle) error {
			return db.Do(ctx, u, func(ctx context.Context, tx txn, found provider.Found) (provider.Closing, error) {
				c, err := run(ctx, tx, found)
				if u.Switch != nil && u.Switch.Compare != nil {
					select {
					case <-ctx.Done():
						return c, ctx.Err()
					case <-time.After(time.Minute):
					}
				}
				return c, err
			})
		}}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		_, err := p.Verify(ctx, slow, projector.Verification{}, &projector.RunnerConfig{Log: db})
		require.NoError(t, err)
		require.NoError(t, stop())
	})
}

// A request whose OnReset fails ends with an error, and stops no program.
// Promise: R4.2
func TestARebuildThatCannotBeginEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(10)...)
		p := projector.Define("p", types, projector.Options{}, projector.On("a", note("notes")),
			projector.OnReset(func(context.Context, txn) error { return errNo }))
		r := newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, p)
		stop := start(t, r)
		time.Sleep(time.Second)
		err := rebuild(t, r, request(projector.InPlace))
		require.ErrorIs(t, err, projector.ErrNoRebuild)
		require.ErrorContains(t, err, "its begin failed")
		require.Equal(t, upTo(10), noted(db, "notes", "k-1"))
		require.NoError(t, stop())
	})
}

// A generation that was paused can be promoted again after another one took its place.
func TestAPausedGenerationStandsBy(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(2000)...)
		p := built(projector.Options{}, 1)
		r := newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, p)
		stop := start(t, r)
		time.Sleep(5 * time.Second)
		ask := request(projector.InPlace)
		ask.Rate = 500
		_, err := projector.RequestRebuild(t.Context(), db, "p", ask)
		require.NoError(t, err)
		time.Sleep(3 * time.Second)
		require.NoError(t, projector.Control(t.Context(), db, "p", 2, projector.Pause, person))
		time.Sleep(2 * time.Second)
		require.NoError(t, rebuild(t, r, request(projector.BlueGreen)))
		time.Sleep(20 * time.Second)
		require.Equal(t, upTo(2000), noted(db, "notes", "k-1"))
		require.NoError(t, projector.Control(t.Context(), db, "p", 2, projector.Promote, person))
		state(t, db, p, 2, "live")
		time.Sleep(time.Minute)
		require.Equal(t, upTo(2000), noted(db, "notes", "k-1"))
		require.NoError(t, stop())
	})
}

// A program keeps what a newer one has stored with a generation.
func TestFieldsOfANewerProgramAreKept(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	_, err := db.SetGeneration(t.Context(), provider.Generation{
		Build: provider.Build{Projector: "p", Generation: 1}, State: provider.GenerationStandby,
		Data: []byte(`{"oldest":1,"newest":1,"later":{"a":1}}`),
	})
	require.NoError(t, err)
	_, err = db.SetGeneration(t.Context(), provider.Generation{Build: provider.Build{Projector: "p", Generation: 2}, State: provider.GenerationLive})
	require.NoError(t, err)
	require.NoError(t, projector.Control(t.Context(), db, "p", 1, projector.Promote, person))
	rows, err := db.Generations(t.Context(), "p")
	require.NoError(t, err)
	require.Contains(t, string(rows[0].Data), `"later":{"a":1}`)
	require.Contains(t, string(rows[0].Data), `"promoted":true`)
}

// An event that only the live generation cannot apply is sent once: by the one that stands by.
// Promise: R8.1
func TestAReplayInTheLiveGenerationSendsOutputOnce(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, _ subscription, src projector.Source) {
		write(t, db, "k-1", upTo(10)...)
		one := sending(projector.Options{Markers: true}, nil)
		stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, one))
		time.Sleep(10 * time.Second)
		var isBad atomic.Bool
		isBad.Store(true)
		two := sending(projector.Options{Markers: true, Version: 2, RebuildOnChange: projector.BlueGreen}, &isBad, 3, 12)
		stopTwo := start(t, newRunner(t, db, src, projector.RunnerConfig{}, two))
		state(t, db, two, 2, "live")
		write(t, db, "k-1", 11, 12, 13)
		time.Sleep(20 * time.Second)
		require.Equal(t, upTo(13), noted(db, "notes_g1", "k-1"))
		require.Equal(t, upTo(2), noted(db, "notes", "k-1"))
		isBad.Store(false)
		replayAll(t, db, all)
		time.Sleep(20 * time.Second)
		require.Equal(t, upTo(13), noted(db, "notes", "k-1"))
		require.Equal(t, once(13), sent(t, db))
		require.NoError(t, stop())
		require.NoError(t, stopTwo())
	})
}

// A stream that is parked in the new generation, and gets events all the time, does not delay the switch.
// Promise: R2.2
func TestAParkedStreamDoesNotDelayTheSwitch(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, f subscription, _ projector.Source) {
		write(t, db, "k-1", upTo(10)...)
		// Before each switch, the live generation applies another event of the stream.
		busy := &faulty{unit: db}
		one := built(projector.Options{Markers: true}, 1)
		src := projector.FromLog(db)
		if f != nil {
			src = projector.Subscribe(f, "review")
		}
		stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, one))
		time.Sleep(10 * time.Second)
		next := 11
		busy.do = func(ctx context.Context, u provider.Unit, run handle) error {
			if u.Switch != nil && len(u.Switch.Show) > 0 {
				write(t, db, "k-1", next)
				if f != nil {
					f.deliver(t, publishedAfter(t, db, "k-1", int64(next-1))...)
				}
				next++
				time.Sleep(2 * time.Second)
			}
			return db.Do(ctx, u, run)
		}
		var isBad atomic.Bool
		isBad.Store(true)
		var first atomic.Int32 // calls that are no replays
		two := projector.Define("p", types, projector.Options{Markers: true, Version: 2, RebuildOnChange: projector.BlueGreen, Tables: []string{"notes"}},
			projector.OnCreate(func(context.Context, txn) error { return nil }),
			projector.On("a", func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
				if e.Data.Stars == 5 && isBad.Load() {
					return errNever
				}
				if !projector.Replaying(ctx) {
					first.Add(1)
				}
				return note(projector.Table(ctx, "notes"))(ctx, tx, e)
			}))
		stopTwo := start(t, newRunner(t, busy, src, projector.RunnerConfig{Log: db}, two))
		state(t, db, two, 2, "live")
		time.Sleep(time.Minute)
		require.Equal(t, upTo(4), noted(db, "notes", "k-1"))
		require.Len(t, parked(t, db), next-5)
		isBad.Store(false)
		_, err := projector.Replay(t.Context(), db, projector.ParkedFilter{Projector: "p"}, person)
		require.NoError(t, err)
		time.Sleep(time.Minute)
		require.Equal(t, upTo(next-1), noted(db, "notes", "k-1"))
		require.Zero(t, first.Load(), "the earlier generation has applied them")
		require.NoError(t, stop())
		require.NoError(t, stopTwo())
	})
}

// A program that has missed a switch gets a delivery. It does not ack it before the reader of the
// generation that is live now will apply it.
func TestADeliveryToAProgramThatMissedASwitchWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		write(t, db, "k-1", upTo(10)...)
		store := &stalled{unit: db}
		stop := start(t, newRunner(t, store, projector.Subscribe(f, "review"), projector.RunnerConfig{Log: db}, built(projector.Options{Markers: true}, 1)))
		time.Sleep(10 * time.Second)
		two := built(projector.Options{Markers: true, Version: 2, RebuildOnChange: projector.BlueGreen}, 10)
		stopTwo := start(t, newRunner(t, db, projector.Subscribe(make(subscription), "review"), projector.RunnerConfig{Grace: time.Hour}, two))
		time.Sleep(100 * time.Millisecond)
		store.is.Store(true)
		state(t, db, two, 2, "live")
		for checkpoint(t, db).Mode != provider.ModeLive { // it has no reason to catch up
			time.Sleep(time.Second)
		}
		write(t, db, "k-1", 11)
		m := f.send(publishedAfter(t, db, "k-1", 10)[0])[0]
		time.Sleep(10 * time.Second)
		require.False(t, isAcked(m))
		require.Len(t, noted(db, "notes", "k-1"), 10)
		store.is.Store(false)
		time.Sleep(10 * time.Second)
		require.True(t, isAcked(m))
		require.Equal(t, times(10, upTo(11)), noted(db, "notes", "k-1"))
		require.NoError(t, stop())
		require.NoError(t, stopTwo())
	})
}
