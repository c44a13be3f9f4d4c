package redis

import (
	"context"
	"errors"
	"slices"

	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
	goredis "github.com/redis/go-redis/v9"
)

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
	var to *provider.LogPlace
	if m.unit.Advance != nil {
		to = &m.unit.Advance.To
	}
	a, err := m.Units.run(ctx, recordScript, m.client, m.keys.list, addPlace(args, to))
	if err != nil {
		return err
	}
	return m.result(nil, a)
}

// setup runs the commands of OnCreate and OnReset. With OnReset, the generation whose tables are emptied
// ends in the same script: it must be rebuilt then, whatever happens next.
func (m *marked) setup(ctx context.Context) error {
	cmds := m.tx.Cmds()
	if err := m.checkSlots(ctx, cmds); err != nil {
		return err
	}
	_, err := m.checkSize(entry{last: len(cmds)})
	if err != nil {
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
