package redis

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
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

// DoCombined implements provider.MarkerUnits. Scripts of several messages check and set their markers and apply them.
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

// hasMarkers reports whether a unit uses markers or the checkpoint. Parked messages always do.
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

// do calls run again after errChanged, up to 20 times.
func (m *marked) do(ctx context.Context) (err error) {
	looks := m.unit.Once || m.unit.IsReplay() || m.unit.Reader != nil && m.unit.Advance == nil
	for try := 0; ; try++ {
		m.found, m.looked = m.unit.NewFound(true), looks || try > 0
		if m.looked {
			if err = m.look(ctx); err != nil {
				return err
			}
		}
		if err = m.once(ctx); !errors.Is(err, errChanged) || try == 20 {
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
		args = append(args, member(msg.ID), m.place(p.Message), bit(len(msg.Handlers) > 0), len(sets))
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

// look reads the checkpoint and the markers, and sets found.
func (m *marked) look(ctx context.Context) error {
	is, err := m.lookUp(ctx)
	if err != nil {
		return err
	}
	u := m.unit
	if u.Advance != nil { // the messages before have moved the checkpoint
		advance := *u.Advance
		advance.From = m.from
		u.Advance = &advance
	}

	isAhead := func(m provider.Message) bool { return m.Mark && m.Position > 0 }
	if m.kind() == "delivery" && is.checkpoint.Mode == 0 && slices.ContainsFunc(u.Messages, isAhead) {
		return errMissing
	}
	m.found.SetFresh(&u, func(k provider.Marker) bool { return !is.marked[k] })
	if err := m.found.SetProgress(&u, is.checkpoint); err != nil {
		return err
	}
	m.places = make([]int64, len(u.Messages))
	for i := range u.Messages {
		if p := u.Messages[i].Parked; p != nil {
			m.places[i] = placeIn(p, is.checkpoint.Lineage)
		}
		m.setRecorded(i, &is)
		if is.records[i] == "" {
			continue
		}
		if m.found.Recorded == nil {
			m.found.Recorded = make([]bool, len(u.Messages))
		}
		m.found.Recorded[i] = true
	}
	if u.IsReplay() {
		m.setLive(&is)
	}
	return nil
}

// setLive sets Live of parked messages: they wait while the read model lacks events before them.
func (m *marked) setLive(is *looked) {
	all := !is.waits && (is.checkpoint.Mode != 0 || !m.unit.Checkpointed)
	waits := map[provider.Lane]bool{}
	m.found.Live = make([]bool, len(m.unit.Messages))
	for i := range m.unit.Messages {
		lane := m.unit.Messages[i].Lane
		behind := is.checkpoint.Mode == provider.ModeCatchUp && m.place(i) > is.checkpoint.Place.Position
		waits[lane] = waits[lane] || behind
		m.found.Live[i] = all && !waits[lane]
	}
}

// place returns the position of a message in the log of the checkpoint, or 0.
func (m *marked) place(i int) int64 {
	if m.unit.Messages[i].Parked != nil {
		return m.places[i]
	}
	return m.unit.Messages[i].Position
}

// placeIn returns the position of a parked message in a log, or 0.
func placeIn(p *provider.Parked, lineage string) int64 {
	of, _, _ := strings.Cut(p.Headers[provider.HeaderLog], "/")
	position, err := strconv.ParseInt(p.Headers[provider.HeaderPosition], 10, 64)
	if err != nil || position < 0 || of != lineage || lineage == "" {
		return 0
	}
	return position
}

// looked is what look.lua has found.
type looked struct {
	checkpoint provider.Checkpoint      // its Mode, Position, Token and Lineage
	waits      bool                     // parked messages must wait
	records    []string                 // by message
	marked     map[provider.Marker]bool // a handler has the markers of all its names
}

func (m *marked) lookUp(ctx context.Context) (is looked, err error) {
	_, token := m.identity()
	args := []any{token.String(), m.unit.Segment, len(m.unit.Messages)}
	for i := range m.unit.Messages {
		msg := &m.unit.Messages[i]
		args = append(args, member(msg.ID), len(msg.Handlers))
		for j := range msg.Handlers {
			names := msg.Handlers[j].Names()
			args = append(args, len(names))
			for _, name := range names {
				args = append(args, m.keys.set(name))
			}
		}
	}
	a, err := m.Units.run(ctx, lookScript, m.keys.list, args)
	if err != nil {
		return is, err
	}
	is.checkpoint = provider.Checkpoint{Mode: modeOf(a.text(0)), Place: provider.LogPlace{Position: a.number(1)}, Lineage: a.text(4)}
	is.waits, is.marked = a.number(3) == 1, map[provider.Marker]bool{}
	if a.number(2) == 1 {
		is.checkpoint.Token = token
	}
	for i := range m.unit.Messages {
		msg, flags := &m.unit.Messages[i], a.text(6+2*i)
		for j := range msg.Handlers {
			for _, name := range msg.Handlers[j].Names() {
				is.marked[provider.Marker{Handler: name, MessageID: msg.ID}] = j < len(flags) && flags[j] == '1'
			}
		}
		is.records = append(is.records, a.text(5+2*i))
	}
	return is, nil
}

// setRecorded sets found for a message by its record as a parked one. An event that the checkpoint has
// passed is applied, unless it is recorded.
func (m *marked) setRecorded(i int, is *looked) {
	fresh, record := m.found.Fresh[i], is.records[i]
	set := func(to func(j int) bool) {
		for j := range fresh {
			fresh[j] = to(j)
		}
	}
	isPartly := strings.HasPrefix(record, "partly")
	covered := m.place(i) > 0 && m.place(i) <= is.checkpoint.Place.Position
	switch kind := m.kind(); {
	case kind == "replay" && record == "":
		msg := &m.unit.Messages[i]
		set(func(j int) bool {
			return !covered && !is.marked[provider.Marker{Handler: msg.Handlers[j].Name, MessageID: msg.ID}]
		})
	case kind == "replay" && (!isPartly || m.unit.Messages[i].Parked.Code == provider.CodePartly): // a person has decided
		set(func(int) bool { return true })
	case isPartly:
		if m.found.Partly == nil {
			m.found.Partly = make([]bool, len(m.unit.Messages))
		}
		m.found.Partly[i] = true
		set(func(int) bool { return true })
	case kind == "restore":
		set(func(int) bool { return record != "" })
	}
}
