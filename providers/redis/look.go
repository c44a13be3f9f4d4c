package redis

import (
	"context"
	"slices"
	"strconv"
	"strings"

	"github.com/kinora-go/kinora/provider"
)

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
