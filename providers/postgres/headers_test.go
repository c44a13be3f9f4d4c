package postgres_test

import (
	"fmt"
	"testing"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// The headers of entries keep every text that metadata may have, whichever statement writes them.
func TestHeadersOfEventsKeepTheirText(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, &postgres.Config{Route: outbox.ByCategory})
	texts := map[string]string{"quote": `say "this"`, "backslash": `a\b\\`, "brace": `"}{`, "letters": "größe 本 \u2028 <&>", "empty": "", "percent": "%s $1 'x'"}
	for _, n := range []int{1, 3} {
		for name, expected := range map[string]func(at int) eventstore.Expected{
			"exact": func(at int) eventstore.Expected { return eventstore.Expected(at) }, // the first is NoStream
			"any":   func(int) eventstore.Expected { return eventstore.Any },
		} {
			stream := fmt.Sprintf("c-%d-%s", n, name)
			for begin := 0; begin < 2*n; begin += n {
				ds := drafts(t, make([]int, n)...)
				for i := range ds {
					ds[i].Metadata = eventstore.Metadata{Actor: `an "actor"`, Extra: texts}
				}
				at, err := db.Append(t.Context(), stream, expected(begin), ds)
				require.NoError(t, err)
				entries := claimAll(t, db)
				require.Len(t, entries, n)
				for i, e := range entries {
					require.Equal(t, fmt.Sprint(begin+i+1), e.Headers[provider.HeaderVersion])
					require.Equal(t, fmt.Sprint(at.Position-int64(n-1-i)), e.Headers[provider.HeaderPosition])
					require.Equal(t, stream, e.Headers[provider.HeaderStream])
					require.Equal(t, `an "actor"`, e.Headers[provider.HeaderActor])
					for name, text := range texts {
						require.Equal(t, text, e.Headers[provider.HeaderExtra+name], name)
					}
				}
				markAll(t, db, entries, outbox.Mark{To: outbox.Published, Drop: true})
			}
		}
	}
}
