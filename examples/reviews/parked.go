package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// operatorFlags are the flags of the operator's commands. They require an existing database and
// work whether a service runs on it or not.
type operatorFlags struct {
	DB database `required:"" env:"REVIEWS_DB" placeholder:"sqlite:PATH" help:"The database: sqlite:PATH or postgres://…."`

	projectionFlags `embed:""`
}

func (f operatorFlags) with(ctx context.Context, do func(serviceStore) error) (err error) {
	db, err := f.of(f.DB).open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	return do(db)
}

// decisionFlags name the person who decides about parked messages or tasks, and the reason. Both are
// stored with them.
type decisionFlags struct {
	By     string `default:"${user}" help:"The person who decides. Stored with the decision."`
	Reason string `help:"The reason. Stored with the decision."`
}

func (f decisionFlags) decision() projector.Decision {
	return projector.Decision{By: f.By, Reason: f.Reason}
}

var errNoReason = errors.New("--reason is missing: give a reason, which is stored with the decision")

// parkedCmd lists parked messages.
type parkedCmd struct {
	operatorFlags `embed:""`
	Key           string `help:"Only messages of this ordering key: a review's stream, review-PRODUCT-AUTHOR."`
	Class         string `enum:",permanent,unknown,transient,held,unable" default:"" placeholder:"CLASS" help:"Only messages of this class: permanent, unknown, transient, held or unable."`
	State         string `enum:"parked,waiting,stuck,replayed,skipped" default:"parked" help:"Only messages in this state: waiting (retried automatically), stuck (an operator must act), parked (waiting or stuck), replayed or skipped."`
	Limit         int    `default:"100" help:"Maximum number of messages."`
	After         int64  `placeholder:"N" help:"Only messages with a higher number: the next page."`
	JSON          bool   `help:"Print JSON, with payloads and headers."`
}

// Validate is called by kong.
func (c *parkedCmd) Validate() error {
	if c.Limit < 1 {
		return errors.New("--limit must be at least 1")
	}
	return nil
}

// Run prints the list.
func (c *parkedCmd) Run(ctx context.Context) error {
	return c.with(ctx, func(db serviceStore) error {
		f := projector.ParkedFilter{Key: c.Key, Class: classNamed(c.Class), After: c.After, Limit: c.Limit}
		if c.State != "parked" {
			f.States = []projector.ParkedState{provider.ParseParkedState(c.State)}
		}
		list, err := db.Parked(ctx, f)
		if err != nil {
			return err
		}
		return show(c.JSON, parkedRows(list), parkedTable(list, c.State))
	})
}

// classNamed returns the class of a name. It returns nil, which selects every class, for no name.
func classNamed(name string) *projector.Class {
	if name == "" {
		return nil
	}
	class := provider.ParseClass(name)
	return &class
}

// parkedRow is a parked message as JSON. Payload need not be JSON.
type parkedRow struct {
	Seq        int64             `json:"seq"`
	At         time.Time         `json:"at"`
	Handler    string            `json:"handler"`
	Key        string            `json:"key"`
	MessageID  string            `json:"message_id"`
	Topic      string            `json:"topic"`
	Type       string            `json:"type"`
	Class      string            `json:"class"`
	Code       string            `json:"code"`
	Attempts   int               `json:"attempts"`
	Version    string            `json:"version"`
	Headers    map[string]string `json:"headers"`
	Payload    string            `json:"payload"`
	State      string            `json:"state"`
	Generation int               `json:"generation"`
	DueAt      time.Time         `json:"due_at,omitzero"`
	ResolvedAt time.Time         `json:"resolved_at,omitzero"`
	By         string            `json:"by,omitempty"`
	Reason     string            `json:"reason,omitempty"`
}

func parkedRows(list []projector.Parked) []parkedRow {
	rows := make([]parkedRow, 0, len(list))
	for _, p := range list {
		rows = append(rows, parkedRow{
			p.Seq, p.At.UTC(), handlerOf(p), p.Key, p.MessageID, p.Topic, p.Type, p.Class.String(), p.Code, p.Attempts, p.Version,
			p.Headers, string(p.Payload), p.State.String(), p.Generation, p.DueAt.UTC(), p.ResolvedAt.UTC(), p.By, p.Reason,
		})
	}
	return rows
}

// handlerOf returns the handler, or the projector if the message did not reach a handler.
func handlerOf(p projector.Parked) string {
	if p.Handler == "" {
		return p.Projector
	}
	return p.Handler
}

func parkedTable(list []projector.Parked, state string) []string {
	head := "seq\tparked (UTC)\thandler\tkey\tmessage\tclass\tcode\tattempts\tversion\tstate\tgeneration"
	resolved := state == "replayed" || state == "skipped"
	if resolved {
		head += "\t" + state + " (UTC)\tby\treason"
	}
	table := []string{head}
	for _, p := range list {
		row := fmt.Sprintf("%d\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%d", p.Seq, p.At.UTC().Format(time.DateTime), printable(handlerOf(p)),
			printable(p.Key), printable(p.MessageID), p.Class, printable(p.Code), p.Attempts, printable(p.Version), p.State, p.Generation)
		if resolved {
			row += fmt.Sprintf("\t%s\t%s\t%s", p.ResolvedAt.UTC().Format(time.DateTime), printable(p.By), printable(p.Reason))
		}
		table = append(table, row)
	}
	return table
}

// skipCmd skips parked messages for good.
type skipCmd struct {
	operatorFlags `embed:""`
	decisionFlags `embed:""`
	Seq           []int64 `required:"" placeholder:"N" help:"The numbers of the messages in the list."`
}

// Validate is called by kong.
func (c *skipCmd) Validate() error {
	if c.Reason == "" {
		return errNoReason
	}
	return nil
}

// Run skips the messages. A running service then applies the messages behind them.
func (c *skipCmd) Run(ctx context.Context) error {
	if len(c.Seq) == 0 {
		return errNothingSelected // no number would select all messages
	}
	return c.with(ctx, func(db serviceStore) error {
		n, err := projector.Skip(ctx, db, projector.ParkedFilter{Projector: db.name(), Seqs: c.Seq}, c.decision())
		if err != nil {
			return err
		}
		fmt.Println(n, "skipped")
		if n == 0 {
			return errNothingSelected
		}
		return nil
	})
}

var errNothingSelected = errors.New("no parked message was selected: list them with 'reviews parked'")
