package admin_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
)

// stock returns a program of the projector "stock" in a version, which knows a schema version. Version 1 refuses a price of
// zero.
func (w *world) stock(version, schema int) kinora.Service {
	w.Helper()
	ups := []func(json.RawMessage) (json.RawMessage, error){func(old json.RawMessage) (json.RawMessage, error) { return old, nil }}
	p := projector.Define("stock", eventstore.NewTypes(eventstore.Type[Priced]("product.priced", ups[:schema-1]...)),
		projector.Options{Version: version, RebuildOnChange: projector.BlueGreen, Tables: []string{"stock"}},
		projector.OnCreate(func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `create table `+projector.Table(ctx, "stock")+` (product text primary key, cents int not null)`)
			return err
		}),
		projector.On("priced", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[Priced]) error {
			if e.Data.Cents == 0 && version == 1 {
				return projector.Permanent(errors.New("nothing is free"))
			}
			_, err := tx.Exec(ctx, `insert into `+projector.Table(ctx, "stock")+` values ($1, $2) on conflict (product) do update set cents = excluded.cents`, e.Stream, e.Data.Cents)
			return err
		}))
	r, err := projector.NewRunner(w.db, projector.FromLog(w.db), projector.RunnerConfig{Logger: quiet, Lease: 3 * time.Second, Version: fmt.Sprint("v", version)}, p)
	require.NoError(w, err)
	return r
}

// generation waits until a generation of "stock" has a state, and what is says, and returns it.
func (w *world) generation(number int, state string, is func(admin.Projector) bool) (found admin.Projector) {
	w.Helper()
	w.eventually(func() error {
		f := w.facts()
		for _, p := range f.Projectors {
			if found = p; p.Generation == number && p.State == state && is(p) {
				return nil
			}
		}
		return fmt.Errorf("generation %d is not as it should be: %+v", number, f.Projectors)
	})
	return found
}

func applied(n int) func(admin.Projector) bool {
	return func(p admin.Projector) bool { return p.Lag.N == 0 && p.Position >= int64(n) }
}

// unfound waits until the doctor has no finding with this title.
func (w *world) unfound(title string) {
	w.Helper()
	w.eventually(func() error {
		all, err := findings(w.ops.Doctor(w.Context(), soon))
		require.NoError(w, err)
		if strings.Contains(fmt.Sprint(titles(all)), title) {
			return fmt.Errorf("still finds %v", titles(all))
		}
		return nil
	})
}

// priceIn appends a price of a schema version.
func (w *world) priceIn(schema int, product string, cents int) {
	w.Helper()
	all := drafts(w, cents)
	all[0].Schema = schema
	_, err := w.db.Append(w.Context(), "product-"+product, eventstore.Any, all)
	require.NoError(w, err)
}

// Check 5. What is stuck in a generation that no reader sees is not missing in the read model. Nor does it wait for a program
// of another version.
// Promise: O3.2
func TestDoctorSaysWhichGenerationLacksMessages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stopOld := w.start(w.stock(1, 1))
	w.price("tea", 1)
	w.generation(1, "live", applied(1))
	w.start(w.stock(2, 1))
	w.generation(2, "live", applied(1))
	old := w.generation(1, "standby", func(p admin.Projector) bool { return p.Runners == 1 })
	require.Equal(t, []int{1, 1}, old.Versions)
	require.Equal(t, 1, old.Others)
	w.price("cup", 0)
	f := w.finds(soon, provider.FindingParked, "Messages of generation 1 of the projector stock, which is not live, are stuck")
	require.Contains(t, f.Meaning, "live read model does not lack them")
	require.Equal(t, "1 (standby)", value(f, "generation"))
	require.Contains(t, f.Remedy[1], "kinora parked replay --projector stock --generation 1 --key product-cup")
	require.NotContains(t, strings.Join(f.Remedy, "\n"), "dry-run", "it would be of the live generation")

	w.priceIn(2, "tin", 5)
	f = w.finds(soon, provider.FindingParked, "Messages of the projector stock wait for a program")
	require.Equal(t, "2 (live)", value(f, "generation"))
	w.finds(soon, provider.FindingParked, "Messages of generation 1 of the projector stock, which is not live, wait for a program")
	w.eventually(func() error { // without a runner, the generation is only kept
		stopOld()
		found, err := findings(w.ops.Doctor(t.Context(), soon))
		require.NoError(t, err)
		if all := fmt.Sprint(titles(found)); strings.Count(all, "wait for a program") != 1 {
			return fmt.Errorf("%s", all)
		}
		return nil
	})
}

