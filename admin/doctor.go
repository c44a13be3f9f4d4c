package admin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/task"
)

// Doctor returns what is wrong, the most urgent first, and what it could not check. It changes nothing. If a projector lags,
// it looks twice, limits.Watch apart; if an append of another role is open, limits.OpenTransaction apart, or it uses what
// an earlier call has seen, if ctx does not last that long. A finding with Blocks,
// such as a database that is not migrated, leaves other checks out.
func (a *Admin) Doctor(ctx context.Context, limits provider.DiagnosisLimits) (provider.Diagnosis, error) {
	d, err := a.doctor(ctx, limits.WithDefaults())
	if err != nil {
		return provider.Diagnosis{}, fmt.Errorf("doctor: %w", err)
	}
	slices.SortStableFunc(d.Findings, func(a, b provider.Finding) int { return cmp.Compare(a.Check, b.Check) })
	return d, nil
}

func (a *Admin) doctor(ctx context.Context, l provider.DiagnosisLimits) (d provider.Diagnosis, err error) {
	if store, ok := a.store.(provider.Diagnoser); ok {
		if d, err = store.Diagnose(ctx, l); err != nil {
			return d, err
		}
	}
	if !d.Blocks() && !slices.ContainsFunc(d.Findings, func(f provider.Finding) bool { return f.Check == provider.FindingSchema }) {
		schema, err := a.findSchema(ctx)
		if err != nil {
			return d, err
		}
		d.Findings = append(d.Findings, schema...)
	}
	if d.Blocks() {
		d.Unchecked = append(d.Unchecked, provider.Unchecked{What: "everything else", Why: "it cannot be checked before that is repaired"})
		return d, nil
	}
	first, err := a.facts(ctx)
	if err != nil {
		return d, err
	}
	f, watch := first, time.Duration(0)
	if len(first.lagging(l)) > 0 || slices.ContainsFunc(first.Projectors, first.standsStill) {
		watch = l.Watch
	}
	seen := a.sightings(first)
	if deadline, limited := ctx.Deadline(); len(seen) > 0 && (!limited || time.Until(deadline) > 2*l.OpenTransaction) { //nolint:forbidigo // both are of this machine
		watch = max(watch, l.OpenTransaction)
	}
	if watch > 0 {
		if pauses.Wait(ctx, watch, nil); ctx.Err() != nil {
			return d, ctx.Err()
		}
		if f, err = a.facts(ctx); err != nil {
			return d, err
		}
		seen = a.sightings(f)
	}
	waits := f.findWaits(seen, l)
	d.Findings = slices.DeleteFunc(d.Findings, func(s provider.Finding) bool {
		return s.Check == provider.FindingSnapshot && f.follows(s.Cause, waits, l)
	})
	d.Findings = slices.Concat(d.Findings, waits, f.findGone(l), f.findPaused(), f.findRebuilds(first), f.findParked(), f.findNeeds(), f.findRequests(),
		first.findLags(f, l), f.findClocks(l), f.findAbandoned())
	d.Unchecked = append(d.Unchecked, f.unchecked()...)
	return d, nil
}

// follows reports whether a session waits, or others wait for it as found: it keeps dead rows for that reason.
func (f *Facts) follows(session string, waits []provider.Finding, l provider.DiagnosisLimits) bool {
	return slices.ContainsFunc(waits, func(w provider.Finding) bool { return w.Cause == session }) || f.keepsWaiting(session, l)
}

// keepsWaiting reports whether a session has waited for another one for long.
func (f *Facts) keepsWaiting(session string, l provider.DiagnosisLimits) bool {
	return slices.ContainsFunc(f.Waits, func(w provider.Wait) bool {
		return w.Waiter.Name == session && session != "" && !w.Waiter.Since.IsZero() && f.At.Sub(w.Waiter.Since) >= l.OpenTransaction
	})
}

