package providertest

import (
	"fmt"
	"strings"

	"github.com/kinora-go/kinora/eventstore"
)

// eventsOfAnySize reads a stream in which pages of limited bytes end at different events: a large
// event alone, several in a row, and large ones between small ones.
func eventsOfAnySize(s *stage) {
	var ds []eventstore.Draft
	for _, run := range []struct{ events, size int }{{1, 900_000}, {210, 10}, {9, 900_000}, {3, 10}, {7, 700_000}, {190, 10}, {5, 1_000_000}} {
		for range run.events {
			d := draft()
			d.Data = fmt.Appendf(nil, `"%d%s"`, len(ds), strings.Repeat("x", run.size))
			ds = append(ds, d)
		}
	}
	s.append("review-1", eventstore.NoStream, ds...)
	for _, after := range []int{0, 1, 215, 410, len(ds) - 1, len(ds)} {
		events := s.read(s.db, "review-1", int64(after))
		same(s, fmt.Sprintf("events after version %d", after), len(events), len(ds)-after)
		for i, e := range events {
			same(s, "id and version", []any{e.ID, e.Version}, []any{ds[after+i].ID, int64(after + i + 1)})
			s.require(sameJSON(e.Data, ds[after+i].Data), "version %d has its own data", e.Version)
		}
	}
}
