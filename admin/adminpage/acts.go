package adminpage

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/kinora-go/kinora/internal/filters"
	"github.com/kinora-go/kinora/provider"
)

func actTable(acts []provider.Act) *table {
	t := &table{Label: "Acts", Head: []string{"#Act", "At", "What", "Target", "State", "By", "Reason", "#Progress"}, Empty: "There are none."}
	for _, a := range acts {
		progress := ""
		if a.Total > 0 {
			progress = digits(a.Applied) + " of " + digits(a.Total)
		}
		t.Rows = append(t.Rows, []cell{to(fmt.Sprint(a.ID), link("act", "id", fmt.Sprint(a.ID))).marked("number"), at(a.At), plain(a.Verb), plain(a.Kind + " " + a.Name), statusCell(a.State, provider.ActFailed, provider.ActDone),
			plain(a.By), plain(a.Reason), marked(progress, "number")})
	}
	return t
}

func (h *Handler) acts(ctx context.Context, q *query, v viewer) (*view, error) {
	list := filterOf[filters.Acts](q)
	f := list.Filter()
	f.Before, f.Limit = q.number("before"), rows
	found, err := h.ops.Acts(ctx, f)
	if err != nil {
		return nil, err
	}
	t := actTable(found)
	if len(found) == rows {
		t.More = page("acts", list, "before", fmt.Sprint(found[rows-1].ID))
	}
	return &view{Title: "Acts", Intro: "What operators did, and requests that runners answer. Decisions about parked messages and tasks are with these.", Live: []block{{Table: t}}, Forms: []form{find("acts", list)}}, nil
}

func (h *Handler) act(ctx context.Context, q *query, v viewer) (*view, error) {
	id := q.number("id")
	found, err := h.ops.Acts(ctx, provider.ActFilter{IDs: []int64{id}, Limit: 1})
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, problem{404, "No act has this number. It may be over and deleted."}
	}
	a := found[0]
	target := plain(a.Name)
	if a.Kind == provider.PauseProjector {
		target = to(a.Name, link("projector", "name", a.Name))
	}
	p := &view{Title: fmt.Sprintf("Act %d: %s", a.ID, show(a.Verb)), Live: []block{{Fields: fields(
		field{"State", statusCell(a.State, provider.ActFailed, provider.ActDone)}, field{"Target", target}, field{"By", plain(a.By)}, field{"Reason", plain(a.Reason)}, field{"At", at(a.At)}, field{"Ended", at(a.EndedAt)})}}}
	if a.Total > 0 && !a.State.IsOver() {
		p.Live[0].Progress = &progress{Value: min(a.Applied, a.Total), Max: a.Total, Text: digits(a.Applied) + " of " + digits(a.Total)}
	}
	if !a.State.IsOver() && (a.Verb == provider.VerbDryRun || a.Verb == provider.VerbVerify) {
		f, err := h.facts(ctx)
		if err != nil {
			return nil, err
		}
		p.Live[0].Note = "A runner takes it up within about a second. This page shows the outcome; without JavaScript, reload it."
		if why := f.Unanswered(a.ID); why != "" {
			p.Live[0].Note = "The request waits. " + why
		}
	}
	switch a.Verb {
	case provider.VerbDryRun:
		h.dryRunOutcome(p, a, v)
	case provider.VerbVerify:
		h.verifyOutcome(p, a, v)
	default:
		p.Live = append(p.Live, v.private("Details", text{"Details", indented(a.Detail)}, text{"Outcome", indented(a.Outcome)}))
	}
	if v.by != "" && !a.State.IsOver() {
		p.Forms = append(p.Forms, form{Title: "Cancel the request", Action: "cancel-act", Button: "Cancel", Hidden: [][2]string{{"id", fmt.Sprint(a.ID)}}, Inputs: []input{reason()}, Danger: true})
	}
	return p, nil
}

// outcome reads the report of an act that is over.
func outcome[T any](p *view, a provider.Act) (r T, ok bool) {
	if !a.State.IsOver() || len(a.Outcome) == 0 {
		return r, false
	}
	if json.Unmarshal(a.Outcome, &r) != nil {
		p.Live = append(p.Live, block{Title: "Outcome", Note: "The outcome cannot be read: another program has written it."})
		return r, false
	}
	return r, true
}