// unchecked returns what the facts do not have.
func (f *Facts) unchecked() (all []provider.Unchecked) {
	for _, part := range f.Missing {
		all = append(all, provider.Unchecked{What: lackingPart[part], Why: "the store keeps no " + part})
	}
	var otherLog []string
	for _, p := range f.Projectors {
		if p.OtherLog && p.State == "live" {
			otherLog = append(otherLog, p.Name)
		}
	}
	if len(otherLog) > 0 {
		all = append(all, provider.Unchecked{
			What: "the lag of " + strings.Join(otherLog, ", "), Why: "they read the log of another database",
			Remedy: []string{"run the doctor with --db of that log"},
		})
	}
	if f.unlisted > 0 {
		all = append(all, provider.Unchecked{What: fmt.Sprintf("the lag of %d further projectors", f.unlisted), Why: fmt.Sprintf("at most %d generations are looked at", listed)})
	}
	if len(f.Services) >= provider.MaxServices {
		all = append(all, provider.Unchecked{What: "further services", Why: fmt.Sprintf("at most %d are read", provider.MaxServices)})
	}
	return all
}

// lackingPart says what a part of a store is for, by its name in Facts.Missing.
var lackingPart = map[string]string{
	"projectors": "lags and parked messages", "tasks": "tasks",
	"operations": "which services run, what is paused and requested, and clocks",
}

// sightings returns when each open append was seen first whose begin this role may not see, by its transaction.
func (a *Admin) sightings(f *Facts) map[string]time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	was := a.seen
	a.seen = map[string]time.Time{}
	for _, w := range f.Waits {
		if b := w.Blocker; w.What == "append" && b.Since.IsZero() && b.Transaction != "" {
			a.seen[b.Transaction] = f.At
			if at, again := was[b.Transaction]; again && at.Before(f.At) {
				a.seen[b.Transaction] = at
			}
		}
	}
	return a.seen
}

func (a *Admin) findSchema(ctx context.Context) ([]provider.Finding, error) {
	o, err := a.Operations()
	if err != nil { // a store without them has no version
		return nil, nil //nolint:nilerr // that is no finding: see Missing
	}
	is, known, err := o.SchemaVersion(ctx)
	f := provider.Finding{Check: provider.FindingSchema, Blocks: true, Facts: facts("database", fmt.Sprint(is), "program", fmt.Sprint(known))}
	switch {
	case err != nil || is == known:
		return nil, err
	case is > 0 && is == known-1:
		f.Blocks, f.Title = false, "The tables have the version before that of this program"
		f.Meaning = "Programs of this version run on them, without what the last migration brings."
		f.Remedy = []string{"kinora migrate up"}
	case is < known:
		f.Title, f.Meaning = "The tables are missing, or older than this program requires", "Services of this version refuse to start."
		f.Remedy = []string{"kinora migrate up"}
	case !isNewer(ctx, o):
		f.Blocks, f.Title = false, "A newer program has migrated the database"
		f.Meaning = "Programs of this version run on it."
		f.Remedy = []string{"end the deployment: deploy the newer program everywhere"}
	default:
		f.Title = "A newer program has migrated the database"
		f.Meaning = "Services of this version refuse to start. The other checks may be wrong."
		f.Remedy = []string{"deploy the program that migrated the database, or a later one; use its version of kinora"}
	}
	return []provider.Finding{f}, nil
}

// isNewer reports whether a newer program has migrated the database, and this one does not run on it.
func isNewer(ctx context.Context, o provider.Operations) bool {
	c, checks := o.(provider.ReadyChecker)
	if !checks {
		return true
	}
	_, newer := errors.AsType[*provider.NewerError](c.ReadyFor(ctx, provider.AnyService))
	return newer
}

// facts returns facts from pairs of a name and a value, without those that have no value.
func facts(pairs ...string) (all []provider.Fact) {
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			all = append(all, provider.Fact{Name: pairs[i], Value: pairs[i+1]})
		}
	}
	return all
}

func (f *Facts) ago(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return f.At.Sub(t).Round(time.Second).String() + " (since " + t.UTC().Format(time.RFC3339) + ")"
}

// number returns a count for people.
func number(n provider.Count) string {
	if n.AtLeast {
		return fmt.Sprintf("at least %d", n.N)
	}
	return fmt.Sprint(n.N)
}

