package model

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// Which program a reader can leave its post to.
func TestAble(t *testing.T) {
	t.Parallel()
	const needs = "event rated 2\nhandler p/a of rated"
	newer := []string{"event rated 1", "event rated 2", "handler p/a of rated"}
	can := func(id, projector string, version int, has ...string) provider.ServiceReport {
		return provider.ServiceReport{ID: id, Can: []provider.Capability{
			{Projector: "other", Version: 1}, {Projector: projector, Version: version, Has: has},
		}}
	}
	for name, c := range map[string]struct {
		others []provider.ServiceReport
		err    error
		able   bool
	}{
		"no other program":                     {able: false},
		"one that has more":                    {others: []provider.ServiceReport{can("b", "p", 1, newer...)}, able: true},
		"the second one has more":              {others: []provider.ServiceReport{can("b", "p", 1, newer[0], newer[2]), can("c", "p", 1, newer...)}, able: true},
		"one that has removed the handler":     {others: []provider.ServiceReport{can("b", "p", 1, newer[0], newer[1], "handler p/a of *")}, able: true},
		"the runner itself":                    {others: []provider.ServiceReport{can("a", "p", 1, newer...)}},
		"of another projector":                 {others: []provider.ServiceReport{can("b", "q", 1, newer...)}},
		"of another version":                   {others: []provider.ServiceReport{can("b", "p", 2, newer...)}},
		"one that has a part of the need":      {others: []provider.ServiceReport{can("b", "p", 1, newer[0], newer[2])}},
		"one that lacks what this one has":     {others: []provider.ServiceReport{can("b", "p", 1, newer[1:]...)}},
		"a worker":                             {others: []provider.ServiceReport{{ID: "b", Kind: "worker", Kinds: newer}}},
		"the store does not know who is alive": {err: errors.New("no")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := &Host{Config: Config{Timeout: time.Minute}, ID: "a"}
			p := &Projector{Name: "p", Has: []string{"event rated 1", "handler p/a of rated"}}
			g := &generation.Row{Build: provider.Build{Projector: "p", Generation: 1}}
			g.Oldest, g.Newest = 1, 1
			require.False(t, h.Able(t.Context(), p, g, needs), "it does not know the services")
			h.Others = func(context.Context) ([]provider.ServiceReport, error) { return c.others, c.err }
			require.Equal(t, c.able, h.Able(t.Context(), p, g, needs))
		})
	}
}
