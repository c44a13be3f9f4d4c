// Package generation reads and changes the rows of the generations of a read model.
package generation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// Row is a generation of a read model.
type Row struct {
	provider.Build // Generation 0: this program feeds no generation
	Feeds
	Order
	Origin
	Work
	State            provider.GenerationState
	Revision         int64
	Created, Changed time.Time
	// Shared is not stored: programs of another version feed another generation, from the same
	// subscription perhaps. Then deliveries are left to the readers of the log.
	Shared bool
	newer  map[string]json.RawMessage // fields of the stored data that this program does not know
}

// Feeds says which programs feed a generation, and what it consists of.
type Feeds struct {
	Oldest int `json:"oldest,omitempty"` // the versions of the programs that feed it
	Newest int `json:"newest,omitempty"`
	// Suffix is that of its tables.
	Suffix   string   `json:"suffix,omitempty"`
	Tables   []string `json:"tables,omitempty"`   // to drop when it is retired
	Kept     []string `json:"kept,omitempty"`     // that were not dropped when its projector was forgotten
	Handlers []string `json:"handlers,omitempty"` // all names in its markers
	// Coming are handlers of programs that have started, which its reader is to record in the checkpoint.
	Coming []provider.Began `json:"coming,omitempty"`
	// Skipped are the ids of the events that operators have skipped in earlier generations.
	Skipped []string `json:"skipped,omitempty"`
}

// Order is what a person, or a new version, has asked for.
type Order struct {
	How      How    `json:"how,omitempty"` // zero: it was not built by a rebuild
	Check    bool   `json:"check,omitempty"`
	Anyway   bool   `json:"anyway,omitempty"`
	Rate     int    `json:"rate,omitempty"`
	By       string `json:"by,omitempty"`
	Reason   string `json:"reason,omitempty"`
	Paused   bool   `json:"paused,omitempty"`
	Promoted bool   `json:"promoted,omitempty"` // it is to become live
	Failed   string `json:"failed,omitempty"`   // why it was given up, or waits
	// Forgotten: it was live when By has forgotten its projector. While no generation is live, it is the tombstone.
	Forgotten bool `json:"forgotten,omitempty"`
}

// Origin says whose output is not sent again.
type Origin struct {
	// Source is the generation that was live before. Until Done, output of events that it has
	// applied is dropped. Zero: there was none.
	Source int  `json:"source,omitempty"`
	Done   bool `json:"done,omitempty"` // it has reached the end of the log, or was live
	// Earlier are the generations that were live before Source, if that one was never Done: output of
	// events that they have applied is dropped too.
	Earlier []int `json:"earlier,omitempty"`
	// Released: it is the first one after a person has released the name of a forgotten projector, and no program has
	// created its tables.
	Released bool `json:"released,omitempty"`
}

// Work is how far a generation has come, and the signs that programs give each other.
type Work struct {
	Applied   int64   `json:"applied,omitempty"` // events since the build began
	Total     int64   `json:"total,omitempty"`   // events of its types when it began, and when it had applied these
	PerSecond float64 `json:"per_second,omitempty"`
	Beat      int64   `json:"beat,omitempty"`   // changes while a program feeds it
	Visits    int64   `json:"visits,omitempty"` // changes while programs run that do not feed any generation
	Cleared   bool    `json:"cleared,omitempty"`
	// Seen has the schema versions of the events of each type that it has applied.
	Seen map[string][]int `json:"seen,omitempty"`
}

// How is a way to rebuild a read model: a projector.RebuildHow, or Scratch.
type How int

// The ways to rebuild.
const (
	NoRebuild How = iota
	InPlace
	BlueGreen
	Scratch // the new tables of a verification
)

// String returns "none", "in-place", "blue-green" or "verify".
func (h How) String() string {
	if names := [...]string{"none", "in-place", "blue-green", "verify"}; h >= 0 && int(h) < len(names) {
		return names[h]
	}
	return fmt.Sprintf("RebuildHow(%d)", int(h))
}

// IsLive reports whether readers of the read model see the generation.
func (g *Row) IsLive() bool { return g.State == provider.GenerationLive }

// IsNew reports whether no program has created the tables of the generation, which is the first one of its projector.
func (g *Row) IsNew() bool { return g.Revision == 0 || g.Released }

// IsReplaying reports whether output of events that another generation has applied is dropped.
func (g *Row) IsReplaying() bool { return !g.IsLive() || g.Source != 0 && !g.Done }

// IsBuild reports whether a rebuild or a verification is not over.
func (g *Row) IsBuild() bool {
	return g.State == provider.GenerationRequested || g.State == provider.GenerationBuilding
}

// IsFed reports whether programs feed the generation next to the live one.
func (g *Row) IsFed() bool {
	return g.State == provider.GenerationStandby || g.State == provider.GenerationBuilding && g.How != Scratch
}

// Takes reports whether programs of a version feed the generation.
func (g *Row) Takes(version int) bool { return g.Oldest <= version && version <= g.Newest }

// TakeOver sets the generation whose output is not sent again.
func (g *Row) TakeOver(from *Row) {
	g.Source, g.Done, g.Earlier = from.Generation, false, nil
	if from.IsReplaying() {
		g.Earlier = append(slices.Clone(from.Earlier), from.Source)
		g.Earlier = slices.DeleteFunc(g.Earlier, func(of int) bool { return of == g.Generation })
	}
}

