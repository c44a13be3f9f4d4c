package postgres_test

import (
	"testing"
	"time"

	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// Other software cannot write values into a parked message that a list could not show. Other
// values break no list.
func TestAForeignParkedMessageHarmsOnlyItself(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, totals)
	odd, usual := park(t, db, "a", "a1"), park(t, db, "b", "b1")
	for _, set := range []string{
		`parked_at = 'infinity'`, `resolved_at = '-infinity'`, `handlers = '{null}'`, `handlers = '{{p/a},{p/b}}'`,
		`headers = '[1]'`, `headers = 'null'`, `headers = '{"a": 1}'`, `headers = '{"a": null}'`,
	} {
		_, err := db.Pool().Exec(t.Context(), `update kinora.parked set `+set+` where id = $1`, odd.Seq)
		require.Error(t, err, set)
	}
	_, err := db.Pool().Exec(t.Context(), `
		update kinora.parked set class = 'x', lane = '\x01', key = U&'\FFFD!', attempts = -1, handlers = '{"",x}', headers = '{"": ""}' where id = $1`, odd.Seq)
	require.NoError(t, err)
	all, err := db.Parked(t.Context(), provider.ParkedFilter{})
	require.NoError(t, err)
	require.Len(t, all, 2)
	require.Equal(t, usual.MessageID, all[1].MessageID)
	n, err := db.Decide(t.Context(), provider.ParkedFilter{Seqs: []int64{usual.Seq}}, provider.StateWaiting, provider.Decision{By: "ann", Reason: "fixed"})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	due, err := db.Due(t.Context(), provider.DueFilter{Builds: []provider.Build{{Projector: "p"}}, Keys: 10, Each: 10})
	require.NoError(t, err)
	require.Len(t, due, 1)
	tried, err := db.Try(t.Context(), due[0], 5, time.Minute)
	require.NoError(t, err)
	require.True(t, tried)
}