// Check 6. Version 2 is live, and only a program of version 1 runs: nothing moves.
// Promise: O3.2
func TestDoctorSaysThatOnlyAnotherVersionRuns(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(w.stock(1, 1))
	w.price("tea", 1)
	w.generation(1, "live", applied(1))
	stopNew := w.start(w.stock(2, 1))
	w.generation(2, "live", applied(1))
	w.generation(1, "standby", applied(1))
	stopNew()
	w.price("tea", 2)
	f := w.finds(soon, provider.FindingLag, "The projector stock lags")
	require.Equal(t, "0", value(f, "runners"))
	require.Contains(t, f.Meaning, "The live read model is that of version 2, and the only runner has another version")
	require.Equal(t, []string{"start a runner of stock in version 2", `kinora projectors promote stock 1 --reason "…"`}, f.Remedy)
	live := w.generation(2, "live", func(p admin.Projector) bool { return p.Lag.N == 1 })
	require.Equal(t, []int{0, 1}, []int{live.Runners, live.Others})

	id, err := w.ops.Verify(t.Context(), "stock", provider.VerifyRequest{}, by)
	require.NoError(t, err)
	f = w.finds(soon, provider.FindingGone, fmt.Sprintf("Nobody can answer request %d: verify of stock", id))
	require.Contains(t, f.Meaning, "that of version 2, and the only runner has another version")
	require.Equal(t, []string{"start a runner of stock in version 2", fmt.Sprintf(`kinora acts cancel %d --reason "…"`, id)}, f.Remedy)

	require.NoError(t, w.ops.Control(t.Context(), "stock", 1, projector.Promote, by)) // the other remedy
	w.quietly(soon, provider.FindingLag)
	w.unfound("Nobody can answer")
	w.generation(1, "live", applied(2))
	_, err = w.ops.Await(t.Context(), id, nil)
	require.NoError(t, err)
}

// Check 5. What messages need that nobody has is named once, for as long as nobody has it.
// Promise: O3.2
func TestDoctorNamesWhatNobodyHas(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(w.stock(1, 1))
	w.priceIn(2, "tea", 1)
	w.priceIn(2, "tin", 1)
	w.price("tea", 2)
	f := w.finds(soon, provider.FindingParked, "Messages of the projector stock wait for a program that meets their needs")
	require.Contains(t, value(f, "needs"), "event product.priced 2, for ")
	require.Contains(t, value(f, "needs"), "(since ")
	require.Equal(t, []string{"start a runner of stock in version 1 that has it", "kinora parked ls --projector stock --generation 1 --class unable"}, f.Remedy)
	all, err := findings(w.ops.Doctor(t.Context(), soon))
	require.NoError(t, err)
	require.Equal(t, 1, strings.Count(fmt.Sprint(titles(all)), "projector stock"), "once, and they are not stuck: %v", titles(all))

	id, err := w.ops.DryRun(t.Context(), projector.ParkedFilter{Projector: "stock", Key: "product-tea"}, by)
	require.NoError(t, err)
	f = w.finds(soon, provider.FindingGone, fmt.Sprintf("Nobody can answer request %d: dry-run of stock", id))
	require.Contains(t, f.Meaning, "No living runner has what it needs")
	require.Equal(t, "event product.priced 2", value(f, "needs"))
	require.Equal(t, "start a runner of stock in version 1 that has it", f.Remedy[0])
	permanent := provider.ClassPermanent
	other, err := w.ops.DryRun(t.Context(), projector.ParkedFilter{Projector: "stock", Class: &permanent}, by)
	require.NoError(t, err)
	_, err = w.ops.Await(t.Context(), other, nil) // it selects none of these messages
	require.NoError(t, err)

	has := provider.ServiceReport{ID: "1", Kind: "runner", Holder: "h/1", Process: "h/1", Clock: time.Now(), Can: []provider.Capability{
		{Projector: "stock", Version: 1, Has: []string{"event product.priced 1", "event product.priced 2"}}}}
	require.NoError(t, w.db.Report(t.Context(), has, time.Hour)) // and it is about to apply them
	w.quietly(soon, provider.FindingParked)
	w.unfound("Nobody can answer")
	require.Equal(t, []string{"h/1"}, w.facts().Needs[0].Able)
	has.Can[0].Version = 2
	require.NoError(t, w.db.Report(t.Context(), has, time.Hour))
	w.finds(soon, provider.FindingParked, "Messages of the projector stock wait for a program") // that one feeds another generation
	require.NoError(t, w.db.Report(t.Context(), has, 0))

	w.start(w.stock(1, 2))
	w.quietly(soon, provider.FindingParked)
	w.unfound("Nobody can answer")
	act, err := w.ops.Await(t.Context(), id, nil)
	require.NoError(t, err)
	require.Equal(t, provider.ActDone, act.State)
}