// findWaits finds transactions that others wait for, but not those that wait themselves. sightings are those of Admin.
func (f *Facts) findWaits(sightings map[string]time.Time, l provider.DiagnosisLimits) (found []provider.Finding) {
	seen := map[string]int{} // the finding of a blocker
	for _, w := range f.Waits {
		b := w.Blocker
		if f.keepsWaiting(b.Name, l) {
			continue
		}
		if b.Since.IsZero() {
			b.Since = sightings[b.Transaction]
		}
		since := b.Since
		if w.What == "lock" {
			since = w.Waiter.Since
		}
		if since.IsZero() || f.At.Sub(since) < l.OpenTransaction {
			continue
		}
		i, known := seen[b.Name]
		if !known {
			i = len(found)
			seen[b.Name] = i
			found = append(found, provider.Finding{
				Check: provider.FindingWait, Title: "Others wait for an open transaction: " + b.Name, Cause: b.Name,
				Meaning: "Until it ends, sessions that need its locks wait.",
				Facts:   facts("application", b.Application, "user", b.User, "state", b.State, "open for", openFor(w.Blocker.Since.IsZero(), f.ago(b.Since))),
				Remedy:  []string{b.End}, Private: facts("query", b.Query),
			})
		}
		if w.What == "append" {
			found[i].Meaning = "It has appended events and has not ended. Readers of the log, and so projectors, do not pass the positions that it may still fill."
			continue
		}
		found[i].Facts = append(found[i].Facts, facts("keeps waiting", strings.TrimSpace(w.Waiter.Name+" "+w.Waiter.Application)+", for "+f.ago(w.Waiter.Since))...)
		found[i].Private = append(found[i].Private, facts("waiting query", w.Waiter.Query)...)
	}
	return found
}

// openFor returns for how long a transaction is open; "" if that is not known. hidden: that it was seen is all that is known.
func openFor(hidden bool, ago string) string {
	if hidden && ago != "" {
		return "at least " + ago
	}
	return ago
}

// alive returns the number of services of a kind that report.
func (f *Facts) alive(kind string) (n int) {
	for _, s := range f.Services {
		if s.Kind == kind && s.ExpiresAt.After(f.At) {
			n++
		}
	}
	return n
}

// isAlive reports whether a service with this name in claims and leases reports.
func (f *Facts) isAlive(holder string) bool {
	return slices.ContainsFunc(f.Services, func(s provider.ServiceReport) bool { return s.Holder == holder && s.ExpiresAt.After(f.At) })
}

func (f *Facts) findGone(l provider.DiagnosisLimits) (found []provider.Finding) {
	for _, s := range f.Services {
		if s.ExpiresAt.After(f.At) || f.isAlive(s.Holder) {
			continue
		}
		hands := f.hands(s.Holder)
		if len(hands) == 0 {
			continue
		}
		other := "start another " + s.Kind + ", and look for the end of " + s.Process + " in the log of its machine"
		if n := f.alive(s.Kind); n > 0 {
			other = fmt.Sprintf("nothing: %d other %s take over at that time. Look for the end of %s in the log of its machine", n, plural(n, s.Kind), s.Process)
		}
		found = append(found, provider.Finding{
			Check: provider.FindingGone, Title: "A " + s.Kind + " has ended with work in its hands: " + s.Process,
			Meaning: "It was killed or has crashed. Its work waits until its leases end.",
			Facts:   append(facts("last seen", f.ago(s.SeenAt)), hands...), Remedy: []string{other},
		})
	}
	for _, e := range f.Outbox {
		waits := e.Status == outbox.Claimed && f.At.Sub(e.Until) > l.OpenTransaction && !e.Until.IsZero() ||
			e.Status == outbox.Pending && f.At.Sub(e.Oldest) > l.Lag
		if waits && f.alive("relay") == 0 {
			found = append(found, provider.Finding{
				Check: provider.FindingGone, Title: "Entries wait, and no relay runs", Meaning: "Consumers do not get these messages.",
				Facts: facts("status", string(e.Status), "entries", number(e.Count), "oldest", f.ago(e.Oldest), "claimed by", e.Holder), Remedy: []string{"start a relay"},
			})
		}
	}
	return append(found, f.findUndefined(l)...)
}

