package redis

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/provider"
	goredis "github.com/redis/go-redis/v9"
)

// Limits of a script. It blocks all other clients of Redis while it runs.
const (
	scriptCommands  = 1000    // a script has at most so many commands, or those of one message
	scriptBytes     = 1 << 20 // and so many bytes
	messageCommands = 10_000  // of one message
	messageBytes    = 16 << 20
	commandArgs     = 7000 // Lua passes at most 8,000 arguments
)

// DoCombined implements provider.MarkerUnits. Each message is applied by a script that checks and sets
// its markers. A script has several messages, and a unit several scripts.
//   - A unit that needs no markers is one MULTI/EXEC.
//   - Usually run is called once, before anything is sent, with a Found in which all messages are
//     fresh. If a script finds that one is not, the markers are read, and run is called again.
//   - If the first command of a message fails, the message is not applied, and the error is that
//     of MULTI/EXEC in Do. If a later one fails, the error is permanent with CodePartly.
//   - A message that is larger than a script may be is permanent, with the code "too_large".
func (u *Units) DoCombined(ctx context.Context, unit provider.Unit, run func(context.Context, goredis.Pipeliner, provider.Found) (provider.Closing, error)) (commit func(context.Context) error, err error) {
	if !u.cfg.OwnMarkers || !hasMarkers(&unit) {
		return nil, u.exec(ctx, unit, run)
	}
	if s := unit.Switch; s != nil && (len(s.Reset) > 0 || s.Snapshot) {
		return nil, permanent("not_kept", errors.New("redis cannot empty tables: give the projector OnReset"))
	}
	m := &marked{Units: u, unit: unit, keys: u.keysOf(unit.Build()), run: run, from: -1}
	if unit.Advance != nil {
		m.from = unit.Advance.From
	}
	err = m.do(ctx)
	if err == nil && unit.Switch != nil {
		err = m.finishSwitch(ctx)
	}
	if err != nil || len(m.closing.Park) == 0 {
		return nil, err
	}
	return m.record, nil
}

// hasMarkers reports whether a unit uses markers or the checkpoint. Parked messages of a projector without
// markers do.
func hasMarkers(u *provider.Unit) bool {
	return u.Advance != nil || u.Reader != nil || u.Switch != nil || u.IsReplay() ||
		slices.ContainsFunc(u.Messages, func(m provider.Message) bool { return m.Mark })
}

// marked is a unit whose messages have markers.
type marked struct {
	*Units
	unit    provider.Unit
	keys    *keys
	run     func(context.Context, goredis.Pipeliner, provider.Found) (provider.Closing, error)
	from    int64 // the position of the checkpoint, which messages of Advance have moved
	found   provider.Found
	looked  bool    // found is what the store has
	places  []int64 // of parked messages, in the log of the checkpoint; 0: not there
	tx      *transaction
	parks   bool // a message that send has looked at is to be parked
	closing provider.Closing
}

// errChanged: messages are not as the unit has found them.
var errChanged = transient("changed", errors.New("markers or the checkpoint have changed"))

// runsAgain is how often run is called again after errChanged.
const runsAgain = 20

func (m *marked) do(ctx context.Context) (err error) {
	looks := m.unit.Once || m.unit.IsReplay() || m.unit.Reader != nil && m.unit.Advance == nil
	for try := 0; ; try++ {
		m.found, m.looked = m.unit.NewFound(true), looks || try > 0
		if m.looked {
			if err = m.look(ctx); err != nil {
				return err
			}
		}
		if err = m.once(ctx); !errors.Is(err, errChanged) || try == runsAgain {
			return err
		}
		pauses.Wait(ctx, time.Duration(try)*time.Millisecond, nil)
	}
}

// once runs the handlers and sends their commands.
func (m *marked) once(ctx context.Context) error {
	m.parks = false
	m.tx = &transaction{Pipeliner: m.client.Pipeline(), client: m.client, marked: m}
	defer m.tx.unwatch()
	m.found.Begin = m.tx.begin
	var err error
	m.closing, err = m.run(ctx, m.tx, m.found)
	if err != nil {
		return m.tx.ofRun(ctx, err)
	}
	if len(m.closing.Park) > 0 && !m.looked {
		return errChanged // it may be applied already
	}
	if err := m.tx.refused(); err != nil {
		return err
	}
	crash.Point("redis: before the scripts")
	defer crash.Point("redis: after the scripts")
	if len(m.unit.Messages) == 0 && m.unit.Advance == nil {
		return m.setup(ctx)
	}
	return m.send(ctx)
}

// record records the messages that the unit has parked, and moves the checkpoint.
func (m *marked) record(ctx context.Context) error {
	crash.Point("redis: before the record")
	defer crash.Point("redis: after the record")
	args := append(m.head(), len(m.closing.Park))
	for _, p := range m.closing.Park {
		msg := &m.unit.Messages[p.Message]
		sets := slices.Collect(m.sets(p.Message))
		args = append(args, member(msg.ID), m.place(p.Message), len(sets))
		for _, set := range sets {
			args = append(args, set)
		}
	}
	a, err := m.Units.run(ctx, recordScript, m.keys.list, addPlace(args, m.unit.Advance))
	if err != nil {
		return err
	}
	return m.result(nil, a)
}

// setup runs the commands of OnCreate and OnReset. With OnReset, the generation whose tables are emptied
// ends in the same script: it must be rebuilt then, whatever happens next.
func (m *marked) setup(ctx context.Context) error {
	cmds := m.tx.Cmds()
	_, err := m.checkSize(entry{last: len(cmds)})
	if err = cmp.Or(err, m.checkSlots(ctx, cmds)); err != nil {
		return err
	}
	_, err = m.client.TxPipelined(ctx, func(p goredis.Pipeliner) error {
		for _, cmd := range cmds {
			_ = p.Process(ctx, cmd)
		}
		if s := m.unit.Switch; s != nil && isReset(s) {
			for _, g := range s.Set {
				if g.State == provider.GenerationRetired {
					p.HSet(ctx, m.keysOf(g.Build).list[0], "mode", modeEmptied)
				}
			}
		}
		return nil
	})
	if err != nil && !errors.Is(err, goredis.Nil) {
		return ofExec(err, true)
	}
	return nil
}

// isReset reports whether a switch begins a rebuild in place.
func isReset(s *provider.Switch) bool {
	has := func(state provider.GenerationState) bool {
		return slices.ContainsFunc(s.Set, func(g provider.Generation) bool { return g.State == state })
	}
	return len(s.Rename)+len(s.Show) == 0 && s.Compare == nil && has(provider.GenerationRetired) && has(provider.GenerationLive)
}
