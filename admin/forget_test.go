package admin_test

import (
	"fmt"
	"testing"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// A projector that no program has any more is forgotten: the doctor asks for no runner, and people see who did it.
// Promise: O5.1
// Promise: O5.2
func TestAForgottenProjectorIsNoFinding(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stop := w.start(w.runner(projector.RunnerConfig{}))
	w.price("tea", 5)
	w.price("cup", 0, 7) // the first one is stuck
	w.finds(soon, provider.FindingParked, "prices are stuck")
	w.eventually(func() error {
		if p := w.facts().Projectors[0]; p.Parked.N != 2 || p.Lag.N != 0 {
			return fmt.Errorf("%+v", p)
		}
		return nil
	})
	_, err := w.ops.Forget(t.Context(), "prices", projector.ForgetOptions{}, by)
	require.ErrorIs(t, err, projector.ErrGeneration)
	stop()
	w.price("tea", 6)
	w.finds(soon, provider.FindingLag, "prices")

	f, err := w.ops.Forget(t.Context(), "prices", projector.ForgetOptions{Preview: true}, by)
	require.NoError(t, err)
	require.Equal(t, provider.Count{N: 2}, f.Parked)
	_, err = w.ops.Forget(t.Context(), "prices", projector.ForgetOptions{}, by)
	require.NoError(t, err)
	found, err := findings(w.ops.Doctor(t.Context(), soon))
	require.NoError(t, err)
	require.NotContains(t, fmt.Sprint(titles(found)), "prices")
	require.Equal(t, []admin.Projector{{Name: "prices", Generation: 1, State: "forgotten"}}, w.facts().Projectors)
	_, err = kinora.Start(t.Context(), w.runner(projector.RunnerConfig{}))
	require.ErrorIs(t, err, projector.ErrForgotten)

	require.NoError(t, w.ops.Release(t.Context(), "prices", by))
	require.Empty(t, w.facts().Projectors)
	w.exec(`delete from prices`)
	w.fixed.Store(true)
	w.start(w.runner(projector.RunnerConfig{}))
	w.eventually(func() error {
		var n int
		if err := w.db.Pool().QueryRow(t.Context(), `select sum(cents) from prices`).Scan(&n); err != nil || n != 6+7 {
			return fmt.Errorf("%d, %w", n, err)
		}
		return nil
	})
	acts, err := w.ops.Acts(t.Context(), provider.ActFilter{Kind: provider.PauseProjector, Name: "prices"})
	require.NoError(t, err)
	verbs := []string{}
	for _, a := range acts {
		verbs = append(verbs, fmt.Sprint(a.Verb, " ", a.State, " ", a.Applied, " ", a.By))
	}
	require.Equal(t, []string{"release done 0 ann", "forget done 2 ann", "forget failed 0 ann"}, verbs)
}
