package adminpage

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/provider"
)

func projectorTable(f *admin.Facts) *table {
	t := &table{Label: "Projectors", Head: []string{"Projector", "#Generation", "State", "Versions", "Mode", "#Checkpoint", "#Lag", "#Oldest", "#Runners", "#Parked", "#Stuck keys"},
		Empty: "No projector has a checkpoint yet."}
	for _, p := range f.Projectors {
		oldest, lag := "", count(p.Lag)
		if p.LagSeconds > 0 {
			oldest = span(time.Duration(p.LagSeconds * float64(time.Second)))
		}
		if p.OtherLog {
			lag, oldest = "?", "?"
		}
		parked := to(count(p.Parked), link("parked", "projector", p.Name)).marked("number")
		stuck := marked(count(p.StuckKeys), "number")
		if p.StuckKeys.N > 0 {
			stuck.Mark, stuck.Href = "number bad", link("parked", "projector", p.Name, "state", "stuck")
		}
		t.Rows = append(t.Rows, []cell{to(p.Name, link("projector", "name", p.Name)), num(int64(p.Generation)), generationState(p), plain(p.VersionRange()), plain(p.Mode), num(p.Position),
			marked(lag, "number"), marked(oldest, "number"), runners(p).marked("number"), parked, stuck})
	}
	return t
}

// runners is the number of runners that feed a generation, and that of those of another version.
func runners(p admin.Projector) cell {
	if p.Others == 0 {
		return plain(fmt.Sprint(p.Runners))
	}
	return plain(fmt.Sprintf("%d (+%d of another version)", p.Runners, p.Others))
}

func generationState(p admin.Projector) cell {
	switch {
	case p.Rebuild != nil && p.Rebuild.Failed != "":
		return marked(p.State+", waits", "bad")
	case p.Paused:
		return marked(p.State+", paused", "bad")
	}
	return plain(p.State)
}

func (h *Handler) projectors(ctx context.Context, _ *query, v viewer) (*view, error) {
	f, err := h.facts(ctx)
	if err != nil {
		return nil, err
	}
	p := &view{Title: "Projectors", Intro: "Lag is the number of events that are neither applied nor parked.", Live: []block{{Table: projectorTable(f)}}}
	if len(f.Needs) > 0 {
		p.Live = append(p.Live, block{Title: "What messages need", Table: needTable(f),
			Note: "They wait, without attempts, for a program that has it. They are applied when it starts."})
	}
	if t := pauseTable(f); len(t.Rows) > 0 {
		p.Live = append(p.Live, block{Title: "Paused", Table: t})
	}
	return p, nil
}

func needTable(f *admin.Facts) *table {
	t := &table{Label: "What messages need", Head: []string{"Projector", "#Generation", "Needs", "Since", "Programs that have it"}}
	for _, n := range f.Needs {
		able := marked("none is alive", "bad")
		if len(n.Able) > 0 {
			able = plain(strings.Join(n.Able, ", "))
		}
		generation := fmt.Sprint(n.Number())
		t.Rows = append(t.Rows, []cell{to(n.Projector, link("parked", "projector", n.Projector, "generation", generation, "class", provider.ClassUnable.String())),
			plain(generation).marked("number"), plain(admin.NeedsText(n.Needs)), at(n.Since), able})
	}
	return t
}

func pauseTable(f *admin.Facts) *table {
	t := &table{Label: "Paused", Head: []string{"What", "Name", "By", "Reason", "Since"}}
	for _, p := range f.Pauses {
		t.Rows = append(t.Rows, []cell{plain(p.Kind), plain(p.Name), plain(p.By), plain(p.Reason), at(p.At)})
	}
	return t
}

