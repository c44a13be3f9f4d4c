package projector

import (
	"context"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// countPage is how many positions one query of count covers, if the log counts by itself.
const countPage = 1_000_000

// count counts the visible events of types behind a position, up to another one.
func count(ctx context.Context, log provider.Log, types []string, after, to int64) (n int64, err error) {
	counter, ok := log.(provider.LogCounter)
	if !ok {
		return countPages(ctx, log, types, after, to)
	}
	head, err := log.LogPosition(ctx, eventstore.From{Now: true})
	for to = min(to, head); err == nil && after < to; after += countPage {
		var some int64
		some, err = counter.CountLog(ctx, types, after, min(after+countPage, to))
		n += some
	}
	return n, err
}

// countPages reads the events that it counts.
func countPages(ctx context.Context, log provider.Log, types []string, after, to int64) (n int64, err error) {
	q := provider.LogQuery{After: after, Filter: eventstore.LogFilter{Types: types}, Limit: 10 * completePage, Unsettled: true, NoData: true}
	for {
		page, err := log.LogPage(ctx, q)
		if err != nil {
			return 0, err
		}
		last := page.End.Position
		for i := range page.Events {
			if last = max(last, page.Events[i].Position); page.Events[i].Position <= to {
				n++
			}
		}
		if !page.Full || last <= q.After || last >= to {
			return n, nil
		}
		q.After = last
	}
}
