package unit

import (
	"errors"
	"testing"

	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// What becomes of each message of a unit.
func TestFates(t *testing.T) {
	t.Parallel()
	type message struct {
		key                                                      string
		parked, fails, skipped, unread                           bool // of the message
		applied, changed, left, laneHeld, suspect, partlyWritten bool // found by the store
	}
	for name, c := range map[string]struct {
		messages []message
		fates    []Fate
	}{
		"two deliveries that are new":                       {[]message{{key: "a"}, {key: "b"}}, []Fate{Run, Run}},
		"a delivery that its handlers have applied":         {[]message{{key: "a", applied: true}}, []Fate{Applied}},
		"one that was applied, in a lane that is held":      {[]message{{key: "a", applied: true, laneHeld: true}}, []Fate{Applied}},
		"one that cannot be applied":                        {[]message{{key: "a", fails: true}}, []Fate{Failed}},
		"later ones of its lane wait, others do not":        {[]message{{key: "a", fails: true}, {key: "a"}, {key: "b"}}, []Fate{Failed, Behind, Run}},
		"a lane that is held":                               {[]message{{key: "a", laneHeld: true}}, []Fate{Behind}},
		"one that fails, in a lane that is held":            {[]message{{key: "a", laneHeld: true, fails: true}}, []Fate{Behind}},
		"a parked message runs although its lane is held":   {[]message{{key: "a", parked: true, laneHeld: true}}, []Fate{Run}},
		"a parked message that another program has changed": {[]message{{key: "a", parked: true, changed: true}}, []Fate{Changed}},
		"it does not stop the next one":                     {[]message{{key: "a", parked: true, changed: true}, {key: "a", parked: true}}, []Fate{Changed, Run}},
		"a parked message that fails again":                 {[]message{{key: "a", parked: true, fails: true}, {key: "a", parked: true}}, []Fate{Failed, Behind}},
		"one that an operator has skipped":                  {[]message{{key: "a", skipped: true}, {key: "a"}}, []Fate{Skipped, Run}},
		"one that is left to the reader":                    {[]message{{key: "a", left: true}, {key: "b"}}, []Fate{Left, Run}},
		"one that is left, and whose type no reader reads":  {[]message{{key: "a", left: true, unread: true}}, []Fate{Unread}},
		"one that may have crashed a process":               {[]message{{key: "a", suspect: true}, {key: "a"}}, []Fate{Suspect, Behind}},
		"one whose writes took effect in part":              {[]message{{key: "a", partlyWritten: true, laneHeld: true}, {key: "a"}}, []Fate{Partly, Behind}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := len(c.messages)
			found := provider.Found{
				Fresh: make([][]bool, n), Left: make([]bool, n), Held: make([]bool, n), Suspect: make([]bool, n), Partly: make([]bool, n), Live: make([]bool, n),
			}
			decided, fates := fates{found: found}, []Fate(nil)
			for i, w := range c.messages {
				m := &model.Message{Lane: provider.LaneOfKey(w.key), Handlers: []provider.Handler{{Name: "p/h"}}, Skipped: w.skipped}
				if w.parked {
					m.Parked = &provider.Parked{}
				}
				if w.fails || w.unread {
					m.Aside = &model.Aside{Cause: errors.New("no")}
				}
				if w.unread {
					m.Handlers = nil
				}
				found.Fresh[i], found.Left[i], found.Held[i] = []bool{!w.applied}, w.left, w.laneHeld
				found.Suspect[i], found.Partly[i], found.Live[i] = w.suspect, w.partlyWritten, w.parked && !w.changed
				fate := decided.of(i, m)
				if fates = append(fates, fate); fate.HasRow() {
					decided.stop(m.Lane)
				}
			}
			require.Equal(t, c.fates, fates)
		})
	}
}
