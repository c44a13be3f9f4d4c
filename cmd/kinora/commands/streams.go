package commands

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/internal/filters"
	"github.com/kinora-go/kinora/provider"
)

type streamsCmd struct {
	Ls  streamsLsCmd  `cmd:"" help:"List streams in order of their ids."`
	Cat streamsCatCmd `cmd:"" help:"Show the events of a stream."`
}

// page are the flags of lists.
type page struct {
	Limit int `default:"100" help:"The most rows."`
}

func (p page) Validate() error {
	if p.Limit < 1 {
		return fmt.Errorf("--limit must be at least 1")
	}
	return nil
}

type streamsLsCmd struct {
	filters.Streams `embed:""`
	After           string `help:"Only greater ids: the next page."`
	page            `embed:""`
}

func (c *streamsLsCmd) Run(ctx context.Context, app *App) error {
	cells := func(s provider.Stream) []string { return []string{s.ID, fmt.Sprint(s.Version)} }
	return list(ctx, app, "stream | events", cells, func(_ *Session, ops *admin.Admin) ([]provider.Stream, error) {
		o, err := ops.Operations()
		if err != nil {
			return nil, err
		}
		f := c.Filter()
		f.After, f.Limit = c.After, c.Limit
		return o.Streams(ctx, f)
	})
}

type streamsCatCmd struct {
	Stream  string `arg:"" help:"The id of the stream."`
	After   int64  `help:"Only events with a greater version: the next page."`
	Payload bool   `help:"Show the data and the metadata of events, which may be data of users."`
	page    `embed:""`
}

// event is an event as JSON.
type event struct {
	Position   int64           `json:"position"`
	Version    int64           `json:"version"`
	ID         string          `json:"id"`
	Type       string          `json:"type"`
	Schema     int             `json:"schema"`
	RecordedAt time.Time       `json:"recorded_at"`
	Data       json.RawMessage `json:"data,omitempty"`
	Metadata   any             `json:"metadata,omitempty"`
}

func (c *streamsCatCmd) Run(ctx context.Context, app *App) error {
	return app.with(ctx, func(s *Session, _ *admin.Admin) error {
		list := []event{}
		for raw, err := range s.Store.ReadStream(ctx, c.Stream, c.After) {
			if err != nil {
				return err
			}
			e := event{Position: raw.Position, Version: raw.Version, ID: raw.ID, Type: raw.Type, Schema: raw.Schema, RecordedAt: raw.RecordedAt}
			if c.Payload {
				e.Data, e.Metadata = json.RawMessage(raw.Data), raw.Metadata
			}
			if list = append(list, e); len(list) == c.Limit {
				break
			}
		}
		err := app.show(list, func(w io.Writer) {
			head := "version | position | recorded (UTC) | type | schema | id"
			if c.Payload {
				head += " | data"
			}
			table(w, head, list, func(e event) []string {
				row := []string{fmt.Sprint(e.Version), fmt.Sprint(e.Position), at(e.RecordedAt), e.Type, fmt.Sprint(e.Schema), e.ID}
				if c.Payload {
					row = append(row, string(e.Data))
				}
				return row
			})
		})
		if err == nil && len(list) == 0 && c.After == 0 {
			return fmt.Errorf("the stream %s does not exist", c.Stream)
		}
		return err
	})
}
