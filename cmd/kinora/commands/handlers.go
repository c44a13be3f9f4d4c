package commands

import (
	"context"

	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// Handlers are those of a projector, in the binary of a service. Create them with HandlersOf.
type Handlers interface {
	Name() string // of the projector
	DryRun(ctx context.Context, f projector.ParkedFilter) (provider.DryRunReport, error)
	Verify(ctx context.Context, v projector.Verification) (provider.VerifyReport, error)
	ApplyParked(ctx context.Context) error
}

// HandlersOf returns the handlers of p, which work on db. A nil cfg means the default.
func HandlersOf[Tx any](p *projector.Projector[Tx], db provider.Units[Tx], cfg *projector.RunnerConfig) Handlers {
	return handlersOf[Tx]{p, db, cfg}
}

type handlersOf[Tx any] struct {
	p   *projector.Projector[Tx]
	db  provider.Units[Tx]
	cfg *projector.RunnerConfig
}

func (h handlersOf[Tx]) Name() string { return h.p.Name() }

func (h handlersOf[Tx]) DryRun(ctx context.Context, f projector.ParkedFilter) (provider.DryRunReport, error) {
	d, err := h.p.DryRun(ctx, h.db, f, h.cfg)
	if err != nil {
		return provider.DryRunReport{}, err
	}
	return d.Report(), nil
}

func (h handlersOf[Tx]) Verify(ctx context.Context, v projector.Verification) (provider.VerifyReport, error) {
	done, err := h.p.Verify(ctx, h.db, v, h.cfg)
	if err != nil {
		return provider.VerifyReport{}, err
	}
	return done.Report(), nil
}

func (h handlersOf[Tx]) ApplyParked(ctx context.Context) error {
	return h.p.ApplyParked(ctx, h.db, h.cfg)
}

// handlers returns the handlers of a projector, or nil.
func (s *Session) handlers(projector string) Handlers {
	for _, h := range s.Handlers {
		if h.Name() == projector {
			return h
		}
	}
	return nil
}
