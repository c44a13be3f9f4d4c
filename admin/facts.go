package admin

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

const (
	countLimit = 2000 // the most rows that are counted of each kind
	lagPage    = 1000 // the most events that are looked at for the lag of a generation
	listed     = 200  // the most projectors whose lag is looked at
)

// Facts are the state of a service, as of about one moment. Times are on the store's clock, UTC.
type Facts struct {
	At         time.Time                `json:"at"`
	Log        Log                      `json:"log"`
	Projectors []Projector              `json:"projectors"`
	Outbox     []provider.EntryCount    `json:"outbox"` // open entries, by status
	Tasks      []provider.TaskCount     `json:"tasks"`  // tasks that are neither done nor undone, by status
	DueTasks   []provider.DueTask       `json:"due_tasks"`
	Services   []provider.ServiceReport `json:"services"` // relays, runners and workers
	Leases     []provider.NamedLease    `json:"leases"`
	Waits      []provider.Wait          `json:"waits"`    // who waits for whom
	Pauses     []provider.Pause         `json:"pauses"`   // by persons
	Requests   []provider.Act           `json:"requests"` // that are not over
	// Missing are the parts that the store does not have (Admin.Missing). Without "operations", At is the time of this
	// machine, Outbox has no holders, and Projectors are those of generations, markers, parked messages and readers.
	Missing []string `json:"missing,omitempty"`
	// Needs are what parked messages wait for: a program that has it.
	Needs []Need `json:"needs,omitempty"`

	stuck    []provider.StuckLane
	inFlight map[string]int64
	unlisted int              // live generations whose lag was not looked at
	wanted   map[int64]string // by the id of a request: what the messages of a dry run need
}

// Log is the state of the log.
type Log struct {
	Head    int64     `json:"head"`              // position of the last visible event; 0: the log is empty
	HeadAt  time.Time `json:"head_at,omitzero"`  // when it was recorded
	Settled int64     `json:"settled"`           // no event at or before it can still become visible
	Waiting []string  `json:"waiting,omitempty"` // the open appends that keep Settled behind Head
}

// Projector is a generation of a projector that has a checkpoint or parked messages.
type Projector struct {
	Name       string `json:"name"`
	Generation int    `json:"generation"`
	// State is "live", "building", "standby", "requested", "retired" or "forgotten".
	State      string         `json:"state"`
	Versions   []int          `json:"versions,omitempty"` // the oldest and the newest version of programs that feed it; nil: any
	Mode       string         `json:"mode,omitempty"`     // "catch-up", "closing" or "live"; empty: it has read no log
	Position   int64          `json:"position"`           // every event up to it is applied or parked
	Lag        provider.Count `json:"lag"`                // events that are neither applied nor parked
	LagSeconds float64        `json:"lag_seconds"`        // age of the first of them; 0 if there is none
	Runners    int            `json:"runners"`            // that are alive and feed it
	Others     int            `json:"others"`             // that are alive and have this projector in another version
	Reader     string         `json:"reader,omitempty"`
	Paused     bool           `json:"paused,omitempty"`    // by a person
	Parked     provider.Count `json:"parked"`              // messages that are waiting or stuck
	Keys       provider.Count `json:"keys"`                // keys with such messages
	StuckKeys  provider.Count `json:"stuck_keys"`          // keys that wait for a person
	Oldest     time.Time      `json:"oldest,omitzero"`     // when the first of Parked was parked
	Rebuild    *Rebuild       `json:"rebuild,omitempty"`   // nil: it was not built by a rebuild, or that is over
	OtherLog   bool           `json:"other_log,omitempty"` // it reads another log, so its lag is not known

	handlers []provider.Began // recorded
	seen     map[string][]int // schema versions, by type
	changed  time.Time        // when State changed
}

// Rebuild is the progress of a rebuild.
type Rebuild struct {
	How       string  `json:"how"`
	By        string  `json:"by,omitempty"`
	Reason    string  `json:"reason,omitempty"`
	Applied   int64   `json:"applied"`
	Total     int64   `json:"total"`
	PerSecond float64 `json:"per_second"`
	Paused    bool    `json:"paused,omitempty"`
	Failed    string  `json:"failed,omitempty"` // why it waits for a person, or was given up
	// Refused is when a rebuild was given up that could not begin. Its State is "retired".
	Refused time.Time `json:"refused,omitzero"`
}

// Facts returns the state of the service. Numbers up to 2,000 are exact, and the lag of a generation up to 1,000 events.
func (a *Admin) Facts(ctx context.Context) (*Facts, error) {
	f, err := a.facts(ctx)
	if err != nil {
		return nil, fmt.Errorf("facts: %w", err)
	}
	return f, nil
}