// Check 2. The only runner lacks what the live read model has seen, so it neither verifies nor rebuilds it.
// Promise: O3.2
func TestDoctorSaysWhatRequestsWaitFor(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stopNew := w.start(w.stock(1, 2))
	w.priceIn(2, "tea", 1)
	w.generation(1, "live", applied(1))
	stopNew()
	w.start(w.stock(1, 1))
	w.generation(1, "live", func(p admin.Projector) bool { return p.Runners == 1 })
	id, err := w.ops.Verify(t.Context(), "stock", provider.VerifyRequest{}, by)
	require.NoError(t, err)
	_, err = w.ops.Rebuild(t.Context(), "stock", projector.Rebuild{How: projector.BlueGreen, Decision: by})
	require.NoError(t, err)
	for title, cancel := range map[string]string{
		fmt.Sprintf("Nobody can answer request %d: verify of stock", id): fmt.Sprintf(`kinora acts cancel %d --reason "…"`, id),
		"Nobody can take up the rebuild of stock":                        `kinora projectors cancel stock --reason "…"`,
	} {
		f := w.finds(soon, provider.FindingGone, title)
		require.Equal(t, "No living runner has what it needs.", f.Meaning)
		require.Equal(t, "event product.priced 2", value(f, "needs"))
		require.Equal(t, []string{"start a runner of stock in version 1 that has it", cancel}, f.Remedy)
	}
	require.Equal(t, "No living runner has what it needs.", w.facts().Unanswered(id))

	w.start(w.stock(1, 2))
	w.unfound("Nobody can")
	w.generation(2, "live", applied(1))
	_, err = w.ops.Await(t.Context(), id, nil)
	require.NoError(t, err)
}

// Check 2. A request about a projector that no program has.
// Promise: O3.2
func TestDoctorNamesARequestThatNobodyAnswers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id, err := w.ops.Verify(t.Context(), "stock", provider.VerifyRequest{}, by)
	require.NoError(t, err)
	f := w.finds(soon, provider.FindingGone, fmt.Sprintf("Nobody can answer request %d: verify of stock", id))
	require.Equal(t, "No runner of stock runs.", f.Meaning)
	canceled, err := w.ops.Cancel(t.Context(), id, by)
	require.NoError(t, err)
	require.True(t, canceled)
	w.unfound("Nobody can answer")
}

// A store without operations does not know who is alive.
func TestDoctorOfAStoreWithoutOperationsNamesWhatMessagesNeed(t *testing.T) {
	t.Parallel()
	db, err := memory.New(nil)
	require.NoError(t, err)
	lane := provider.LaneOfKey("tea")
	u := provider.Unit{Projector: "stock", Messages: []provider.Message{{ID: "m-1", Lane: lane}}}
	require.NoError(t, db.Do(t.Context(), u, func(context.Context, *memory.Model, provider.Found) (provider.Closing, error) {
		p := provider.Parked{MessageID: "m-1", Key: "tea", Lane: lane, Class: provider.ClassUnable, Needs: "decoder\nevent posted 2"}
		return provider.Closing{Park: []provider.Aside{{Parked: p}}}, nil
	}))
	for store, meaning := range map[admin.Store]string{
		db: "No living service has it. They, and", ofProjectors{db, db}: "They, and",
	} {
		found, err := findings(adminOf(t, store).Doctor(t.Context(), provider.DiagnosisLimits{}))
		require.NoError(t, err)
		require.Len(t, found, 1, titles(found))
		require.Equal(t, "Messages of the projector stock wait for a program that meets their needs", found[0].Title)
		require.Contains(t, value(found[0], "needs"), "decoder, event posted 2, for ")
		require.True(t, strings.HasPrefix(found[0].Meaning, meaning), found[0].Meaning)
	}
}