// findUndefined finds kinds of tasks that are due and that no worker takes.
func (f *Facts) findUndefined(l provider.DiagnosisLimits) (found []provider.Finding) {
	for _, d := range f.DueTasks {
		defines := func(s provider.ServiceReport) bool { return s.ExpiresAt.After(f.At) && s.Defines(d.Kind) }
		if f.At.Sub(d.Due) <= l.Lag || slices.ContainsFunc(f.Services, defines) {
			continue
		}
		one := provider.Finding{
			Check: provider.FindingGone, Title: "Tasks are due, and no worker runs: " + d.Kind, Meaning: "These tasks, and the groups that they belong to, stand still.",
			Facts: facts("due", f.ago(d.Due)), Remedy: []string{"start a worker that defines " + d.Kind},
		}
		if n := f.alive("worker"); n > 0 {
			one.Title = "Tasks are due, and no worker defines their kind: " + d.Kind
			one.Facts = append(one.Facts, facts("workers of other kinds", fmt.Sprint(n))...)
			one.Remedy = []string{
				"deploy a worker that defines " + d.Kind + "; if the kind was renamed, add the old name with Was",
				"if its tasks are not needed any more, cancel them while a worker still defines the kind",
				"kinora tasks ls --kind " + d.Kind,
			}
		}
		found = append(found, one)
	}
	return found
}

func plural(n int, word string) string {
	if n == 1 {
		return word
	}
	return word + "s"
}

// hands returns what a service has claimed.
func (f *Facts) hands(holder string) (all []provider.Fact) {
	left := func(t time.Time) string { return t.UTC().Format(time.RFC3339) }
	for _, e := range f.Outbox {
		if e.Status == outbox.Claimed && e.Holder == holder {
			all = append(all, facts("claimed entries", number(e.Count)+", until "+left(e.Until))...)
		}
	}
	for _, t := range f.Tasks {
		if t.Status == task.Claimed && t.Holder == holder {
			all = append(all, facts("claimed tasks", number(t.Count)+", until "+left(t.Until))...)
		}
	}
	for _, lease := range f.Leases {
		if lease.Holder == holder && lease.ExpiresAt.After(f.At) {
			all = append(all, facts("lease", lease.Name+", until "+left(lease.ExpiresAt))...)
		}
	}
	if n := f.inFlight[holder]; n > 0 && len(all) > 0 {
		return append(all, facts("messages in flight", fmt.Sprint(n))...)
	}
	return all
}

func (f *Facts) findPaused() (found []provider.Finding) {
	for _, p := range f.Pauses {
		meaning := "Relays claim none of its entries. They wait, in order."
		if p.Kind == provider.PauseProjector {
			meaning = "Runners apply nothing to it. Events and messages wait."
		}
		found = append(found, provider.Finding{
			Check: provider.FindingPaused, Title: "The " + p.Kind + " " + p.Name + " is paused", Meaning: meaning,
			Facts:  facts("by", p.By, "reason", p.Reason, "paused", f.ago(p.At)),
			Remedy: []string{"kinora " + resumes[p.Kind] + " resume " + quote(p.Name) + ` --reason "…"`},
		})
	}
	return append(found, f.findOutages()...)
}

// findOutages finds services that wait by themselves, because everything fails.
func (f *Facts) findOutages() (found []provider.Finding) {
	services := map[provider.Outage][]string{}
	for _, s := range f.Services {
		for _, o := range s.Outages {
			if o.Until = (time.Time{}); s.ExpiresAt.After(f.At) {
				services[o] = append(services[o], s.Process)
			}
		}
	}
	for _, o := range slices.SortedFunc(maps.Keys(services), func(a, b provider.Outage) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Projector, b.Projector), cmp.Compare(a.Handler, b.Handler), cmp.Compare(a.Code, b.Code), cmp.Compare(a.Class, b.Class))
	}) {
		one := provider.Finding{
			Check: provider.FindingPaused, Title: "Every publish to the topic " + o.Topic + " fails",
			Meaning: "Relays pause the topic and try again after at most a minute. No attempt is counted, and nothing is lost.",
			Facts:   facts("error", o.Class, "relays", strings.Join(services[o], ", ")),
			Remedy:  []string{"check the broker and the rights of the relay; with RelayConfig.LogErrors its log has the text of the error"},
		}
		if o.Projector != "" {
			one.Title = "Messages of the projector " + o.Projector + " fail one after the other"
			one.Meaning = "What their handler needs may be down. So runners wait before each message, for at most 30 s, until one is applied. " +
				"Those that failed are parked, and tried again."
			one.Facts = facts("handler", cmp.Or(o.Handler, "unknown"), "error", o.Class+" "+cmp.Or(o.Code, "without a code"), "runners", strings.Join(services[o], ", "))
			one.Remedy = []string{
				"kinora parked ls --projector " + o.Projector,
				"check what the handler calls; with RunnerConfig.LogErrors the log of the runner has the text of the error",
			}
		}
		found = append(found, one)
	}
	return found
}

