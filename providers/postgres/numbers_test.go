package postgres_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// A payload whose numbers, in full, are exactly as large as the limit is stored and read.
// Promise: G1.15
func TestAPayloadWithinTheLimitReadsBack(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	data := func(over int) []byte {
		seven := strings.Repeat("1e131071,", 7) // 7 * 131,073 bytes in full
		return fmt.Appendf(nil, "[%s1e%d]", seven, provider.DefaultMaxPayload-7*131073-len("[]")-1+over)
	}
	draft := func(data []byte) eventstore.Draft {
		return eventstore.Draft{ID: uuid.NewString(), Type: "t", Schema: 1, Data: data}
	}
	_, err := db.Append(t.Context(), "a-1", eventstore.NoStream, []eventstore.Draft{draft(data(0))})
	require.NoError(t, err)
	var invalid *eventstore.InvalidError
	_, err = db.Append(t.Context(), "a-1", 1, []eventstore.Draft{draft(data(1))})
	require.ErrorAs(t, err, &invalid)
	require.Equal(t, provider.DefaultMaxPayload, count(t, db, `select octet_length(replace(data::text, ' ', '')) from kinora.events`))
	events := 0
	for e, err := range db.ReadStream(t.Context(), "a-1", 0) {
		require.NoError(t, err)
		events++
		require.Equal(t, provider.DefaultMaxPayload, len(strings.ReplaceAll(string(e.Data), " ", "")))
	}
	require.Equal(t, 1, events)
}

// CheckJSON never counts fewer bytes than PostgreSQL returns.
func TestNumbersAreCountedAsPostgreSQLReturnsThem(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	for _, mantissa := range []string{"0", "-0", "1", "-1", "12", "0.5", "-0.05", "12.5", "1.50", "100", "0.0", "123456789.123456789"} {
		for _, exponent := range []string{"", "e0", "e1", "E+2", "e-1", "e-2", "e-007", "e30", "e-30", "e5000", "e-5000"} {
			number := "[" + mantissa + exponent + "]"
			n := count(t, db, fmt.Sprintf(`select octet_length('%s'::jsonb::text)`, number))
			require.Error(t, provider.CheckJSON("data", []byte(number), n-1), number)
		}
	}
}
