package projectortest_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	. "github.com/kinora-go/kinora/projector/projectortest"
)

// account is a review that can be posted once, and edited.
type account struct {
	id    string
	stars int
	seen  map[string]int
}

func newAccount(id string) *account { return &account{id: id, seen: map[string]int{}} }

func (a *account) Apply(event any) {
	switch e := event.(type) {
	case posted:
		a.stars = e.Stars
	case edited:
		a.stars = e.Stars
	}
	a.seen[fmt.Sprintf("%T", event)]++
}

var errStars = errors.New("stars must be 1 to 5")

func rate(stars int) func(*account) ([]any, error) {
	return func(a *account) ([]any, error) {
		switch {
		case stars < 1 || stars > 5:
			return nil, fmt.Errorf("rate: %w", errStars)
		case a.stars == 0:
			return []any{posted{"42", "ann", stars}}, nil
		case a.stars == stars:
			return nil, nil
		}
		return []any{edited{"42", "ann", stars, a.stars}}, nil
	}
}

func TestAggregate(t *testing.T) {
	t.Parallel()
	five := posted{"42", "ann", 5}
	Given(t, newAccount).When(rate(5)).Then(five)
	Given(t, newAccount, five).When(rate(5)).Then()
	Given(t, newAccount, five).When(rate(3)).Then(edited{"42", "ann", 3, 5})
	Given(t, newAccount, five, edited{"42", "ann", 3, 5}).When(rate(6)).Then(errStars)
}

func TestAggregateReportsOtherResults(t *testing.T) {
	t.Parallel()
	five := posted{"42", "ann", 5}
	for name, c := range map[string]struct {
		test func(t testing.TB)
		want []string
	}{
		"other events": {
			func(t testing.TB) { Given(t, newAccount, five).When(rate(3)).Then(five) },
			[]string{"given: projectortest_test.posted{Product:42 Author:ann Stars:5}", "want: projectortest_test.posted{Product:42", "got:  projectortest_test.edited{Product:42 Author:ann Stars:3 Was:5}"},
		},
		"no events": {
			func(t testing.TB) { Given(t, newAccount, five).When(rate(5)).Then(five) }, []string{"got:  no events"},
		},
		"an error":          {func(t testing.TB) { Given(t, newAccount).When(rate(6)).Then(five) }, []string{"without past events", "got:  error rate: stars must be 1 to 5"}},
		"no error":          {func(t testing.TB) { Given(t, newAccount).When(rate(5)).Then(errStars) }, []string{"want: error stars must be 1 to 5", "got:  projectortest_test.posted"}},
		"another error":     {func(t testing.TB) { Given(t, newAccount).When(rate(6)).Then(errors.ErrUnsupported) }, []string{"want: error unsupported operation"}},
		"an error not said": {func(t testing.TB) { Given(t, newAccount).When(rate(6)).Then() }, []string{"want: no events", "got:  error rate"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			text := failure(t, c.test)
			for _, part := range c.want {
				require.Contains(t, text, part)
			}
		})
	}
}

// clocked uses the clock in Apply.
type clocked struct{ at time.Time }

func (c *clocked) Apply(any) { c.at = time.Now() }

func TestAggregateFindsWhatIsNotThePast(t *testing.T) {
	t.Parallel()
	text := failure(t, func(t testing.TB) { Given(t, func(string) *clocked { return &clocked{} }, posted{}) })
	require.Contains(t, text, "Apply gives two aggregates different states for the same events")
	text = failure(t, func(t testing.TB) {
		Given(t, newAccount).When(func(*account) ([]any, error) { return []any{posted{uuid.NewString(), "ann", 5}}, nil })
	})
	require.Contains(t, text, "the same decision gives two results, without past events")
	calls := 0
	text = failure(t, func(t testing.TB) {
		Given(t, newAccount).When(func(*account) ([]any, error) {
			if calls++; calls > 1 {
				return nil, errStars
			}
			return nil, nil
		})
	})
	require.Contains(t, text, "once:  no events\n  again: error stars must be 1 to 5")
}
