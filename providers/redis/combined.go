package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
	goredis "github.com/redis/go-redis/v9"
)

// Limits of a script. It blocks all other clients of Redis while it runs.
const (
	scriptCommands  = 512     // a script has at most so many commands, or those of one message
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
func (u *Units) DoCombined(ctx context.Context, unit provider.Unit, run func(context.Context, goredis.Pipeliner, provider.Found) (provider.Closing, error)) (provider.Finish, error) {
	if !u.cfg.OwnMarkers || !hasMarkers(&unit) {
		return provider.Finish{}, u.exec(ctx, unit, run)
	}
	if s := unit.Switch; s != nil && (len(s.Reset) > 0 || s.Snapshot) {
		return provider.Finish{}, permanent("not_kept", errors.New("redis cannot empty tables: give the projector OnReset"))
	}
	m := &marked{Units: u, unit: unit, keys: u.keysOf(unit.Build()), run: run, from: -1}
	if unit.Advance != nil {
		m.from = unit.Advance.From
	}
	err := m.do(ctx)
	if err == nil && unit.Switch != nil {
		return m.finishSwitch(ctx)
	}
	if err != nil || len(m.closing.Park) == 0 {
		return provider.Finish{}, err
	}
	return provider.Finish{Commit: m.record}, nil
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
	sent    int  // number of messages that were looked at by send
	parks   bool // one of them is to be parked
	closing provider.Closing
	failed  error // of a send that a handler caused
}

// errChanged: messages are not as the unit has found them.
var errChanged = &provider.Error{Class: provider.ClassTransient, Code: "changed", Err: errors.New("markers or the checkpoint have changed")}

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
		pause(ctx, time.Duration(try)*time.Millisecond)
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// once runs the handlers and sends their commands.
func (m *marked) once(ctx context.Context) error {
	m.sent, m.parks, m.failed = 0, false, nil
	m.tx = &transaction{Pipeliner: m.client.Pipeline(), client: m.client, marked: m}
	defer m.tx.unwatch()
	m.found.Begin = m.tx.begin
	var err error
	m.closing, err = m.run(ctx, m.tx, m.found)
	if m.failed != nil {
		return m.failed
	}
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
	return m.send(ctx, len(m.unit.Messages), true)
}

// entry is a message in a script.
type entry struct {
	message int
	mark    bool // insert its markers
	moves   bool // move the checkpoint to it
	first   int  // its commands
	last    int
	watch   *watch // its keys are watched on this connection
}

// send sends the commands of the messages up to a number. last: there are no more.
func (m *marked) send(ctx context.Context, upTo int, last bool) error {
	var part []entry
	commands, bytes := 0, 0
	for ; m.sent < upTo; m.sent++ {
		begun, isFresh := m.tx.began(m.sent), slices.Contains(m.found.Fresh[m.sent], true)
		isLeft := m.found.Left != nil && m.found.Left[m.sent]
		if !begun || !isFresh {
			m.parks = m.parks || !begun && !isLeft && (isFresh || len(m.unit.Messages[m.sent].Handlers) == 0)
			continue
		}
		e := entry{message: m.sent, watch: m.tx.watches[m.sent]}
		e.first, e.last = m.tx.commandsOf(m.sent)
		e.moves = m.unit.Advance != nil && !m.parks
		e.mark = !e.moves
		size, err := m.checkSize(e)
		if err != nil {
			return err
		}
		if full := commands+e.last-e.first > scriptCommands || bytes+size > scriptBytes; len(part) > 0 && (full || e.watch != nil) {
			if err := m.sendPart(ctx, part, false); err != nil {
				return err
			}
			part, commands, bytes = nil, 0, 0
		}
		part, commands, bytes = append(part, e), commands+e.last-e.first, bytes+size
		if e.watch != nil {
			if err := m.sendPart(ctx, part, false); err != nil {
				return err
			}
			part, commands, bytes = nil, 0, 0
		}
	}
	if last && (len(part) > 0 || m.unit.Advance != nil && len(m.closing.Park) == 0) || len(part) > 0 {
		return m.sendPart(ctx, part, last && len(m.closing.Park) == 0)
	}
	return nil
}

// checkSize returns the bytes of a message's commands.
func (m *marked) checkSize(e entry) (bytes int, err error) {
	for _, cmd := range m.tx.Cmds()[e.first:e.last] {
		if len(cmd.Args()) > commandArgs {
			return 0, m.tooLarge(e, fmt.Sprintf("%s has %d arguments, the limit is %d", cmd.Name(), len(cmd.Args()), commandArgs))
		}
		for _, a := range cmd.Args() {
			switch v := a.(type) {
			case string:
				bytes += len(v)
			case []byte:
				bytes += len(v)
			default:
				bytes += 16
			}
		}
	}
	if n := e.last - e.first; n > messageCommands || bytes > messageBytes {
		return 0, m.tooLarge(e, fmt.Sprintf("%d commands with %d bytes, the limits are %d and %d", n, bytes, messageCommands, messageBytes))
	}
	return bytes, nil
}

func (m *marked) tooLarge(e entry, what string) error {
	return permanent("too_large", &provider.MessageError{Message: e.message, Err: fmt.Errorf("the commands of a message are too large for a script: %s", what)})
}

// kind is the kind of unit for a script.
func (m *marked) kind() string {
	switch {
	case m.unit.Restore:
		return "restore"
	case m.unit.IsReplay():
		return "replay"
	case m.unit.Advance != nil:
		return "advance"
	case m.unit.Reader != nil:
		return "reader"
	}
	return "delivery"
}

// head returns the first arguments of a script.
func (m *marked) head() []any {
	mode, token := m.identity()
	return []any{m.kind(), modeText(mode), token.String(), m.from, time.Now().UnixMilli()} //nolint:forbidigo // the age of markers of foreign messages is that of this process' clock
}

// identity returns the mode and the token that the checkpoint must have, or zero.
func (m *marked) identity() (provider.Mode, claim.Token) {
	switch r, a := m.unit.Reader, m.unit.Advance; {
	case a != nil:
		return a.Mode, a.Token
	case r != nil:
		return r.Mode, r.Token
	}
	return 0, claim.Token{}
}

// addSets adds the indices of the sets of the handlers of a message that are fresh.
func (m *marked) addSets(args []any, message int) []any {
	msg := &m.unit.Messages[message]
	count := len(args)
	args = append(args, 0)
	for i := range msg.Handlers {
		if m.found.Fresh[message][i] {
			for _, name := range msg.Handlers[i].Names() {
				args = append(args, m.keys.set(name))
			}
		}
	}
	args[count] = len(args) - count - 1
	return args
}

// addPlace adds the place that the checkpoint moves to, or none.
func addPlace(args []any, to *provider.LogPlace) []any {
	if to == nil {
		return append(args, "", "", "")
	}
	return append(args, to.Position, to.ID, timeText(to.RecordedAt))
}

// sendPart runs a script for some messages. isLast: it also moves the checkpoint to Advance.To.
func (m *marked) sendPart(ctx context.Context, part []entry, isLast bool) error {
	args := append(m.head(), len(part))
	for _, e := range part {
		msg := &m.unit.Messages[e.message]
		args = m.addSets(append(args, member(msg.ID), m.place(e.message)), e.message)
		args = append(args, bit(e.mark))
		if e.moves {
			args = addPlace(args, &provider.LogPlace{Position: msg.Position, ID: msg.ID})
		} else {
			args = addPlace(args, nil)
		}
		args = append(args, e.last-e.first)
		for _, cmd := range m.tx.Cmds()[e.first:e.last] {
			args = append(append(args, len(cmd.Args())), cmd.Args()...)
		}
		if err := m.checkSlots(ctx, m.tx.Cmds()[e.first:e.last]); err != nil {
			return m.of(e.message, err)
		}
	}
	var to *provider.LogPlace
	if isLast && m.unit.Advance != nil {
		to = &m.unit.Advance.To
	}
	args = addPlace(args, to)
	var a answer
	var err error
	if len(part) == 1 && part[0].watch != nil {
		a, err = m.execWatched(ctx, part[0].watch, args)
	} else {
		a, err = m.Units.run(ctx, unitScript, m.client, m.keys.list, args)
	}
	if err != nil {
		return err
	}
	return m.result(part, a)
}

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}

