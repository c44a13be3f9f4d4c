package task

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// The timer of a limit may fire at the moment at which the limit is paused, or starts again: that ends nothing.
func TestALimitThatIsPausedEndsNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		l := newLimit(time.Second, cancel)
		for _, again := range []func(){l.pause, l.start, l.database} {
			again()
			l.end() // as its timer calls it
			require.NoError(t, ctx.Err())
		}
		l.start()
		time.Sleep(time.Second)
		synctest.Wait()
		require.ErrorIs(t, context.Cause(ctx), errDeadline)
		time.Sleep(grace)
	})
}