func (h *Handler) projector(ctx context.Context, q *query, v viewer) (*view, error) {
	name := q.required("name")
	f, err := h.facts(ctx)
	if err != nil {
		return nil, err
	}
	p := &view{Title: show(name)}
	paused, runners := false, 0
	var rebuilt *admin.Projector // the generation that a rebuild makes
	var standby, waits []admin.Projector
	for _, g := range f.Projectors {
		if g.Name != name {
			continue
		}
		paused, runners = paused || g.Paused, max(runners, g.Runners)
		p.Live = append(p.Live, generationBlocks(g)...)
		switch {
		case g.State == "forgotten": // nothing can be done to it
			v.by = ""
		case g.State == "standby":
			standby = append(standby, g)
		case g.Rebuild != nil && g.State != "retired":
			rebuilt = &g
			if g.Rebuild.Failed != "" {
				waits = append(waits, g)
			}
		}
	}
	if p.Live == nil {
		return nil, problem{404, "No projector has this name: it has no checkpoint."}
	}
	requests, err := h.ops.Acts(ctx, provider.ActFilter{Kind: provider.PauseProjector, Name: name, Limit: 10})
	if err != nil {
		return nil, err
	}
	p.Live = append(p.Live, block{Title: "What operators did", Table: actTable(requests)})
	if v.by == "" {
		return p, nil
	}
	p.Forms = append(p.Forms, pauseForm(provider.PauseProjector, name, paused))
	p.Forms = append(p.Forms, form{
		Title: "Compare the read model with the log", Action: "verify", Button: "Verify", Hidden: [][2]string{{"projector", name}},
		Note:   "A running runner fills new tables from the log, and compares them. Rows are not changed.",
		Inputs: []input{{Name: "ignore", Label: "Columns that are not compared, with commas"}, reason()},
	}, form{
		Title: "Rebuild the read model", Action: "rebuild", Button: "Rebuild", Hidden: [][2]string{{"projector", name}}, Danger: true, Confirm: name,
		Note: "Blue/green fills new tables, and readers see them once they are complete. In place empties the tables first: readers see an incomplete read model meanwhile.",
		Inputs: []input{{Name: "how", Label: "How", Type: "select", Value: "blue-green", Options: [][2]string{{"blue-green", "blue/green"}, {"in-place", "in place"}}},
			{Name: "rate", Label: "The most events per second (0: no limit)", Type: "number", Value: "0"},
			reason(), {Name: "check", Label: "Compare with the old tables first (blue/green)", Type: "check"}},
	})
	if rebuilt != nil {
		p.Forms = append(p.Forms, generationForm(*rebuilt, "pause", "Pause the rebuild"), generationForm(*rebuilt, "resume", "Resume the rebuild"), generationForm(*rebuilt, "cancel", "Cancel the rebuild"))
	}
	for _, g := range append(standby, waits...) {
		p.Forms = append(p.Forms, generationForm(g, "promote", fmt.Sprintf("Make generation %d live", g.Generation)))
	}
	for _, g := range standby {
		p.Forms = append(p.Forms, generationForm(g, "drop", fmt.Sprintf("Drop the tables of generation %d", g.Generation)))
	}
	return p, nil
}

func reason() input { return input{Name: "reason", Label: "Reason, which is stored", Required: true} }

func pauseForm(kind, name string, paused bool) form {
	f := form{Title: "Pause the " + kind + " " + show(name), Action: "pause", Button: "Pause", Hidden: [][2]string{{"kind", kind}, {"name", name}}, Inputs: []input{reason()},
		Note: "Nothing is applied to it until it is resumed. Events wait, and nothing is lost."}
	if kind == provider.PauseTopic {
		f.Note = "Relays claim none of its entries until it is resumed. Entries wait, and nothing is lost."
	}
	if paused {
		f.Title, f.Action, f.Button, f.Note = "Resume the "+kind+" "+show(name), "resume", "Resume", ""
	}
	return f
}

func generationForm(g admin.Projector, action, title string) form {
	f := form{Title: title, Action: "generation", Button: title, Inputs: []input{reason()},
		Hidden: [][2]string{{"projector", g.Name}, {"generation", fmt.Sprint(g.Generation)}, {"action", action}}}
	if action != "pause" && action != "resume" {
		f.Confirm, f.Danger = g.Name, true
	}
	return f
}

func generationBlocks(g admin.Projector) []block {
	lag := count(g.Lag)
	if g.LagSeconds > 0 {
		lag += ", the oldest " + span(time.Duration(g.LagSeconds*float64(time.Second)))
	}
	if g.OtherLog {
		lag = "not known: it reads another log"
	}
	b := block{Title: fmt.Sprintf("Generation %d", g.Generation), Fields: fields(
		field{"State", generationState(g)}, field{"Versions of its programs", plain(g.VersionRange())}, field{"Mode", plain(g.Mode)}, field{"Checkpoint", plain(digits(g.Position))}, field{"Lag", plain(lag)}, field{"Runners", runners(g)},
		field{"Reader", plain(g.Reader)}, field{"Parked", to(fmt.Sprintf("%s messages of %s keys", count(g.Parked), count(g.Keys)), link("parked", "projector", g.Name, "generation", fmt.Sprint(g.Generation)))},
		field{"Stuck keys", plain(count(g.StuckKeys))}, field{"Oldest parked", at(g.Oldest)})}
	if g.Rebuild == nil {
		return []block{b}
	}
	r := g.Rebuild
	paused := ""
	if r.Paused {
		paused = "yes"
	}
	rebuild := block{Title: fmt.Sprintf("Rebuild of generation %d", g.Generation), Fields: fields(field{"How", plain(r.How)}, field{"By", plain(r.By)}, field{"Reason", plain(r.Reason)},
		field{"Paused", plain(paused)}, field{"Waits, because", plain(r.Failed).marked("bad")})}
	if r.Total > 0 {
		rebuild.Progress = &progress{Value: min(r.Applied, r.Total), Max: r.Total, Text: fmt.Sprintf("%s of %s events, %s per second", digits(r.Applied), digits(r.Total), digits(int64(r.PerSecond)))}
	}
	return []block{b, rebuild}
}