func (a *Admin) facts(ctx context.Context) (*Facts, error) {
	s, err := a.Survey(ctx, countLimit)
	if err != nil {
		return nil, err
	}
	f := &Facts{
		At: s.Now, Outbox: s.Entries, Tasks: s.Tasks, DueTasks: s.DueTasks, Services: s.Services, Leases: s.Leases, Waits: s.Waits,
		Log:   Log{Head: s.Head.Position, HeadAt: s.Head.RecordedAt, Settled: s.Settled},
		stuck: s.Stuck, inFlight: s.InFlight, Missing: a.Missing(),
	}
	for _, open := range s.Waiting {
		f.Log.Waiting = append(f.Log.Waiting, open.String())
	}
	if o, missing := a.Operations(); missing == nil {
		if f.Pauses, err = o.Pauses(ctx); err != nil {
			return nil, err
		}
		if f.Requests, err = o.Acts(ctx, provider.ActFilter{States: []provider.ActState{provider.ActRequested, provider.ActRunning}}); err != nil {
			return nil, err
		}
	}
	store, missing := a.Projectors()
	if missing != nil {
		return f, nil //nolint:nilerr // Facts.Missing says so
	}
	rows, err := store.Generations(ctx, "")
	if err != nil {
		return nil, err
	}
	generations := projector.ReadGenerations(rows)
	id, err := a.store.LogID(ctx)
	if err != nil {
		return nil, err
	}
	forgotten := forgottenOf(generations)
	for i, b := range s.Builds {
		if _, is := forgotten[b.Projector]; is { // what is left of it is deleted by another call of projector.Forget
			continue
		}
		p := f.projector(b, generations)
		if p.OtherLog = b.Checkpoint.Lineage != "" && b.Checkpoint.Lineage != id.Lineage; !p.OtherLog && i < listed {
			if err := a.lag(ctx, store, &p, b, s); err != nil {
				return nil, err
			}
		} else if !p.OtherLog && p.State == "live" {
			f.unlisted++
		}
		f.Projectors = append(f.Projectors, p)
	}
	f.addRequested(generations)
	f.addRefused(generations)
	for name, n := range forgotten {
		f.Projectors = append(f.Projectors, Projector{Name: name, Generation: n, State: "forgotten"})
	}
	slices.SortStableFunc(f.Projectors, func(a, b Projector) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Generation, b.Generation))
	})
	if err := f.addNeeds(ctx, store); err != nil {
		return nil, err
	}
	return f, f.addWanted(ctx, store)
}

// forgottenOf returns the forgotten projectors, each with its last generation that was live.
func forgottenOf(generations []projector.Generation) map[string]int {
	forgotten := map[string]int{}
	for _, g := range generations { // in order of projector and number
		switch g.State {
		case "forgotten":
			forgotten[g.Projector] = g.Number
		case "live":
			delete(forgotten, g.Projector)
		}
	}
	return forgotten
}

// projector returns the facts of a generation without its lag.
func (f *Facts) projector(b provider.SurveyedBuild, generations []projector.Generation) Projector {
	p := Projector{
		Name: b.Projector, Generation: b.Number(), State: "live", Mode: b.Checkpoint.Mode.String(), Position: b.Checkpoint.Place.Position,
		Parked: b.Parked, Keys: b.Lanes, StuckKeys: b.StuckLanes, Oldest: b.Oldest,
		Paused:   slices.ContainsFunc(f.Pauses, func(p provider.Pause) bool { return p.Kind == provider.PauseProjector && p.Name == b.Projector }),
		handlers: b.Checkpoint.Handlers,
	}
	own := func(g projector.Generation) bool { return g.Projector == b.Projector }
	if slices.ContainsFunc(generations, own) {
		p.State = "retired"
	}
	for _, g := range generations {
		if own(g) && g.Number == p.Generation {
			p.State, p.Rebuild, p.seen, p.Versions, p.changed = g.State, rebuildOf(g), g.Seen, versionsOf(g), g.ChangedAt
		}
	}
	for _, l := range f.Leases {
		if l.Name == readerLease+b.String() && l.ExpiresAt.After(f.At) {
			p.Reader = l.Holder
		}
	}
	for _, s := range f.Services {
		if s.Holder == p.Reader {
			p.Reader = s.Process
		}
	}
	f.countRunners(&p)
	return p
}

func (f *Facts) countRunners(p *Projector) {
	for c := range f.capable(p.Name) {
		if p.feeds(c) {
			p.Runners++
		} else {
			p.Others++
		}
	}
}

