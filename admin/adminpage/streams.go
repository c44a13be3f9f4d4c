package adminpage

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/filters"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

const (
	causes = 20  // that are followed up
	window = 500 // positions of the log that are searched for effects
)

func (h *Handler) streamList(ctx context.Context, q *query, v viewer) (*view, error) {
	list := filterOf[filters.Streams](q)
	f := list.Filter()
	f.After, f.Limit = q.text("after"), rows
	o, err := h.ops.Operations()
	if err != nil {
		return nil, err
	}
	found, err := o.Streams(ctx, f)
	if err != nil {
		return nil, err
	}
	t := &table{Label: "Streams", Head: []string{"Stream", "#Events"}, Empty: "No stream has these values."}
	for _, s := range found {
		t.Rows = append(t.Rows, []cell{to(s.ID, link("stream", "id", s.ID)), num(s.Version)})
	}
	if len(found) == rows {
		t.More = page("streams", list, "after", found[rows-1].ID)
	}
	return &view{Title: "Streams", Live: []block{{Table: t}}, Forms: []form{
		find("streams", list, input{Name: "after", Label: "After this id", Value: f.After}),
		{Title: "Open a stream", Method: "get", Action: "stream", Button: "Open", Inputs: []input{{Name: "id", Label: "Stream", Required: true}}},
		{Title: "Open an event", Method: "get", Action: "event", Button: "Open", Inputs: []input{{Name: "id", Label: "Id of the event"}, {Name: "position", Label: "Or its position in the log", Type: "number"}}},
	}}, nil
}

func (h *Handler) stream(ctx context.Context, q *query, v viewer) (*view, error) {
	id, after := q.required("id"), q.number("after")
	t := &table{Label: "Events", Head: []string{"#Version", "#Position", "Recorded", "Type", "#Schema", "Event"}, Empty: "No event is behind this version."}
	for e, err := range h.store.ReadStream(ctx, id, after) {
		if err != nil {
			return nil, err
		}
		if len(t.Rows) == rows {
			t.More = link("stream", "id", id, "after", fmt.Sprint(after))
			break
		}
		after = e.Version
		t.Rows = append(t.Rows, []cell{num(e.Version), num(e.Position), at(e.RecordedAt), plain(e.Type), num(int64(e.Schema)), to(e.ID, link("event", "id", e.ID))})
	}
	if len(t.Rows) == 0 && after == 0 {
		return nil, problem{404, "This stream does not exist."}
	}
	return &view{Title: show(id), Live: []block{{Table: t, Links: []cell{
		to("Its entries in the outbox", link("outbox", "stream", id)), to("Its parked messages", link("parked", "key", id))}}}}, nil
}

// eventBehind returns the first event behind a position.
func (h *Handler) eventBehind(ctx context.Context, position int64) (e eventstore.Raw, found bool, err error) {
	page, err := h.store.LogPage(ctx, provider.LogQuery{After: max(position, 0), Limit: 1, Unsettled: true})
	if err != nil || len(page.Events) == 0 {
		return e, false, err
	}
	return page.Events[0], true, nil
}

func (h *Handler) eventByID(ctx context.Context, id string) (e eventstore.Raw, found bool, err error) {
	events, err := h.store.LogEvents(ctx, []string{id})
	e, found = events[id]
	return e, found, err
}

// event shows an event, what caused it, what it caused, and which read models have it.
func (h *Handler) event(ctx context.Context, q *query, v viewer) (*view, error) {
	id, position, from := q.long("id", 1024), q.number("position"), q.number("from")
	var e eventstore.Raw
	var found bool
	var err error
	switch after := q.number("after"); {
	case id != "":
		e, found, err = h.eventByID(ctx, id)
	case after > 0:
		e, found, err = h.eventBehind(ctx, after)
	default:
		e, found, err = h.eventBehind(ctx, position-1)
		found = found && e.Position == position
	}
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, problem{404, "The log has no such event. An id may also be that of a message of another service, or of a task."}
	}
	p := &view{Title: show(e.Type), Live: []block{{Fields: fields(
		field{"Event", plain(e.ID)}, field{"Stream", to(e.Stream, link("stream", "id", e.Stream))}, field{"Version", plain(digits(e.Version))}, field{"Position", plain(digits(e.Position))},
		field{"Recorded", at(e.RecordedAt)}, field{"Schema", plain(fmt.Sprint(e.Schema))}, field{"Caused by", idCell(e.Metadata.CausationID)}, field{"Correlation", idCell(e.Metadata.CorrelationID)}),
		Links: []cell{to("Entries of its stream in the outbox", link("outbox", "stream", e.Stream)), to("Parked messages of its stream", link("parked", "key", e.Stream)),
			to("The next event of the log", link("event", "after", fmt.Sprint(e.Position)))}}}}
	for _, more := range []func(context.Context, eventstore.Raw) (block, error){h.causesOf, func(ctx context.Context, e eventstore.Raw) (block, error) {
		return h.effectsOf(ctx, e, max(from, e.Position))
	}, h.readModelsOf} {
		b, err := more(ctx, e)
		if err != nil {
			return nil, err
		}
		p.Live = append(p.Live, b)
	}
	extra := headers(e.Metadata.Extra)
	p.Live = append(p.Live, v.private("Data and metadata", text{"Data", indented(e.Data)}, text{"Actor", e.Metadata.Actor}, text{"Traceparent", e.Metadata.Traceparent}, text{"Metadata", extra}))
	return p, nil
}