// Asks reports whether the generation asks what another one has applied, that is not live.
func (g *Row) Asks(of int) bool {
	return g.IsLive() && g.IsReplaying() && (g.Source == of || slices.Contains(g.Earlier, of))
}

// AddSeen adds a schema version of a type to a copy of Seen.
func (g *Row) AddSeen(eventType string, schema int) {
	if slices.Contains(g.Seen[eventType], schema) {
		return
	}
	seen := maps.Clone(g.Seen)
	if seen == nil {
		seen = map[string][]int{}
	}
	seen[eventType] = slices.Sorted(slices.Values(append(slices.Clone(seen[eventType]), schema)))
	g.Seen = seen
}

// stored is the stored data of a generation, as JSON.
type stored struct {
	*Feeds
	*Order
	*Origin
	*Work
}

func (g *Row) stored() stored { return stored{&g.Feeds, &g.Order, &g.Origin, &g.Work} }

// Stored returns the row as it is stored.
func (g *Row) Stored() provider.Generation {
	data, _ := json.Marshal(g.stored()) // always has a JSON form
	if len(g.newer) > 0 {
		all := maps.Clone(g.newer)
		_ = json.Unmarshal(data, &all)
		data, _ = json.Marshal(all)
	}
	return provider.Generation{Build: g.Build, Revision: g.Revision, State: g.State, Data: data}
}

// Read returns a generation as it is stored. With an error it returns what could be read.
func Read(row provider.Generation) (*Row, error) {
	g := &Row{Build: row.Build, State: row.State, Revision: row.Revision, Created: row.CreatedAt, Changed: row.ChangedAt}
	if len(row.Data) == 0 {
		return g, nil
	}
	data := g.stored()
	err := json.Unmarshal(row.Data, &data)
	if err == nil {
		err = json.Unmarshal(row.Data, &g.newer)
	}
	for _, field := range reflect.VisibleFields(reflect.TypeFor[stored]()) {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		delete(g.newer, name)
	}
	if err != nil {
		return g, fmt.Errorf("generation %s: %w", row.Build, err)
	}
	return g, nil
}

// ErrForgotten: the projector was forgotten.
var ErrForgotten = errors.New("the projector was forgotten")

// Tombstone returns the generation that says who has forgotten a projector; nil if it is not forgotten.
func Tombstone(all []*Row) *Row {
	if Live(all) != nil {
		return nil
	}
	return Find(all, func(g *Row) bool { return g.Forgotten })
}

// Of returns the generations of a projector, in order. The result has at least one, and one that is
// live. If the projector is forgotten, it returns ErrForgotten.
func Of(projector string, rows []provider.Generation) ([]*Row, error) {
	all, err := OrForgotten(projector, rows)
	if err != nil {
		return nil, err
	}
	if g := Tombstone(all); g != nil {
		return nil, fmt.Errorf("%w: %s, by %s at %s: %s (kinora projectors release %[2]s lets the name be used again)",
			ErrForgotten, projector, g.By, g.Changed.UTC().Format(time.RFC3339), g.Reason)
	}
	return all, nil
}

// OrForgotten is Of, and returns the generations of a forgotten projector too.
func OrForgotten(projector string, rows []provider.Generation) ([]*Row, error) {
	var all []*Row
	for _, row := range rows {
		if row.Projector != projector {
			continue
		}
		g, err := Read(row)
		if err != nil {
			return nil, err
		}
		all = append(all, g)
	}
	if Live(all) == nil && Tombstone(all) == nil {
		first := &Row{Build: provider.Build{Projector: projector, Generation: 1}, State: provider.GenerationLive}
		first.Oldest, first.Newest, first.Done = 1, 1, true
		if len(all) > 0 && all[0].Generation == 1 {
			return nil, fmt.Errorf("no generation of projector %s is live", projector)
		}
		all = slices.Insert(all, 0, first)
	}
	return all, nil
}

// All reads the generations of a projector: see Of.
func All(ctx context.Context, s provider.Builds, projector string) ([]*Row, error) {
	rows, err := s.Generations(ctx, projector)
	if err != nil {
		return nil, err
	}
	return Of(projector, rows)
}

// Live returns the live one of the generations of a projector.
func Live(all []*Row) *Row { return Find(all, (*Row).IsLive) }

// Find returns the newest generation for which fits returns true, or nil.
func Find(all []*Row, fits func(*Row) bool) *Row {
	for _, g := range slices.Backward(all) {
		if fits(g) {
			return g
		}
	}
	return nil
}

// Next returns a new generation of a projector, with the state requested.
func Next(all []*Row, o Order) *Row {
	return &Row{
		Build: provider.Build{Projector: all[0].Projector, Generation: all[len(all)-1].Generation + 1},
		State: provider.GenerationRequested, Order: o,
	}
}

// Change stores a generation after fn has changed it. It returns false if another program has
// changed it since it was read.
func Change(ctx context.Context, s provider.Builds, g *Row, fn func(*Row)) (bool, error) {
	to := *g
	fn(&to)
	changed, err := s.SetGeneration(ctx, to.Stored())
	if changed {
		to.Revision++
		*g = to
	}
	return changed, err
}
