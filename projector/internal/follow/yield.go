package follow

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// Yield lets the readers of a generation leave their posts to another program, which can do more. Until then they park what
// they are unable to apply. So nothing stops: the other program applies it from there, and sees by it that it is wanted.
type Yield struct {
	mu    sync.Mutex
	asked time.Time // when the services were asked last
	at    time.Time // when the readers leave, or left last
}

// ErrYields: the reader leaves its post to another program.
var ErrYields = errors.New("another program can do more")

// YieldFor is how long a reader that has left asks for no lease. If no other program has the lease then, no other one asked for it.
const YieldFor = time.Second

const (
	yieldAfter = 1500 * time.Millisecond // from the decision on: other programs look once a second for what they are able to apply
	askEvery   = time.Second
)

// consider is called with messages before they are applied. The readers leave soon if this program is unable to apply one of
// them, and another one that is alive is able, and can do everything that this one can. They do so at most once per lease.
func (y *Yield) consider(ctx context.Context, h *model.Host, p *model.Projector, g *generation.Row, msgs []*model.Message) {
	for _, m := range msgs {
		if m.Aside == nil || provider.ClassOf(m.Aside.Cause) != provider.ClassUnable {
			continue
		}
		y.mu.Lock()
		defer y.mu.Unlock()
		now := h.Clock()
		if now.Sub(y.asked) < askEvery || !y.at.IsZero() && now.Sub(y.at) < h.Lease {
			return
		}
		if y.asked = now; h.Able(ctx, p, g, m.Aside.Needs) {
			y.at = now.Add(yieldAfter)
			h.Logger.Info("the reader leaves its post to a program that can do more",
				"projector", p.Name, "generation", g.Number(), "type", m.Raw.Type, "schema", m.Raw.Schema)
		}
		return
	}
}

// Left reports whether the readers left, or should have, less than this time ago.
func (y *Yield) Left(now time.Time, ago time.Duration) bool {
	y.mu.Lock()
	defer y.mu.Unlock()
	since := now.Sub(y.at)
	return !y.at.IsZero() && since >= 0 && since < ago
}