// of adds the message to an error.
func (m *marked) of(message int, err error) error {
	e := &provider.Error{Class: provider.ClassOf(err), Code: provider.CodeOf(err), Err: err}
	e.Err = &provider.MessageError{Message: message, Err: err}
	return e
}

// result returns the error of a script's reply.
func (m *marked) result(part []entry, a answer) error {
	word, at := a.text(0), int(a.number(1))
	message := -1
	if at >= 0 && at < len(part) {
		message = part[at].message
	}
	switch word {
	case "applied":
		if m.unit.Advance != nil {
			m.from = a.number(2)
		}
		return nil
	case "ended":
		return &provider.Error{Class: provider.ClassTransient, Code: provider.CodeEnded, Err: provider.ErrEnded}
	case "fenced":
		return &provider.Error{Class: provider.ClassTransient, Code: provider.CodeFenced, Err: provider.ErrFenced}
	case "closing":
		return errClosing
	case "behind":
		return &provider.Error{Class: provider.ClassTransient, Code: "behind", Err: errors.New("earlier events of the log are not applied yet")}
	case "changed":
		return errChanged
	case "missing":
		return &provider.Error{Class: provider.ClassTransient, Code: "lost", Err: errors.New("redis has lost the checkpoint: the reader of the log applies all events again")}
	case "failed", "partly":
		reply := a.text(3)
		command := "a command"
		if i := part[at].first + int(a.number(2)); i < len(m.tx.Cmds()) {
			command = m.tx.Cmds()[i].Name()
		}
		e := ofReply(reply, fmt.Errorf("%s: %s", command, reply))
		if word == "partly" {
			e = &provider.Error{Class: provider.ClassPermanent, Code: provider.CodePartly, Err: e}
		}
		e.Err = &provider.MessageError{Message: message, Err: e.Err}
		return e
	}
	return &provider.Error{Class: provider.ClassUnknown, Err: fmt.Errorf("%w: %q", errReply, word)}
}

