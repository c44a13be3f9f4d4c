package main

import (
	"context"
	"errors"
	"fmt"
	"os/user"
	"time"

	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// operatorFlags are those of a person's work on a database that is there, whether a service runs on it or not.
type operatorFlags struct {
	DB database `required:"" env:"REVIEWS_DB" placeholder:"sqlite:PATH" help:"Where the data is: sqlite:PATH or postgres://…."`
}

func (f operatorFlags) with(ctx context.Context, do func(serviceStore) error) (err error) {
	db, err := f.DB.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	return do(db)
}

// decisionFlags say who decides about parked messages, and why. Both are kept with them.
type decisionFlags struct {
	By     string `default:"${user}" help:"Who decides."`
	Reason string `help:"Why: it is kept with the messages."`
}

func (f decisionFlags) decision() projector.Decision {
	return projector.Decision{By: f.By, Reason: f.Reason}
}

var errNoReason = errors.New("--reason is missing: it is kept with the messages")

// userName is whom the system takes the caller for.
func userName() string {
	if u, err := user.Current(); err == nil {
		return u.Username
	}
	return ""
}

// parkedCmd lists what was set aside.
type parkedCmd struct {
	operatorFlags `embed:""`
	Key           string `help:"Only those of this ordering key: a review's stream, review-PRODUCT-AUTHOR."`
	Class         string `enum:",permanent,unknown,transient,held" default:"" placeholder:"CLASS" help:"Only those of this class: permanent, unknown, transient or held."`
	State         string `enum:"parked,waiting,stuck,replayed,skipped" default:"parked" help:"waiting (tried again by itself), stuck (waits for a person), parked (either), replayed or skipped."`
	Limit         int    `default:"100" help:"How many."`
	After         int64  `placeholder:"N" help:"The next page: those after this number."`
	JSON          bool   `help:"Print JSON, with payloads and headers."`
}

// Validate is called by kong.
func (c *parkedCmd) Validate() error {
	if c.Limit < 1 {
		return errors.New("--limit: want at least 1")
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

// classNamed is nil for no name, which picks every class.
func classNamed(name string) *projector.Class {
	if name == "" {
		return nil
	}
	class := provider.ParseClass(name)
	return &class
}

// parkedRow is a parked message as JSON. Its payload is what was to be applied, which need not be JSON.
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
			p.Headers, string(p.Payload), p.State.String(), p.DueAt.UTC(), p.ResolvedAt.UTC(), p.By, p.Reason,
		})
	}
	return rows
}

// handlerOf is the projector alone for what did not get as far as a handler.
func handlerOf(p projector.Parked) string {
	if p.Handler == "" {
		return p.Projector
	}
	return p.Handler
}

func parkedTable(list []projector.Parked, state string) []string {
	head := "seq\tparked (UTC)\thandler\tkey\tmessage\tclass\tcode\tattempts\tversion\tstate"
	resolved := state == "replayed" || state == "skipped"
	if resolved {
		head += "\t" + state + " (UTC)\tby\treason"
	}
	table := []string{head}
	for _, p := range list {
		row := fmt.Sprintf("%d\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s", p.Seq, p.At.UTC().Format(time.DateTime), printable(handlerOf(p)),
			printable(p.Key), printable(p.MessageID), p.Class, printable(p.Code), p.Attempts, printable(p.Version), p.State)
		if resolved {
			row += fmt.Sprintf("\t%s\t%s\t%s", p.ResolvedAt.UTC().Format(time.DateTime), printable(p.By), printable(p.Reason))
		}
		table = append(table, row)
	}
	return table
}

// skipCmd gives up on parked messages.
type skipCmd struct {
	operatorFlags `embed:""`
	decisionFlags `embed:""`
	Seq           []int64 `required:"" placeholder:"N" help:"Which: their numbers in the list."`
}

// Validate is called by kong.
func (c *skipCmd) Validate() error {
	if c.Reason == "" {
		return errNoReason
	}
	return nil
}

// Run skips them for good. A running service applies what waits behind them.
func (c *skipCmd) Run(ctx context.Context) error {
	if len(c.Seq) == 0 {
		return errNothingPicked // nil would pick all
	}
	return c.with(ctx, func(db serviceStore) error {
		n, err := projector.Skip(ctx, db, projector.ParkedFilter{Projector: reviewsProjector, Seqs: c.Seq}, c.decision())
		if err != nil {
			return err
		}
		fmt.Println(n, "skipped")
		if n == 0 {
			return errNothingPicked
		}
		return nil
	})
}

var errNothingPicked = errors.New("nothing that is still parked was picked: see 'reviews parked'")
