package commands

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/alecthomas/kong"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/filters"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

type outboxCmd struct {
	Ls      outboxLsCmd      `cmd:"" help:"List entries, the oldest first."`
	Show    outboxShowCmd    `cmd:"" help:"Show an entry."`
	Requeue outboxRequeueCmd `cmd:"" help:"Publish abandoned and failed entries again."`
	Skip    outboxSkipCmd    `cmd:"" help:"Give entries up: they are never published."`
	Prune   outboxPruneCmd   `cmd:"" help:"Delete old published and skipped entries. 'outbox ls --status published --older 24h' lists them."`
	Pause   topicCmd         `cmd:"" help:"Pause a topic: relays claim none of its entries."`
	Resume  topicCmd         `cmd:"" help:"Resume a topic."`
}

type outboxLsCmd struct {
	filters.Entries `embed:""`
	After           int64 `placeholder:"N" help:"Only greater numbers: the next page."`
	page            `embed:""`
}

// entry is an entry as JSON, with the payload as text.
type entry struct {
	outbox.Entry
	Payload string `json:"payload,omitempty"`
}

// entryOf leaves out the token, and what may be data of users unless payload is set.
func entryOf(e outbox.Entry, payload bool) entry {
	e.Token = claim.Token{}
	one := entry{e, string(e.Payload)}
	if !payload {
		one.Headers, one.Payload = nil, ""
	}
	return one
}

func (c *outboxLsCmd) Run(ctx context.Context, app *App) error {
	const head = "seq | status | topic | key | message | attempts | last error | created (UTC) | next (UTC)"
	cells := func(e entry) []string {
		return []string{fmt.Sprint(e.Seq), string(e.Status), e.Topic, e.Key, e.ID, fmt.Sprint(e.Attempts), e.LastError, at(e.CreatedAt), at(e.NextAttemptAt)}
	}
	return list(ctx, app, head, cells, func(s *Session, _ *admin.Admin) ([]entry, error) {
		f := c.Filter()
		f.After, f.Limit = c.After, c.Limit
		found, err := s.Store.Entries(ctx, f)
		return each(found, func(e outbox.Entry) entry { return entryOf(e, false) }), err
	})
}

type outboxShowCmd struct {
	Seq     int64 `arg:"" help:"The number of the entry."`
	Payload bool  `help:"Show the payload and the headers, which may be data of users."`
}

func (c *outboxShowCmd) Run(ctx context.Context, app *App) error {
	return app.with(ctx, func(s *Session, _ *admin.Admin) error {
		found, err := s.Store.Entries(ctx, outbox.Filter{Seqs: []int64{c.Seq}})
		if err != nil {
			return err
		}
		if len(found) == 0 {
			return fmt.Errorf("entry %d does not exist: it may be published and deleted", c.Seq)
		}
		e := entryOf(found[0], c.Payload)
		return app.show(e, func(w io.Writer) {
			fields(w, "seq", fmt.Sprint(e.Seq), "status", string(e.Status), "topic", e.Topic, "key", e.Key, "message", e.ID, "attempts", fmt.Sprint(e.Attempts),
				"claimed by", e.ClaimedBy, "last error", e.LastError, "created", at(e.CreatedAt), "next", at(e.NextAttemptAt),
				"last attempt", at(e.LastAttemptedAt), "published", at(e.PublishedAt))
			if c.Payload {
				fields(w, "headers", fmt.Sprint(e.Headers), "payload", e.Payload)
			}
		})
	})
}

type outboxRequeueCmd struct {
	filters.Entries `embed:""`
	All             bool `help:"All abandoned and failed entries."`
	Force           bool `help:"Also entries whose last attempt is older than the window of the consumers' markers: they may take effect again."`
	decision        `embed:""`
}

func (c *outboxRequeueCmd) Validate() error {
	return selects(c.Entries, c.All, true)
}

func (c *outboxRequeueCmd) Run(ctx context.Context, app *App) error {
	const warning = "The selected entries are published again, perhaps at once"
	return app.changeNoted(ctx, c.decision, warning, "requeued", func(ops *admin.Admin, d provider.Decision) (int, error) {
		f := c.Filter()
		f.Force = c.Force
		n, err := ops.Requeue(ctx, f, d)
		if errors.Is(err, outbox.ErrStale) {
			err = fmt.Errorf("%w (--force)", err)
		}
		return n, err
	})
}

type outboxSkipCmd struct {
	filters.Entries `embed:""`
	decision        `embed:""`
}

func (c *outboxSkipCmd) Validate() error {
	return selects(c.Entries, false, false)
}

func (c *outboxSkipCmd) Run(ctx context.Context, app *App) error {
	const warning = "The selected open entries are never published"
	return app.changeNoted(ctx, c.decision, warning, "skipped", func(ops *admin.Admin, d provider.Decision) (int, error) {
		return ops.SkipEntries(ctx, c.Filter(), d)
	})
}

type outboxPruneCmd struct {
	Published time.Duration `help:"Published entries that are older than this are deleted. Zero leaves them."`
	Skipped   time.Duration `default:"720h" help:"Skipped entries that are older than this are deleted."`
	decision  `embed:""`
}

func (c *outboxPruneCmd) Validate() error {
	if c.Published < 0 || c.Skipped <= 0 {
		return errors.New("--published must not be negative, and --skipped must be positive")
	}
	return nil
}

func (c *outboxPruneCmd) Run(ctx context.Context, app *App) error {
	const warning = "Old published and skipped entries are deleted"
	return app.changeNoted(ctx, c.decision, warning, deleted, func(ops *admin.Admin, d provider.Decision) (int, error) {
		return ops.PruneEntries(ctx, outbox.EntryRetention{Published: c.Published, Skipped: c.Skipped}, d)
	})
}

type topicCmd struct {
	Topic    string `arg:"" help:"The topic."`
	decision `embed:""`
}

func (c *topicCmd) Run(ctx context.Context, app *App, k *kong.Context) error {
	return app.pause(ctx, provider.PauseTopic, c.Topic, k.Selected().Name == "pause", c.decision)
}

// pause pauses or resumes a projector or a topic. It is no error if that is so already.
func (a *App) pause(ctx context.Context, kind, name string, paused bool, d decision) error {
	return a.with(ctx, func(_ *Session, ops *admin.Admin) error {
		do, done, already := ops.Resume, "resumed", "was not paused"
		if paused {
			do, done, already = ops.Pause, "paused: services follow within about a second", "was paused already"
		}
		changed, err := do(ctx, kind, name, d.decision())
		if err != nil {
			return err
		}
		return a.show(map[string]bool{"changed": changed}, func(w io.Writer) {
			if !changed {
				done = already
			}
			_, _ = fmt.Fprintln(w, kind, printable(name), done)
		})
	})
}
