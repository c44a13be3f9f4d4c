package adminpage

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/task"
)

func (h *Handler) overview(ctx context.Context, _ *query, v viewer) (*view, error) {
	f, failed := h.facts(ctx) // before the findings, which may be read again beside it
	// To look again takes more than a second if a projector lags, so only the first page waits for it.
	d, err := h.state.doctor.soon(ctx, doctorKept, doctorShown, h.diagnose)
	if err != nil {
		return nil, err
	}
	p := &view{Title: "Overview"}
	p.Live = append(p.Live, findingBlock(d, v))
	if d.Blocks() { // the rest needs the tables
		return p, nil
	}
	if failed != nil {
		return nil, failed
	}
	p.Live = append(p.Live,
		block{Title: "The last hour", Plots: h.state.plots(sampleOf(f))},
		block{Title: "Now", Fields: summary(f)},
		block{Title: "Projectors", Table: projectorTable(f)})
	if len(f.Requests) > 0 {
		p.Live = append(p.Live, block{Title: "Requests", Table: actTable(f.Requests)})
	}
	return p, nil
}

func summary(f *admin.Facts) []field {
	alive := map[string]int{}
	for _, s := range f.Services {
		if s.ExpiresAt.After(f.At) {
			alive[s.Kind]++
		}
	}
	var tasks, abandoned provider.Count
	for _, t := range f.Tasks {
		into := &tasks
		if t.Status == task.Abandoned {
			into = &abandoned
		}
		into.N, into.AtLeast = into.N+t.N, into.AtLeast || t.AtLeast
	}
	waiting := open(f, outbox.Pending, outbox.Claimed, outbox.Failed)
	stuck := open(f, outbox.Held, outbox.Abandoned)
	bad := func(c provider.Count, href string) cell {
		one := to(count(c), href)
		if c.N > 0 {
			one.Mark = "bad"
		}
		return one
	}
	const services = "Runners, relays, workers"
	log := "empty"
	if f.Log.Head > 0 {
		log = fmt.Sprintf("position %s, recorded %s", digits(f.Log.Head), at(f.Log.HeadAt).Text)
	}
	all := []field{
		{"Log", to(log, link("event", "position", fmt.Sprint(f.Log.Head)))},
		{"Outbox, to be published", to(count(waiting), "./outbox")},
		{"Outbox, abandoned or held", bad(stuck, link("outbox", "status", "abandoned"))},
		{"Tasks that are not over", to(count(tasks), "./tasks")},
		{"Tasks, abandoned", bad(abandoned, link("tasks", "status", "abandoned"))},
		{services, to(fmt.Sprintf("%d, %d, %d", alive["runner"], alive["relay"], alive["worker"]), "./services")},
	}
	if f.Log.Head == 0 {
		all[0].Value = plain(log)
	}
	all = slices.DeleteFunc(all, func(one field) bool { // what the store does not keep
		return strings.HasPrefix(one.Name, "Tasks") && slices.Contains(f.Missing, "tasks") || one.Name == services && slices.Contains(f.Missing, "operations")
	})
	if len(f.Log.Waiting) > 0 {
		all = append(all, field{"Readers of the log wait for", to(strings.Join(f.Log.Waiting, ", "), "./services")})
	}
	return all
}

// findingLinks are the pages on which a finding can be followed.
var findingLinks = map[provider.Urgency]cell{
	provider.FindingWait: to("Who waits for whom", "./services"), provider.FindingGone: to("Services", "./services"), provider.FindingPaused: to("Projectors", "./projectors"),
	provider.FindingRebuild: to("Projectors", "./projectors"),
	provider.FindingParked:  to("Stuck messages", link("parked", "state", "stuck")), provider.FindingLag: to("Projectors", "./projectors"),
	provider.FindingClock: to("Services", "./services"), provider.FindingAbandoned: to("Outbox", link("outbox", "status", "abandoned")),
}