// capable returns what the living services can do for a projector, and their processes.
func (f *Facts) capable(projector string) iter.Seq2[*provider.Capability, string] {
	return func(yield func(*provider.Capability, string) bool) {
		for _, s := range f.Services {
			if c := s.Capability(projector); c != nil && s.ExpiresAt.After(f.At) && !yield(c, s.Process) {
				return
			}
		}
	}
}

// live returns the facts of the live generation of a projector. They are empty if it has no checkpoint.
func (f *Facts) live(projector string) Projector {
	for _, p := range f.Projectors {
		if p.Name == projector && p.State == "live" {
			return p
		}
	}
	return Projector{Name: projector}
}

// feeds reports whether a program feeds a generation.
func (p *Projector) feeds(c *provider.Capability) bool {
	return p.Versions == nil || c.Version >= p.Versions[0] && c.Version <= p.Versions[1]
}

func versionsOf(g projector.Generation) []int {
	if g.Newest == 0 {
		return nil
	}
	return []int{g.Oldest, g.Newest}
}

func rebuildOf(g projector.Generation) *Rebuild {
	switched := g.How == projector.BlueGreen && g.State == "live" // also if its runner has ended since
	if g.Failed == "" && (g.How == projector.NoRebuild || (g.CaughtUp || switched) && g.State != "building") {
		return nil
	}
	return &Rebuild{
		How: g.How.String(), By: g.By, Reason: g.Reason, Applied: g.Applied, Total: g.Total, PerSecond: g.PerSecond, Paused: g.Paused, Failed: g.Failed,
	}
}

// addRequested adds the rebuilds that no runner has taken up, and failed ones: they have no checkpoint.
func (f *Facts) addRequested(generations []projector.Generation) {
	for _, g := range generations {
		known := slices.ContainsFunc(f.Projectors, func(p Projector) bool { return p.Name == g.Projector && p.Generation == g.Number })
		if !known && (g.State == "requested" || g.State == "building") {
			p := Projector{Name: g.Projector, Generation: g.Number, State: g.State, Rebuild: rebuildOf(g), Versions: versionsOf(g), changed: g.ChangedAt}
			f.countRunners(&p)
			f.Projectors = append(f.Projectors, p)
		}
	}
}

// lag counts the events that a generation has neither applied nor parked, of the next thousand.
func (a *Admin) lag(ctx context.Context, store Projectors, p *Projector, b provider.SurveyedBuild, s provider.Survey) error {
	c := b.Checkpoint
	if c.Mode == 0 || len(c.Handlers) == 0 || c.Place.Position >= s.Head.Position {
		return nil
	}
	takers := map[string][]provider.Began{}
	q := provider.LogQuery{After: c.Place.Position, Limit: lagPage, NoData: true, Unsettled: len(s.Waiting) > 0}
	for _, began := range c.Handlers {
		if takers[began.Type] == nil {
			q.Filter.Types = append(q.Filter.Types, began.Type)
		}
		takers[began.Type] = append(takers[began.Type], began)
	}
	page, err := a.store.LogPage(ctx, q)
	if err != nil {
		return err
	}
	open, err := unapplied(ctx, store, b.Build, page.Events, takers)
	if err != nil {
		return err
	}
	p.Lag = provider.Count{N: int64(len(open)), AtLeast: page.Full}
	if len(open) > 0 {
		p.LagSeconds = max(s.Now.Sub(open[0].RecordedAt).Seconds(), 0)
	}
	return nil
}

func unapplied(ctx context.Context, store Projectors, b provider.Build, events []eventstore.Raw, takers map[string][]provider.Began) (open []eventstore.Raw, err error) {
	var asked []provider.Message
	var of []eventstore.Raw
	for _, e := range events {
		m := provider.Message{ID: e.ID, Position: e.Position}
		for _, began := range takers[e.Type] {
			if e.Position > began.Position {
				m.Handlers = append(m.Handlers, began.Taker())
			}
		}
		if len(m.Handlers) > 0 {
			asked, of = append(asked, m), append(of, e)
		}
	}
	if len(asked) == 0 {
		return nil, nil
	}
	is, err := store.Unapplied(ctx, b, asked)
	for i := range is {
		if is[i] {
			open = append(open, of[i])
		}
	}
	return open, err
}

// Failed returns why a generation of a projector was given up, also one that is retired; empty if it was not.
func (a *Admin) Failed(ctx context.Context, name string, generation int) (string, error) {
	rows, err := with(a.Projectors, func(p Projectors) ([]provider.Generation, error) { return p.Generations(ctx, name) })
	for _, g := range projector.ReadGenerations(rows) {
		if g.Number == generation {
			return g.Failed, nil
		}
	}
	return "", err
}