func (h *Handler) dryRunOutcome(p *view, a provider.Act, v viewer) {
	var request provider.DryRunRequest
	isRead := json.Unmarshal(a.Detail, &request) == nil
	list, exact := filters.OfParked(request.Filter)
	if isRead {
		p.Live[0].Fields = append(p.Live[0].Fields, field{"Selected", plain(selection(list))})
	}
	r, ok := outcome[provider.DryRunReport](p, a)
	if ok && r.Error != "" {
		p.Live = append(p.Live, v.noResult(r.Error))
	} else if ok {
		p.Live = append(p.Live, dryRunBlocks(r, v)...)
	}
	if ok && isRead && exact && v.by != "" && list.Projector != "" {
		forms := decisionForms(list, "Selected: "+show(selection(list))+".")
		p.Forms = append(p.Forms, forms[1], forms[0])
	}
}

// noResult is the outcome of a request that failed.
func (v viewer) noResult(why string) block {
	if !v.payloads {
		return block{Title: "Outcome", Note: "There is no result. The reason is hidden: it may have data of users."}
	}
	return block{Title: "Outcome", Note: "There is no result: " + show(why)}
}

// badIf returns a number, which is marked if it is bad.
func badIf(bad bool, n int) cell {
	c := plain(digits(int64(n)))
	if bad {
		c.Mark = "bad"
	}
	return c
}

func dryRunBlocks(r provider.DryRunReport, v viewer) (all []block) {
	all = append(all, block{Title: "Outcome", Fields: fields(field{"Would be applied", plain(digits(int64(r.Messages)))}, field{"Would fail", badIf(len(r.Failures) > 0, len(r.Failures))},
		field{"Would wait", plain(digits(int64(r.Waiting)))}, field{"Rows would change", plain(digits(int64(len(r.Changes))))}, field{"Messages would be sent", plain(digits(int64(len(r.Output))))})})
	if r.Cut {
		all[0].Note = "The report was too long: the rest is left out."
	}
	if len(r.Failures) > 0 {
		t := &table{Label: "Messages that would fail", Head: []string{"#Message", "Class", "Code", "Error"}}
		for _, f := range r.Failures {
			t.Rows = append(t.Rows, []cell{to(fmt.Sprint(f.Seq), link("message", "seq", fmt.Sprint(f.Seq))).marked("number"), plain(f.Class.String()), plain(f.Code), v.hidden(f.Error)})
		}
		all = append(all, block{Title: "Messages that would fail", Table: t})
	}
	if len(r.Changes) > 0 {
		t := &table{Label: "Rows before and after", Head: []string{"Table", "Before", "After"}}
		for _, c := range r.Changes {
			before, after := v.sides(c.Before, c.After)
			t.Rows = append(t.Rows, []cell{plain(c.Table), before, after})
		}
		all = append(all, block{Title: "Rows before and after", Table: t})
	}
	if len(r.Output) > 0 {
		t := &table{Label: "Messages that would be sent", Head: []string{"Topic", "Message", "Key"}}
		for _, o := range r.Output {
			t.Rows = append(t.Rows, []cell{plain(o.Topic), plain(o.ID), plain(o.Key)})
		}
		all = append(all, block{Title: "Messages that would be sent", Table: t})
	}
	return all
}

func (h *Handler) verifyOutcome(p *view, a provider.Act, v viewer) {
	r, ok := outcome[provider.VerifyReport](p, a)
	switch {
	case !ok:
		return
	case r.Error != "":
		p.Live = append(p.Live, v.noResult(r.Error))
		return
	}
	n := len(r.Differences)
	b := block{Title: "Outcome", Fields: fields(field{"Rows that differ", badIf(n > r.Repaired, n)}, field{"Repaired", plain(digits(int64(r.Repaired)))},
		field{"At position", plain(digits(r.Position))}, field{"Events applied", plain(digits(r.Events))}, field{"Messages that failed", plain(digits(int64(r.Parked)))})}
	if r.Cut {
		b.Note = "The report was too long: the rest is left out."
	}
	p.Live = append(p.Live, b)
	if len(r.Differences) == 0 {
		return
	}
	t := &table{Label: "Rows that differ", Head: []string{"Table", "Row", "It is", "It must be"}}
	for _, d := range r.Differences {
		is, must := v.sides(d.Got, d.Want)
		t.Rows = append(t.Rows, []cell{plain(d.Table), v.hidden(string(d.Key)), is, must})
	}
	p.Live = append(p.Live, block{Title: "Rows that differ", Table: t})
	if v.by != "" && len(r.Differences) > r.Repaired {
		p.Forms = append(p.Forms, form{Title: "Repair the rows that differ", Action: "verify", Button: "Repair", Hidden: [][2]string{{"projector", a.Name}, {"repair", "yes"}, {"ignore", ignored(a)}},
			Note: "The read model is compared again, and rows that differ are changed to what they must be.", Inputs: []input{reason()}, Confirm: a.Name, Danger: true})
	}
}
