package follow

import (
	"context"

	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
)

// FromLog follows the log for the live generation of a projector whose only source is the log. Its checkpoint stays in
// ModeCatchUp.
type FromLog struct{ Reader *Reader }

// Step applies a page.
func (l FromLog) Step(ctx, hard context.Context, g *generation.Row) (more bool, err error) {
	r := l.Reader
	if r.rests(ctx, g) {
		return false, nil
	}
	got, err := r.Page(ctx, hard, g)
	switch {
	case err != nil || got.Moved && got.Page.More:
		return err == nil, err
	case r.cursor.before != nil: // until the checkpoint has passed the segments that were ahead
		return got.Moved, nil
	case g.IsReplaying():
		_, recorded, err := r.Progress.CaughtUp(ctx, g)
		return recorded, err
	}
	got.pause(ctx)
	return false, nil
}

// rests reports whether a reader that has applied all events only waits for others, and there are none. A segment first
// moves its place to there.
func (r *Reader) rests(ctx context.Context, g *generation.Row) bool {
	if !r.cursor.atHead || !r.Resting || !g.IsLive() || g.IsReplaying() || g.Shared || r.cursor.before != nil || r.isRestored() ||
		r.Segment > 0 && r.at.Place.Position != r.cursor.read {
		return false
	}
	head, err := r.Host.Head.Position(ctx, r.Host)
	return err == nil && head == r.cursor.read
}

// pause waits a little if the page had events of others only.
func (g Got) pause(ctx context.Context) {
	if len(g.Page.Events) == 0 && g.Moved {
		model.Wait(ctx, model.Soon) // events of others wake this reader too
	}
}

// Segment follows the log for one segment.
type Segment struct{ Reader *Reader }

// Step applies a page.
func (s Segment) Step(ctx, hard context.Context, g *generation.Row) (more bool, err error) {
	if s.Reader.rests(ctx, g) {
		return false, nil
	}
	got, err := s.Reader.Page(ctx, hard, g)
	if err != nil || got.Moved && got.Page.More {
		return err == nil, err
	}
	got.pause(ctx)
	return false, nil
}

// PassesEarlier reports whether segments of an earlier split were ahead of the checkpoint, and it has not passed them.
func (r *Reader) PassesEarlier() bool { return r.cursor.before != nil }