func idCell(id string) cell {
	if id == "" {
		return cell{}
	}
	return to(id, link("event", "id", id))
}

func eventRow(e eventstore.Raw, how string) []cell {
	return []cell{plain(how), num(e.Position), at(e.RecordedAt), plain(e.Type), to(e.Stream, link("stream", "id", e.Stream)), to(e.ID, link("event", "id", e.ID))}
}

var eventHead = []string{"How", "#Position", "Recorded", "Type", "Stream", "Event"}

// causesOf follows the causation ids up.
func (h *Handler) causesOf(ctx context.Context, e eventstore.Raw) (block, error) {
	t := &table{Label: "What caused it", Head: eventHead, Empty: "It names no cause."}
	b := block{Title: "What caused it", Table: t}
	seen := map[string]bool{e.ID: true}
	for id := e.Metadata.CausationID; id != ""; {
		if seen[id] {
			b.Note = "The chain of causes is a circle."
			break
		}
		if len(t.Rows) == causes {
			b.Note = "The chain goes on: open the first event to follow it."
			break
		}
		seen[id] = true
		cause, found, err := h.eventByID(ctx, id)
		if err != nil {
			return b, err
		}
		if !found {
			t.Rows = append(t.Rows, []cell{plain("not in this log"), {}, {}, {}, {}, plain(id)})
			break
		}
		t.Rows = append(t.Rows, eventRow(cause, fmt.Sprintf("cause %d", len(t.Rows)+1)))
		id = cause.Metadata.CausationID
	}
	slices.Reverse(t.Rows)
	return b, nil
}

// effectsOf searches a part of the log for what e has caused, and for events with its correlation id.
func (h *Handler) effectsOf(ctx context.Context, e eventstore.Raw, from int64) (block, error) {
	page, err := h.store.LogPage(ctx, provider.LogQuery{After: from, Limit: window, Unsettled: true})
	if err != nil {
		return block{}, err
	}
	t := &table{Label: "What followed", Head: eventHead, Empty: "Nothing in this part of the log."}
	effects := map[string]bool{e.ID: true}
	end := from
	for _, x := range page.Events {
		end = x.Position
		switch m := x.Metadata; {
		case m.CausationID == e.ID:
			effects[x.ID] = true
			t.Rows = append(t.Rows, eventRow(x, "caused by it"))
		case effects[m.CausationID]:
			effects[x.ID] = true
			t.Rows = append(t.Rows, eventRow(x, "caused by an effect"))
		case m.CorrelationID != "" && m.CorrelationID == e.Metadata.CorrelationID:
			t.Rows = append(t.Rows, eventRow(x, "same correlation"))
		}
	}
	b := block{Title: "What followed", Table: t}
	if len(page.Events) > 0 {
		b.Note = fmt.Sprintf("Searched from position %s to %s.", digits(from+1), digits(end))
		if page.More || page.Full {
			b.Links = []cell{to("Search on", link("event", "id", e.ID, "from", fmt.Sprint(end)))}
		}
	}
	return b, nil
}

// readModelsOf shows which projectors take e, and whether they have applied it.
func (h *Handler) readModelsOf(ctx context.Context, e eventstore.Raw) (block, error) {
	t := &table{Label: "Read models", Head: []string{"Projector", "#Generation", "Handlers", "State"}, Empty: "No projector takes it."}
	b := block{Title: "Read models", Table: t}
	s, err := h.ops.Survey(ctx, 1)
	if err != nil {
		return b, err
	}
	id, err := h.store.LogID(ctx)
	if err != nil {
		return b, err
	}
	for _, build := range s.Builds {
		var names []string
		m := provider.Message{ID: e.ID, Position: e.Position}
		for _, began := range build.Checkpoint.Handlers {
			if began.Type == e.Type && e.Position > began.Position {
				m.Handlers = append(m.Handlers, provider.Handler{Name: began.Handler})
				names = append(names, began.Handler)
			}
		}
		if len(m.Handlers) == 0 || build.Checkpoint.Lineage != "" && build.Checkpoint.Lineage != id.Lineage || len(t.Rows) == rows {
			continue
		}
		state, err := h.effectOn(ctx, build.Build, m, e)
		if err != nil {
			return b, err
		}
		t.Rows = append(t.Rows, []cell{to(build.Projector, link("projector", "name", build.Projector)), num(int64(build.Number())), plain(strings.Join(names, ", ")), state})
	}
	return b, nil
}

// effectOn returns whether a generation has applied an event.
func (h *Handler) effectOn(ctx context.Context, b provider.Build, m provider.Message, e eventstore.Raw) (cell, error) {
	parked, err := h.ops.Parked(ctx, projector.ParkedFilter{Projector: b.Projector, Generation: b.Number(), Key: e.Stream, Limit: rows})
	if err != nil {
		return cell{}, err
	}
	for _, p := range parked {
		if p.MessageID == e.ID {
			return to("parked, "+p.State.String(), link("message", "seq", fmt.Sprint(p.Seq))).marked("bad"), nil
		}
	}
	store, err := h.ops.Projectors()
	if err != nil {
		return cell{}, err
	}
	fresh, err := store.Unapplied(ctx, b, []provider.Message{m})
	if err != nil {
		return cell{}, err
	}
	if len(fresh) == 1 && fresh[0] {
		return plain("not applied yet"), nil
	}
	if len(parked) == rows {
		return plain("applied or parked"), nil
	}
	return marked("applied", "good"), nil
}
