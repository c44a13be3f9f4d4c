package projector

import (
	"context"
	"log/slog"

	"github.com/kinora-go/kinora/provider"
)

// Several programs may share a subscription, and only some of them feed the live generation. A
// delivery to another one is left to the reader of the live generation. That generation must catch
// up with the log then: if it were live, later events of the stream could be delivered to it, and
// applied, before its reader finds this one.

// leave acks deliveries of events if this program does not feed the live generation, and returns the
// others. A message that is not in the log waits until the program does, and those behind it.
func (w *worker) leave(ctx context.Context, msgs []*inbound) []*inbound {
	for pause, warned := closingPause, false; ctx.Err() == nil && len(msgs) > 0 && !w.current.Load().isLive(); {
		can, err := w.leaveToReader(ctx)
		if err != nil {
			w.runner.report(slog.LevelWarn, "deliveries not left to the reader of the log", err, "projector", w.name)
		}
		var rest []*inbound
		for _, m := range msgs {
			if !can || m.position == 0 && !m.isUnknown { // who forges a message must not stop the others
				rest = append(rest, m)
				continue
			}
			m.done()
			for _, duplicate := range m.duplicates {
				duplicate.done()
			}
		}
		if msgs = rest; can && len(msgs) > 0 && !warned {
			w.runner.cfg.Logger.Warn("a message that is not in the log waits until this program feeds the live read model",
				"projector", w.name, "message_id", msgs[0].id)
			warned = true
		}
		if len(msgs) > 0 {
			wait(ctx, pause)
			pause = min(2*pause, followFast)
		}
	}
	return msgs
}

// leaveToReader makes the live generation catch up with the log, and reports whether it does.
func (w *worker) leaveToReader(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, w.runner.cfg.Timeout)
	defer cancel()
	c, err := w.runner.store.Checkpoint(ctx, provider.Build{Projector: w.name})
	if err != nil || c.Mode != provider.ModeLive {
		return c.Mode == provider.ModeCatchUp, err
	}
	to := c
	to.Mode = provider.ModeCatchUp
	return w.runner.store.SetCheckpoint(ctx, provider.Build{Projector: w.name, Generation: c.Generation}, c, to)
}

// mayLeave reports whether the generation of a unit is live, so that deliveries that were left to its
// reader will not be missing in the read model.
func (w *worker) mayLeave(ctx context.Context, u *unit) bool {
	ctx, cancel := context.WithTimeout(ctx, w.runner.cfg.Timeout)
	defer cancel()
	c, err := w.runner.store.Checkpoint(ctx, provider.Build{Projector: w.name})
	return err == nil && c.Generation == u.intent.Generation
}

// visit shows the programs that feed the live generation that this one does not, and may get its
// deliveries.
func (p *projection) visit(ctx context.Context, is *generation) error {
	now := p.runner.cfg.Clock()
	if now.Sub(p.visited) < p.runner.cfg.Lease/3 {
		return nil
	}
	p.visited = now
	_, err := change(ctx, p.runner.store, is, func(g *generation) { g.Visits++ })
	return err
}

// isVisited reports whether another program has called visit within a lease.
func (p *projection) isVisited(is *generation) bool {
	now := p.runner.cfg.Clock()
	if is.Visits != p.visits.number {
		p.visits = beat{is.Visits, now}
	}
	return is.Visits > 0 && now.Sub(p.visits.at) < p.runner.cfg.Lease
}
