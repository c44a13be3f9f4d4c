package projector

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// generation is a generation of a read model, as a runner uses it.
type generation struct {
	provider.Build // Generation 0: this program feeds no generation
	generationData
	state            provider.GenerationState
	revision         int64
	created, changed time.Time
	// shared: programs of another version feed another generation, from the same subscription
	// perhaps. Then deliveries are left to the readers of the log.
	shared bool
	newer  map[string]json.RawMessage // fields of the stored data that this program does not know
}

// generationData is stored with a generation, as JSON.
type generationData struct {
	Oldest int `json:"oldest,omitempty"` // the versions of the programs that feed it
	Newest int `json:"newest,omitempty"`
	// Suffix is that of its tables; see Table.
	Suffix   string   `json:"suffix,omitempty"`
	Tables   []string `json:"tables,omitempty"`   // to drop when it is retired
	Handlers []string `json:"handlers,omitempty"` // all names in its markers
	// Skipped are the ids of the events that operators have skipped in earlier generations.
	Skipped []string `json:"skipped,omitempty"`

	How      RebuildHow `json:"how,omitempty"` // zero: it was not built by a rebuild
	Check    bool       `json:"check,omitempty"`
	Anyway   bool       `json:"anyway,omitempty"`
	Rate     int        `json:"rate,omitempty"`
	By       string     `json:"by,omitempty"`
	Reason   string     `json:"reason,omitempty"`
	Paused   bool       `json:"paused,omitempty"`
	Promoted bool       `json:"promoted,omitempty"` // it is to become live
	Failed   string     `json:"failed,omitempty"`   // why it was given up, or waits

	// Source is the generation that was live before. Until Done, output of events that it has
	// applied is dropped. Zero: there was none.
	Source int  `json:"source,omitempty"`
	Done   bool `json:"done,omitempty"` // it has reached the end of the log, or was live
	// Earlier are the generations that were live before Source, if that one was never Done: output of
	// events that they have applied is dropped too.
	Earlier []int `json:"earlier,omitempty"`

	Applied   int64   `json:"applied,omitempty"` // events since the build began
	Total     int64   `json:"total,omitempty"`   // events of its types when it began, and when it had applied these
	PerSecond float64 `json:"per_second,omitempty"`
	Beat      int64   `json:"beat,omitempty"`   // changes while a program feeds it
	Visits    int64   `json:"visits,omitempty"` // changes while programs run that do not feed any generation
	Cleared   bool    `json:"cleared,omitempty"`
	// Seen has the schema versions of the events of each type that it has applied.
	Seen map[string][]int `json:"seen,omitempty"`
}

// isLive reports whether readers of the read model see the generation.
func (g *generation) isLive() bool { return g.state == provider.GenerationLive }

// isReplaying reports whether output of events that another generation has applied is dropped.
func (g *generation) isReplaying() bool { return !g.isLive() || g.Source != 0 && !g.Done }

// takesOver sets the generation whose output is not sent again.
func (g *generation) takesOver(from *generation) {
	g.Source, g.Done, g.Earlier = from.Generation, false, nil
	if from.isReplaying() {
		g.Earlier = append(slices.Clone(from.Earlier), from.Source)
		g.Earlier = slices.DeleteFunc(g.Earlier, func(of int) bool { return of == g.Generation })
	}
}

// replays reports whether the generation asks what another one has applied, that is not live.
func (g *generation) replays(of int) bool {
	return g.isLive() && g.isReplaying() && (g.Source == of || slices.Contains(g.Earlier, of))
}

// isBuild reports whether a rebuild or a verification is not over.
func (g *generation) isBuild() bool {
	return g.state == provider.GenerationRequested || g.state == provider.GenerationBuilding
}

// takes reports whether programs of a version feed the generation.
func (g *generation) takes(version int) bool { return g.Oldest <= version && version <= g.Newest }

// stored returns the row of the generation.
func (g *generation) stored() provider.Generation {
	data, _ := json.Marshal(g.generationData) // always has a JSON form
	if len(g.newer) > 0 {
		all := maps.Clone(g.newer)
		_ = json.Unmarshal(data, &all)
		data, _ = json.Marshal(all)
	}
	return provider.Generation{Build: g.Build, Revision: g.revision, State: g.state, Data: data}
}

// read reads the stored data.
func (g *generation) read(data json.RawMessage) error {
	err := json.Unmarshal(data, &g.generationData)
	if err == nil {
		err = json.Unmarshal(data, &g.newer)
	}
	for field := range reflect.TypeFor[generationData]().Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		delete(g.newer, name)
	}
	return err
}

// readGenerations returns the generations of a projector, in order. The result has at least one.
func readGenerations(ctx context.Context, s provider.Builds, projector string) ([]*generation, error) {
	rows, err := s.Generations(ctx, projector)
	if err != nil {
		return nil, err
	}
	return generationsOf(projector, rows)
}

func readGeneration(row provider.Generation) (*generation, error) {
	g := &generation{Build: row.Build, state: row.State, revision: row.Revision, created: row.CreatedAt, changed: row.ChangedAt}
	if len(row.Data) > 0 {
		if err := g.read(row.Data); err != nil {
			return g, fmt.Errorf("generation %s: %w", row.Build, err)
		}
	}
	return g, nil
}

// generationsOf returns the generations of a projector, in order. The result has at least one.
func generationsOf(projector string, rows []provider.Generation) ([]*generation, error) {
	var all []*generation
	for _, row := range rows {
		if row.Projector != projector {
			continue
		}
		g, err := readGeneration(row)
		if err != nil {
			return nil, err
		}
		all = append(all, g)
	}
	if live(all) == nil {
		first := &generation{Build: provider.Build{Projector: projector, Generation: 1}, state: provider.GenerationLive}
		first.Oldest, first.Newest, first.Done = 1, 1, true
		if len(all) > 0 && all[0].Generation == 1 {
			return nil, fmt.Errorf("no generation of projector %s is live", projector)
		}
		all = slices.Insert(all, 0, first)
	}
	return all, nil
}

// live returns the live one of the generations of a projector.
func live(all []*generation) *generation {
	return find(all, func(g *generation) bool { return g.isLive() })
}

// find returns the newest generation for which is returns true, or nil.
func find(all []*generation, is func(*generation) bool) *generation {
	for _, g := range slices.Backward(all) {
		if is(g) {
			return g
		}
	}
	return nil
}

// change stores a generation after fn has changed it. It returns false if another program has
// changed it since it was read.
func change(ctx context.Context, s provider.Builds, g *generation, fn func(*generation)) (bool, error) {
	to := *g
	fn(&to)
	changed, err := s.SetGeneration(ctx, to.stored())
	if changed {
		to.revision++
		*g = to
	}
	return changed, err
}

// newest returns the number of the last generation.
func newest(all []*generation) int {
	return all[len(all)-1].Generation
}
