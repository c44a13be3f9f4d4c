package redis

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

// entry is a message in a script.
type entry struct {
	message int
	mark    bool // insert its markers
	moves   bool // move the checkpoint to it
	first   int  // its commands
	last    int
	watch   *watch // its keys are watched on this connection
}

// send sends the commands of all messages, in scripts of limited size.
func (m *marked) send(ctx context.Context) error {
	part := make([]entry, 0, len(m.unit.Messages))
	commands, bytes := 0, 0
	for _, e := range m.entries() {
		size, err := m.checkSize(e)
		if err != nil {
			return err
		}
		isFull := commands+e.last-e.first > scriptCommands || bytes+size > scriptBytes || len(part) > 0 && part[0].watch != nil
		if len(part) > 0 && isFull {
			if err := m.sendPart(ctx, part, false); err != nil {
				return err
			}
			part, commands, bytes = part[:0], 0, 0
		}
		part, commands, bytes = append(part, e), commands+e.last-e.first, bytes+size
	}
	ends := m.unit.Advance != nil && len(m.closing.Park) == 0
	if len(part) == 0 && !ends {
		return nil
	}
	return m.sendPart(ctx, part, ends)
}

// entries returns the messages whose handlers have run, and are not recorded yet.
func (m *marked) entries() []entry {
	all, rest := make([]entry, 0, len(m.unit.Messages)), m.tx.starts
	for i := range m.unit.Messages {
		e, begun := entry{message: i, watch: m.tx.watches[i], last: m.tx.Len()}, len(rest) > 0 && rest[0].message == i
		if begun {
			e.first, rest = rest[0].command, rest[1:]
		}
		if len(rest) > 0 {
			e.last = rest[0].command
		}
		isFresh := slices.Contains(m.found.Fresh[i], true)
		isLeft := m.found.Left != nil && m.found.Left[i]
		if !begun || !isFresh {
			m.parks = m.parks || !begun && !isLeft && (isFresh || len(m.unit.Messages[i].Handlers) == 0)
			continue
		}
		e.moves = m.unit.Advance != nil && !m.parks
		e.mark = !e.moves
		all = append(all, e)
	}
	return all
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
	now := time.Now().UnixMilli() //nolint:forbidigo // the age of markers of foreign messages is that of this process' clock
	return []any{m.kind(), modeText(mode), token.String(), m.from, now, bit(m.unit.Checkpointed), m.unit.Segment}
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

// sets yields the indices of the sets of a message: those of its handlers that are fresh.
func (m *marked) sets(message int) iter.Seq[int] {
	return func(yield func(int) bool) {
		msg := &m.unit.Messages[message]
		for i := range msg.Handlers {
			if m.found.Fresh[message][i] {
				for _, name := range msg.Handlers[i].Names() {
					if !yield(m.keys.set(name)) {
						return
					}
				}
			}
		}
		if len(msg.Handlers) == 0 || msg.Parked != nil && len(msg.Parked.Handlers) == 0 {
			yield(m.keys.set(noHandler))
		}
	}
}

// appendShape appends what unit.lua must know about a message, except for its words.
func (m *marked) appendShape(to []byte, e entry) []byte {
	p := m.unit.Messages[e.message].Parked
	for _, is := range []bool{e.mark, p != nil && p.Code == provider.CodePartly, e.moves} {
		to = strconv.AppendInt(to, int64(bit(is)), 10)
	}
	for set := range m.sets(e.message) {
		to = strconv.AppendInt(append(to, 's'), int64(set), 10)
	}
	for _, cmd := range m.tx.Cmds()[e.first:e.last] {
		to = strconv.AppendInt(append(to, ' '), int64(len(cmd.Args())), 10)
	}
	return to
}

// addPlace adds the place that the checkpoint moves to, or none.
func addPlace(args []any, a *provider.Advance) []any {
	if a == nil {
		return append(args, "", "", "")
	}
	return append(args, a.To.Position, a.To.ID, timeText(a.To.RecordedAt))
}

// sendPart runs a script for some messages. moves: it also moves the checkpoint to Advance.To.
func (m *marked) sendPart(ctx context.Context, part []entry, moves bool) error {
	size := 18 + 2*len(part)
	for _, e := range part {
		size += 4 * (e.last - e.first)
	}
	list := argLists.Get().(*[]any)
	args := append(append(slices.Grow(*list, size), m.head()...), len(part))
	var shape, last []byte // of a message, and of the one before
	run, count := 0, 0     // messages of the same shape: the index of their number in args, and the number
	for _, e := range part {
		if shape = m.appendShape(shape[:0], e); run == 0 || string(shape) != string(last) {
			args = append(args, string(shape), 0)
			run, count, last = len(args)-1, 0, append(last[:0], shape...)
		}
		count++
		args[run] = count
		args = append(args, member(m.unit.Messages[e.message].ID), m.place(e.message))
		for _, cmd := range m.tx.Cmds()[e.first:e.last] {
			args = append(args, cmd.Args()...)
		}
		if err := m.checkSlots(ctx, m.tx.Cmds()[e.first:e.last]); err != nil {
			return m.of(e.message, err)
		}
	}
	to := m.unit.Advance
	if !moves {
		to = nil
	}
	args = addPlace(args, to)
	var a answer
	var err error
	if len(part) == 1 && part[0].watch != nil {
		a, err = m.execWatched(ctx, part[0].watch, args)
	} else {
		a, err = m.Units.run(ctx, unitScript, m.keys.list, args)
	}
	if provider.ClassOf(err) != provider.ClassAmbiguous { // otherwise the client may still read args
		clear(args)
		*list = args[:0]
		argLists.Put(list)
	}
	if err != nil {
		return err
	}
	return m.result(part, a)
}

// argLists has lists of arguments for scripts.
var argLists = sync.Pool{New: func() any { return new([]any) }}

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}

// of adds the message to an error.
func (m *marked) of(message int, err error) error {
	return &provider.Error{Class: provider.ClassOf(err), Code: provider.CodeOf(err), Err: &provider.MessageError{Message: message, Err: err}}
}

// result returns the error of a script's reply.
func (m *marked) result(part []entry, a answer) error {
	word, at := a.text(0), int(a.number(1))
	switch word {
	case "applied":
		if m.unit.Advance != nil {
			m.from = a.number(2)
		}
		return nil
	case "failed", "partly":
		reply := a.text(3)
		command := "a command"
		if i := part[at].first + int(a.number(2)); i < len(m.tx.Cmds()) {
			command = m.tx.Cmds()[i].Name()
		}
		e := ofReply(reply, fmt.Errorf("%s: %s", command, reply))
		if word == "partly" {
			e = permanent(provider.CodePartly, e)
		}
		e.Err = &provider.MessageError{Message: part[at].message, Err: e.Err}
		return e
	}
	if err := ends[word]; err != nil {
		return err
	}
	return &provider.Error{Class: provider.ClassUnknown, Err: fmt.Errorf("%w: %q", errReply, word)}
}

var errMissing = transient("lost", errors.New("redis has lost the checkpoint: the reader of the log applies all events again"))

// ends are the errors for words of scripts.
var ends = map[string]*provider.Error{
	"ended":   transient(provider.CodeEnded, provider.ErrEnded),
	"fenced":  transient(provider.CodeFenced, provider.ErrFenced),
	"closing": transient(provider.CodeClosing, errors.New("the reader of the log applies the last events")),
	"changed": errChanged,
	"missing": errMissing,
}
