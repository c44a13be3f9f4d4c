package outbox_test

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/stretchr/testify/require"
)

// Entries that fail together are tried again at different times with a jitter, and at the same
// time without.
// Promise: G3.6
func TestRelayAppliesItsJitter(t *testing.T) {
	t.Parallel()
	for _, jitter := range []float64{0, 0.5} {
		t.Run(fmt.Sprint(jitter), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				isBad := func(id string) bool { return id[0]%3 == 0 }
				db := newDB(t)
				pub := newPublisher(func(_ int, _ string, ms []*message.Message) error {
					for _, m := range ms {
						if isBad(m.UUID) {
							return errors.New("refused")
						}
					}
					return nil
				})
				for key := 'A'; key < 'A'+30; key++ {
					enqueue(t, db, string(key)+"1")
				}
				stop := start(t, db, pub, outbox.RelayConfig{Backoff: claim.Backoff{Base: time.Hour, Jitter: jitter}})
				synctest.Wait()
				require.NoError(t, stop())
				delays := map[time.Duration]bool{}
				for id, e := range entries(t, db) {
					if !isBad(id) {
						continue
					}
					require.Equal(t, outbox.Failed, e.Status, id)
					delay := e.NextAttemptAt.Sub(e.LastAttemptedAt)
					require.LessOrEqual(t, delay, time.Hour, id)
					require.GreaterOrEqual(t, delay, time.Hour-time.Duration(jitter*float64(time.Hour)), id)
					delays[delay] = true
				}
				if jitter == 0 {
					require.Equal(t, map[time.Duration]bool{time.Hour: true}, delays)
				} else {
					require.Len(t, delays, 10)
				}
			})
		})
	}
}
