package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	var part []entry
	commands, bytes := 0, 0
	for i := range m.unit.Messages {
		begun, isFresh := m.tx.began(i), slices.Contains(m.found.Fresh[i], true)
		isLeft := m.found.Left != nil && m.found.Left[i]
		if !begun || !isFresh {
			m.parks = m.parks || !begun && !isLeft && (isFresh || len(m.unit.Messages[i].Handlers) == 0)
			continue
		}
		e := entry{message: i, watch: m.tx.watches[i]}
		e.first, e.last = m.tx.commandsOf(i)
		e.moves = m.unit.Advance != nil && !m.parks
		e.mark = !e.moves
		size, err := m.checkSize(e)
		if err != nil {
			return err
		}
		isFull := commands+e.last-e.first > scriptCommands || bytes+size > scriptBytes || len(part) > 0 && part[0].watch != nil
		if len(part) > 0 && isFull {
			if err := m.sendPart(ctx, part, false); err != nil {
				return err
			}
			part, commands, bytes = nil, 0, 0
		}
		part, commands, bytes = append(part, e), commands+e.last-e.first, bytes+size
	}
	ends := m.unit.Advance != nil && len(m.closing.Park) == 0
	if len(part) == 0 && !ends {
		return nil
	}
	return m.sendPart(ctx, part, ends)
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
	return []any{m.kind(), modeText(mode), token.String(), m.from, now, bit(m.unit.Checkpointed)}
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

// addSets adds the indices of the sets of a message: those of its handlers that are fresh.
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
	if len(msg.Handlers) == 0 || msg.Parked != nil && len(msg.Parked.Handlers) == 0 {
		args = append(args, m.keys.set(noHandler))
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

// sendPart runs a script for some messages. moves: it also moves the checkpoint to Advance.To.
func (m *marked) sendPart(ctx context.Context, part []entry, moves bool) error {
	size := 16 + 10*len(part)
	for _, e := range part {
		size += 6 * (e.last - e.first)
	}
	args := append(append(make([]any, 0, size), m.head()...), len(part))
	for _, e := range part {
		msg := &m.unit.Messages[e.message]
		args = m.addSets(append(args, member(msg.ID), m.place(e.message)), e.message)
		isPartly := msg.Parked != nil && msg.Parked.Code == provider.CodePartly
		args = append(args, bit(e.mark), bit(isPartly), bit(e.moves), e.last-e.first)
		for _, cmd := range m.tx.Cmds()[e.first:e.last] {
			args = append(append(args, len(cmd.Args())), cmd.Args()...)
		}
		if err := m.checkSlots(ctx, m.tx.Cmds()[e.first:e.last]); err != nil {
			return m.of(e.message, err)
		}
	}
	var to *provider.LogPlace
	if moves {
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
	case "changed":
		return errChanged
	case "missing":
		return errMissing
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

var errMissing = &provider.Error{Class: provider.ClassTransient, Code: "lost", Err: errors.New("redis has lost the checkpoint: the reader of the log applies all events again")}

var errClosing = &provider.Error{Class: provider.ClassTransient, Code: provider.CodeClosing, Err: errors.New("the reader of the log applies the last events")}