var errClosing = &provider.Error{Class: provider.ClassTransient, Code: provider.CodeClosing, Err: errors.New("the reader of the log applies the last events")}

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
	marked := map[provider.Marker]bool{}
	for i := range u.Messages {
		for j, h := range u.Messages[i].Handlers {
			for _, name := range h.Names() {
				marked[provider.Marker{Handler: name, MessageID: u.Messages[i].ID}] = is.marked[i][j]
			}
		}
	}
	m.found.SetFresh(&u, func(k provider.Marker) bool { return !marked[k] })
	if err := m.found.SetProgress(&u, is.checkpoint); err != nil {
		return err
	}
	m.places = make([]int64, len(u.Messages))
	for i := range u.Messages {
		if p := u.Messages[i].Parked; p != nil {
			m.places[i] = placeIn(p, is.checkpoint.Lineage)
		}
		m.setRecorded(i, &is)
	}
	return nil
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
	checkpoint provider.Checkpoint // its Mode, Position, Token and Lineage
	records    []string            // by message
	marked     [][]bool            // by message and handler
}

func (m *marked) lookUp(ctx context.Context) (is looked, err error) {
	_, token := m.identity()
	args := []any{token.String(), len(m.unit.Messages)}
	for i := range m.unit.Messages {
		args = m.addNames(append(args, member(m.unit.Messages[i].ID)), &m.unit.Messages[i])
	}
	a, err := m.Units.run(ctx, lookScript, m.client, m.keys.list, args)
	if err != nil {
		return is, err
	}
	is.checkpoint = provider.Checkpoint{Mode: modeOf(a.text(0)), Place: provider.LogPlace{Position: a.number(1)}, Lineage: a.text(3)}
	if a.number(2) == 1 {
		is.checkpoint.Token = token
	}
	for i := range m.unit.Messages {
		flags := a.text(5 + 2*i)
		has := make([]bool, len(m.unit.Messages[i].Handlers))
		for j := range has {
			has[j] = j < len(flags) && flags[j] == '1'
		}
		is.records, is.marked = append(is.records, a.text(4+2*i)), append(is.marked, has)
	}
	return is, nil
}

// addNames adds the names of the handlers of a message, by their sets.
func (m *marked) addNames(args []any, msg *provider.Message) []any {
	args = append(args, len(msg.Handlers))
	for i := range msg.Handlers {
		names := msg.Handlers[i].Names()
		args = append(args, len(names))
		for _, name := range names {
			args = append(args, m.keys.set(name))
		}
	}
	return args
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
	covered := m.place(i) > 0 && m.place(i) <= is.checkpoint.Place.Position
	switch kind := m.kind(); {
	case kind == "replay" && record == "":
		set(func(j int) bool { return !is.marked[i][j] && !covered })
	case kind == "replay": // also of one that was partly applied: a person has decided
		set(func(int) bool { return true })
	case strings.HasPrefix(record, "partly"):
		if m.found.Partly == nil {
			m.found.Partly = make([]bool, len(m.unit.Messages))
		}
		m.found.Partly[i] = true
		set(func(int) bool { return true })
	case kind == "restore":
		set(func(int) bool { return record != "" })
	}
}

// record records the messages that the unit has parked, and moves the checkpoint.
func (m *marked) record(ctx context.Context) error {
	crash.Point("redis: before the record")
	defer crash.Point("redis: after the record")
	args := append(m.head(), len(m.closing.Park))
	for _, p := range m.closing.Park {
		msg := &m.unit.Messages[p.Message]
		args = m.addSets(append(args, member(msg.ID), m.place(p.Message), bit(len(msg.Handlers) == 0)), p.Message)
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

const modeEmptied = "emptied"

var modeTexts = [...]string{"", "catch_up", "closing", "live", "ended"}

func modeText(m provider.Mode) string { return modeTexts[m] }

// modeOf returns the mode of a checkpoint; zero if there is none, or the read model was emptied.
func modeOf(text string) provider.Mode { return provider.Mode(max(slices.Index(modeTexts[:], text), 0)) }

func timeText(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return strconv.FormatInt(t.UnixMicro(), 10)
}

func timeOf(text string) (t time.Time) {
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		t = time.UnixMicro(n).UTC()
	}
	return t
}
