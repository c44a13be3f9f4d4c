package model

import (
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// What a message needs that this program is unable to apply: all of it, also what this program has. The program finds
// by Lacks that it cannot apply the message, and a program with all of it finds that it can.
// Promise: G6.9
func TestNeeds(t *testing.T) {
	t.Parallel()
	type rated struct{}
	for name, c := range map[string]struct {
		eventType string
		schema    int
		foreign   bool
		handlers  []string // that it is parked for
		needs     string   // empty: this program can apply it
		cause     error
	}{
		"an event":                          {eventType: "rated", schema: 1},
		"without a schema version":          {eventType: "rated"},
		"parked for a handler":              {eventType: "rated", schema: 1, handlers: []string{"p/a"}},
		"for one that was renamed":          {eventType: "rated", schema: 1, handlers: []string{"p/was"}},
		"for one that was removed":          {eventType: "rated", schema: 1, handlers: []string{"p/removed"}},
		"an unknown type":                   {eventType: "posted", schema: 3, needs: "event posted 3", cause: ErrNoType},
		"an unknown type, without a schema": {eventType: "posted", needs: "event posted 1", cause: ErrNoType},
		"a newer schema version":            {eventType: "rated", schema: 2, needs: "event rated 2", cause: ErrNoType},
		"for an unknown handler":            {eventType: "rated", schema: 1, handlers: []string{"p/b"}, needs: "event rated 1\nhandler p/b of rated", cause: ErrNoHandler},
		"for a known one too":               {eventType: "rated", schema: 1, handlers: []string{"p/b", "p/a"}, needs: "event rated 1\nhandler p/a of rated\nhandler p/b of rated", cause: ErrNoHandler},
		"with a newer schema version":       {eventType: "rated", schema: 2, handlers: []string{"p/a"}, needs: "event rated 2\nhandler p/a of rated", cause: ErrNoType},
		"of other software":                 {eventType: "posted", foreign: true, needs: "decoder\nevent posted 1", cause: ErrNoType},
		"more than a store takes":           {eventType: "posted", handlers: []string{strings.Repeat("h", provider.MaxNeedBytes)}, cause: ErrNoType},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := &Projector{
				Name: "p", Types: eventstore.NewTypes(eventstore.Type[rated]("rated")),
				ByType: map[string][]provider.Handler{"rated": {{Name: "p/a", Was: []string{"p/was"}}}}, Rules: Rules{Removed: []string{"p/removed"}},
			}
			p.Complete()
			d := &Received{
				ID: "m", Msg: message.NewMessage("m", nil), Raw: eventstore.Raw{ID: "m", Type: c.eventType, Schema: c.schema, Stream: "s"},
				Key: "s", IsForeign: c.foreign,
			}
			var parked *provider.Parked
			attempts := 0
			if c.handlers != nil {
				attempts = 2
				parked = &provider.Parked{MessageID: "m", Type: c.eventType, Handlers: c.handlers, Attempts: attempts}
			}
			m := p.Accept(d, parked)
			switch {
			case c.cause == nil:
				require.Nil(t, m.Aside)
				require.NoError(t, p.Lacks(m.needs(c.handlers)))
			case c.needs == "":
				require.Equal(t, provider.ClassPermanent, provider.ClassOf(m.Aside.Cause), "it is stuck")
				require.Empty(t, m.Aside.Needs)
			default:
				require.Equal(t, c.cause, m.Aside.Cause)
				require.Equal(t, c.needs, m.Aside.Needs)
				require.Error(t, p.Lacks(c.needs))
				require.Equal(t, attempts, m.Aside.Attempts, "none is counted")
				able := Projector{Has: strings.Split(c.needs, "\n")}
				require.NoError(t, able.Lacks(c.needs))
			}
		})
	}
}
