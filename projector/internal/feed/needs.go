package feed

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// needs is what parked messages need, as a runner has read it last.
type needs struct {
	read time.Time
	past map[provider.Build]string // where the next list begins, if the last one was full
	met  []provider.Need           // those that this program has
	lack error                     // why it does not have another one
	said map[string]time.Time      // when it was last seen whether another program has a need
}

// Intervals of reading the needs, and of logging one that no program meets.
const (
	needsEvery = time.Second
	lackEvery  = time.Minute
)

// of returns the needs of builds that their crews meet. It reads them at most once a second.
func (n *needs) of(ctx context.Context, h *model.Host, crews []*crew, builds []provider.Build) ([]provider.Need, error) {
	now := h.Clock()
	if !n.read.IsZero() && now.Sub(n.read) < needsEvery {
		return n.met, nil
	}
	var after []provider.Need
	for _, b := range builds {
		after = append(after, provider.Need{Build: b, Needs: n.past[b]})
	}
	all, err := h.Store.Needs(ctx, after)
	if err != nil {
		return nil, err
	}
	n.read, n.past, n.met, n.lack = now, map[provider.Build]string{}, nil, nil
	listed := map[provider.Build]int{}
	for _, one := range all {
		if listed[one.Build]++; listed[one.Build] == provider.MaxNeeds {
			n.past[one.Build] = one.Needs
		}
		i := slices.IndexFunc(crews, func(c *crew) bool { return c.current.Load().Build == one.Build })
		if i < 0 { // it feeds another generation by now
			continue
		}
		if lack := crews[i].feeder.Projector.Lacks(one.Needs); lack != nil {
			n.lack = lack
			n.say(ctx, h, crews[i], one)
			continue
		}
		n.met = append(n.met, one)
		crews[i].wanted.Store(now.UnixNano())
		crews[i].assigned.Send()
	}
	return n.met, nil
}

// say logs a need that no program that is alive meets.
func (n *needs) say(ctx context.Context, h *model.Host, c *crew, one provider.Need) {
	now, key := h.Clock(), one.String()+"\n"+one.Needs
	if now.Sub(n.said[key]) < lackEvery {
		return
	}
	if n.said == nil || len(n.said) >= provider.MaxNeeds {
		n.said = map[string]time.Time{}
	}
	if n.said[key] = now; h.Meets(ctx, c.feeder.Projector, c.current.Load(), one.Needs) {
		return
	}
	h.Logger.Log(ctx, slog.LevelWarn, "messages wait for a program that meets their needs", "projector", one.Projector,
		"generation", one.Number(), "needs", strings.Split(one.Needs, "\n"), "since", one.Since)
}
