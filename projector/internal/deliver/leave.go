package deliver

import (
	"context"
	"log/slog"

	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/unit"
	"github.com/kinora-go/kinora/provider"
)

// Several programs may share a subscription, and only some of them feed the live generation. A
// delivery to another one is left to the reader of the live generation. That generation must catch
// up with the log then: if it were live, later events of the stream could be delivered to it, and
// applied, before its reader finds this one.

// leave acks deliveries of events if this program does not feed the live generation, and returns the
// others. A message that is not in the log waits until the program does, and those behind it.
func (w *Worker) leave(ctx context.Context, msgs []*model.Message) []*model.Message {
	h := w.pool.Host
	for pause, warned := endedPause, false; ctx.Err() == nil && len(msgs) > 0 && !w.pool.Current.Load().IsLive(); {
		can, err := w.leaveToReader(ctx)
		if err != nil {
			h.Report(slog.LevelWarn, "deliveries not left to the reader of the log", err, "projector", w.pool.Projector.Name)
		}
		var rest []*model.Message
		for _, m := range msgs {
			if !can || m.Position == 0 && !m.IsUnknown { // who forges a message must not stop the others
				rest = append(rest, m)
			} else {
				m.Done()
			}
		}
		if msgs = rest; can && len(msgs) > 0 && !warned {
			h.Logger.Warn("a message that is not in the log waits until this program feeds the live read model",
				"projector", w.pool.Projector.Name, "message_id", msgs[0].ID)
			warned = true
		}
		if len(msgs) > 0 {
			model.Wait(ctx, pause)
			pause = min(2*pause, 20*endedPause)
		}
	}
	return msgs
}

// leaveToReader makes the live generation catch up with the log, and reports whether it does.
func (w *Worker) leaveToReader(ctx context.Context) (bool, error) {
	ctx, cancel := w.pool.Host.Limited(ctx)
	defer cancel()
	store, live := w.pool.Host.Store, provider.Build{Projector: w.pool.Projector.Name}
	c, err := store.Checkpoint(ctx, live)
	if err != nil || c.Mode != provider.ModeLive {
		return c.Mode == provider.ModeCatchUp, err
	}
	to := c
	to.Mode = provider.ModeCatchUp
	live.Generation = c.Generation
	return store.SetCheckpoint(ctx, live, c, to)
}

// mayLeave reports whether the generation of a unit is live, so that deliveries that were left to its
// reader will not be missing in the read model.
func (w *Worker) mayLeave(ctx context.Context, d *unit.Done) bool {
	ctx, cancel := w.pool.Host.Limited(ctx)
	defer cancel()
	c, err := w.pool.Host.Store.Checkpoint(ctx, provider.Build{Projector: w.pool.Projector.Name})
	return err == nil && c.Generation == d.Unit.Intent.Generation
}