var resumes = map[string]string{provider.PauseProjector: "projectors", provider.PauseTopic: "outbox"}

var plainWord = regexp.MustCompile(`^[a-zA-Z0-9_./:@-]+$`)

// quote returns a word for a shell.
func quote(word string) string {
	if plainWord.MatchString(word) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

func (f *Facts) findParked() (found []provider.Finding) {
	for _, p := range f.Projectors {
		if p.StuckKeys.N == 0 || p.State == "retired" {
			continue
		}
		one := p.findingOf("are stuck", "A handler cannot apply them, and nobody retries them. Later messages of their keys wait, so the read model lacks all of these.")
		one.Facts = append(one.Facts, facts("keys that wait for a person", number(p.StuckKeys), "messages of all keys", number(p.Parked), "oldest", f.ago(p.Oldest))...)
		for _, s := range f.stuck {
			if s.First.Projector != p.Name || max(s.First.Generation, 1) != p.Generation {
				continue
			}
			one.Facts = append(one.Facts, facts(fmt.Sprintf("message %d", s.First.Seq), fmt.Sprintf("key %s, type %s, handler %s, class %s, code %s, attempt %d; %s wait behind it",
				quote(s.First.Key), s.First.Type, cmp.Or(s.First.Handler, "none"), s.First.Class, cmp.Or(s.First.Code, "none"), s.First.Attempts, number(s.Behind)))...)
			if len(one.Remedy) == 0 {
				one.Remedy = p.remedyOf(s.First)
			}
		}
		if len(one.Remedy) == 0 {
			one.Remedy = []string{"kinora parked ls --projector " + p.Name}
		}
		found = append(found, one)
	}
	return found
}

// findingOf returns a finding about messages of a generation. meaning is what it means for the live one.
func (p *Projector) findingOf(what, meaning string) provider.Finding {
	one := provider.Finding{
		Check: provider.FindingParked, Title: fmt.Sprintf("Messages of the projector %s %s", p.Name, what), Meaning: meaning,
		Facts: facts("generation", fmt.Sprintf("%d (%s)", p.Generation, p.State)),
	}
	if p.State != "live" {
		one.Title = fmt.Sprintf("Messages of generation %d of the projector %s, which is not live, %s", p.Generation, p.Name, what)
		one.Meaning = "The live read model does not lack them. This generation would, if it became live."
	}
	return one
}

// remedyOf returns the commands for a stuck message of a generation. A dry run uses the live one.
func (p *Projector) remedyOf(m provider.Parked) []string {
	which := fmt.Sprintf(" --seq %d", m.Seq)
	if m.Key != "" {
		which = " --key " + quote(m.Key)
	}
	show := fmt.Sprintf("kinora parked show %d", m.Seq)
	dryRun := "kinora parked dry-run --projector " + p.Name + which + ` --reason "…"`
	if p.State != "live" {
		return []string{show, fmt.Sprintf(`kinora parked replay --projector %s --generation %d%s --reason "…"`, p.Name, p.Generation, which)}
	}
	return []string{show, dryRun, "kinora parked replay --projector " + p.Name + which + ` --reason "…"`}
}

// lagging returns the live generations that are behind, and that nobody has paused.
func (f *Facts) lagging(l provider.DiagnosisLimits) (all []Projector) {
	for _, p := range f.Projectors {
		// What an open append delays is not the projector's fault.
		delayed := len(f.Log.Waiting) > 0 && p.Position >= f.Log.Settled
		if p.State == "live" && p.Rebuild == nil && !p.Paused && !delayed && p.Lag.N > 0 && p.LagSeconds > l.Lag.Seconds() {
			all = append(all, p)
		}
	}
	return all
}

func (f *Facts) findLags(later *Facts, l provider.DiagnosisLimits) (found []provider.Finding) {
	before := f.lagging(l)
	for _, p := range later.lagging(l) {
		i := slices.IndexFunc(before, func(b Projector) bool { return b.Name == p.Name && b.Generation == p.Generation })
		if i < 0 || later.Log.Head-p.Position < f.Log.Head-before[i].Position {
			continue // it catches up
		}
		moved := p.Position - before[i].Position
		one := provider.Finding{
			Check: provider.FindingLag, Title: "The projector " + p.Name + " lags, and its lag grows",
			Meaning: "It applies events more slowly than they are appended. Readers see an old state.",
			Facts: facts("events not applied", number(p.Lag), "oldest", fmt.Sprintf("%.0f s", p.LagSeconds), "runners", fmt.Sprint(p.Runners),
				"reader", p.Reader, "moved", fmt.Sprintf("%d positions in %s", moved, later.At.Sub(f.At).Round(100*time.Millisecond))),
			Remedy: []string{"raise RunnerConfig.Concurrency or Batch, or make the handlers faster (projector.OnBatch)"},
		}
		switch {
		case p.Runners == 0 && p.Others > 0:
			one.Meaning = p.otherVersion(p.Others) + " So nothing is applied, and readers see an old state."
			one.Remedy = []string{"start a runner of " + p.Name + p.inVersion()}
			for _, g := range later.Projectors {
				if g.Name == p.Name && g.State == "standby" && g.Runners > 0 {
					one.Remedy = append(one.Remedy, fmt.Sprintf(`kinora projectors promote %s %d --reason "…"`, p.Name, g.Generation))
				}
			}
		case p.Runners == 0:
			one.Meaning = "No runner of it runs. Readers see an old state."
			one.Remedy = []string{"start a runner of " + p.Name, "if no program has it any more: kinora projectors forget " + quote(p.Name) + ` --reason "…"`}
		case moved == 0:
			one.Meaning = "It stands still. Readers see an old state."
			one.Remedy = []string{"read the log of the runner: \"unit failed\" with the class transient says what it waits for", "kinora status"}
		}
		found = append(found, one)
	}
	return found
}

func (f *Facts) findClocks(l provider.DiagnosisLimits) (found []provider.Finding) {
	for _, s := range f.Services {
		if s.Skew.Abs() <= l.Skew || !s.ExpiresAt.After(f.At) {
			continue
		}
		which := "ahead of"
		if s.Skew < 0 {
			which = "behind"
		}
		found = append(found, provider.Finding{
			Check: provider.FindingClock, Title: fmt.Sprintf("The clock of a %s differs: %s", s.Kind, s.Process),
			Meaning: "Leases and retries use the database's clock, so nothing breaks. But the times in its log, and the waits that it measures, are wrong. A machine or a network that is very slow looks the same.",
			Facts:   facts("clock", s.Skew.Abs().Round(time.Millisecond).String()+" "+which+" that of the database", "reported", f.ago(s.SeenAt)),
			Remedy:  []string{"synchronize the clock of its machine, for example with chrony: timedatectl set-ntp true"},
		})
	}
	return found
}

func (f *Facts) findAbandoned() (found []provider.Finding) {
	add := func(title, meaning, rows string, n provider.Count, oldest time.Time, remedy ...string) {
		found = append(found, provider.Finding{
			Check: provider.FindingAbandoned, Title: title, Meaning: meaning, Facts: facts(rows, number(n), "oldest", f.ago(oldest)), Remedy: remedy,
		})
	}
	for _, e := range f.Outbox {
		if e.Status == outbox.Abandoned {
			add("Entries of the outbox are abandoned", "Their attempts are exhausted. Their messages, and the later ones of their keys, are not published.",
				"entries", e.Count, e.Oldest,
				"kinora outbox ls --status abandoned", `kinora outbox requeue --seq N --reason "…"`, `kinora outbox skip --seq N --reason "…"`)
		}
	}
	for _, t := range f.Tasks {
		if t.Status == task.Abandoned {
			add("Tasks are abandoned", "Their attempts are exhausted, or no retry can help. Their groups wait for them.", "tasks", t.Count, t.Oldest,
				"kinora tasks ls --status abandoned", `kinora tasks requeue --id ID --reason "…"`, `kinora tasks cancel --id ID --reason "…"`)
		}
	}
	return found
}