func findingBlock(d provider.Diagnosis, v viewer) block {
	b := block{Title: fmt.Sprintf("%d things are wrong", len(d.Findings)), Unchecked: d.Unchecked}
	switch n := len(d.Findings); {
	case n == 0 && len(d.Unchecked) == 0:
		return block{Title: "Nothing is wrong", Note: "All checks have passed."}
	case n == 0:
		b.Title = "Nothing was found, but not everything could be checked"
	case n == 1:
		b.Title = "One thing is wrong"
	}
	for _, f := range d.Findings {
		if !v.payloads {
			f.Private = nil
		}
		one := finding{f, findingLinks[f.Check]}
		switch {
		case f.Check == provider.FindingAbandoned && strings.HasPrefix(f.Title, "Tasks"):
			one.Link = to("Tasks", link("tasks", "status", "abandoned"))
		case f.Check == provider.FindingParked && strings.Contains(f.Title, "wait for a program"):
			one.Link = to("What they need", "./projectors")
		}
		b.Findings = append(b.Findings, one)
	}
	return b
}

func (h *Handler) services(ctx context.Context, _ *query, v viewer) (*view, error) {
	f, err := h.facts(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := h.ops.Operations(); err != nil {
		return nil, err
	}
	services := &table{Label: "Services", Head: []string{"Kind", "Process", "State", "Version", "Started", "Seen", "Projectors", "Waits, since everything fails"}, Empty: "No service has reported in the last hour."}
	for _, s := range f.Services {
		state := marked("alive", "good")
		if !s.ExpiresAt.After(f.At) {
			state = marked("gone", "bad")
		}
		var outages []string
		for _, o := range s.Outages {
			what := "topic " + o.Topic
			if o.Projector != "" {
				what = strings.TrimSpace("projector " + o.Projector + " " + o.Handler)
			}
			outages = append(outages, what+" ("+strings.TrimSpace(o.Class+" "+o.Code)+")")
		}
		services.Rows = append(services.Rows, []cell{plain(s.Kind), plain(s.Process), state, plain(s.Version), at(s.StartedAt), at(s.SeenAt),
			plain(strings.Join(s.Served(), ", ")), plain(strings.Join(outages, ", "))})
	}
	waits := &table{Label: "Who waits for whom", Head: []string{"Who", "Waits for", "Application", "User", "State", "Open since", "Ends it"}, Empty: "No one waits for an open transaction."}
	if v.payloads {
		waits.Head = append(waits.Head, "Its last statement")
	}
	for _, x := range f.Waits {
		who := strings.TrimSpace(x.Waiter.Name + " " + x.Waiter.Application)
		if x.What == "append" {
			who = "readers of the log"
		}
		row := []cell{plain(who), plain(x.Blocker.Name), plain(x.Blocker.Application), plain(x.Blocker.User), plain(x.Blocker.State), at(x.Blocker.Since), plain(x.Blocker.End)}
		if v.payloads {
			row = append(row, plain(x.Blocker.Query))
		}
		waits.Rows = append(waits.Rows, row)
	}
	leases := &table{Label: "Leases", Head: []string{"Name", "Held by", "Until", "State"}, Empty: "There are no leases."}
	for _, l := range f.Leases {
		state := marked("held", "good")
		if !l.ExpiresAt.After(f.At) {
			state = marked("free", "quiet")
		}
		holder := l.Holder
		for _, s := range f.Services {
			if s.Holder == l.Holder {
				holder = s.Process
			}
		}
		leases.Rows = append(leases.Rows, []cell{plain(l.Name), plain(holder), at(l.ExpiresAt), state})
	}
	return &view{Title: "Services", Intro: "Runners, relays and workers that have reported in the last hour.", Live: []block{
		{Table: services}, programBlock(f), {Title: "Who waits for whom", Table: waits}, {Title: "Leases", Table: leases}}}, nil
}

// programBlock is the matrix of the living programs and what they can do for each projector and domain of tasks.
func programBlock(f *admin.Facts) block {
	all := f.Programs()
	t := &table{Label: "Programs", Head: []string{"Program", "Version"}, Empty: "No runner or worker is alive."}
	for _, name := range all.Columns {
		t.Head = append(t.Head, show(name))
	}
	for _, p := range all.Rows {
		row := []cell{plain(p.Process), plain(p.Version)}
		for _, can := range p.Can {
			one := plain(can.String())
			if can != nil && len(can.Lacks) > 0 {
				one.Mark = "bad"
			}
			row = append(row, one)
		}
		t.Rows = append(t.Rows, row)
	}
	return block{Title: "Programs", Table: t, Note: "What the living programs can do for each projector and for the tasks of each domain, and what one lacks that another one has."}
}
