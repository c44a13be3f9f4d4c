package rebuild

import (
	"context"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// Sample applies the first events behind a position in a transaction that is rolled back, and returns the number of
// events per second, or zero if it fails. g is not stored; the reader is at no checkpoint.
func Sample(ctx context.Context, r *follow.Reader, g *generation.Row, after int64) float64 {
	w := r.Applier.Worker
	defer w.Close()
	page, err := r.Host.Log.LogPage(ctx, provider.LogQuery{After: after, Filter: r.Projector.Rules.Filter, Limit: model.LogBatch})
	if err != nil || len(page.Events) == 0 {
		return 0
	}
	if _, err := r.Host.ReadLogID(ctx); err != nil {
		return 0
	}
	u := w.Of(g.Build, g.Suffix, nil)
	if r.Projector.Creates {
		u.Setup, u.Suffix = model.Created, fmt.Sprintf("_g%d", g.Generation)
	}
	u.Intent.Once, u.Intent.Messages, u.Intent.Reader = true, nil, &provider.Reader{}
	u.Intent.Switch = &provider.Switch{Snapshot: true, Last: func(ctx context.Context, _ provider.Live) ([]provider.Message, error) {
		u.Messages, err = r.Accept(ctx, g, page.Events)
		return model.UnitOf(u.Messages), err
	}}
	began := r.Host.Clock()
	if _, err := w.Transact(ctx, u); err != nil {
		return 0
	}
	return float64(len(page.Events)) / max(r.Host.Clock().Sub(began), time.Microsecond).Seconds()
}
