package provider

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"
)

// Build identifies a generation of a projector's read model: each rebuild creates one, with its own checkpoint,
// markers, parked messages and held lanes. The first one is 1. A Generation of zero means the live one in
// Progress and Records, and 1 everywhere else.
type Build struct {
	Projector  string
	Generation int
}

// Number returns the generation, and 1 if it is zero.
func (b Build) Number() int { return max(b.Generation, 1) }

// String returns the projector's name, and the number of a later generation: "ratings@2". Leases have it in their names.
func (b Build) String() string {
	if b.Number() == 1 {
		return b.Projector
	}
	return b.Projector + "@" + strconv.Itoa(b.Generation)
}

// Builds stores which generations of read models exist, and which one is live. Each method is a separate
// transaction. A projector without rows has one generation: 1, which is live.
type Builds interface {
	// Generations returns the generations of a projector, or of all if its name is empty, in order of projector and number.
	Generations(ctx context.Context, projector string) ([]Generation, error)

	// SetGeneration stores g, and adds one to its Revision. It returns false, and changes nothing,
	// in these cases:
	//   - g.Revision is not that of the stored row. A row that does not exist has Revision 0.
	//   - The stored generation is retired, and g is not.
	//   - It would be the second generation of the projector that is live, or the second one that is
	//     requested or being built.
	//
	// In the same transaction it changes the checkpoint of the generation if the State is new: with GenerationStandby
	// its mode becomes ModeCatchUp and the tokens of it and its segments zero; with GenerationRetired its mode
	// becomes ModeEnded, and it is created if there is none, so that no unit of the generation can begin.
	SetGeneration(ctx context.Context, g Generation) (bool, error)

	// Unlogged reports whether the generation has a marker of one of handlers without a position: it has applied a
	// message that was no event of the log.
	Unlogged(ctx context.Context, b Build, handlers []string) (bool, error)

	// ClearGeneration deletes at most limit rows of a retired generation: markers of handlers, and parked messages with
	// their lanes. It returns their number. If no row is left it drops tables, if they exist, and returns zero. The
	// generation and its checkpoint stay. It returns ErrInput if the generation is not retired. The error has
	// CodeReferenced if another table has a foreign key to one of tables, or on PostgreSQL a view reads one.
	ClearGeneration(ctx context.Context, b Build, handlers, tables []string, limit int) (int, error)
}

// Generation is a generation of a projector's read model.
type Generation struct {
	Build
	Revision  int64 // the number of changes of the row
	State     GenerationState
	Data      json.RawMessage // a JSON object of package projector
	CreatedAt time.Time       // on the store's clock, as ChangedAt
	ChangedAt time.Time       // when State changed last
}

// GenerationState is what a generation is for.
type GenerationState string

// The states of a generation. A projector has at most one live generation, and one that is requested or building.
const (
	GenerationRequested GenerationState = "requested" // no runner has taken the request up
	GenerationBuilding  GenerationState = "building"  // its reader applies the events of the log
	GenerationLive      GenerationState = "live"      // readers of the read model see it
	GenerationStandby   GenerationState = "standby"   // it was live, and is kept for a rollback
	GenerationRetired   GenerationState = "retired"   // it takes no more units, and its rows are deleted
)

// CheckGeneration returns an error for a generation that no store can have.
func CheckGeneration(g Generation) error {
	if err := CheckStorable("projector", g.Projector); err != nil {
		return err
	}
	switch g.State {
	case GenerationRequested, GenerationBuilding, GenerationLive, GenerationStandby, GenerationRetired:
	default:
		return fmt.Errorf("%w: generation.State is %q: use the constants", ErrInput, g.State)
	}
	if g.Generation < 1 || g.Revision < 0 {
		return fmt.Errorf("%w: generation.Generation is %d and Revision %d: they must be at least 1 and 0", ErrInput, g.Generation, g.Revision)
	}
	if len(g.Data) > 0 {
		return CheckJSON("generation.Data", g.Data, 0)
	}
	return nil
}

// LiveGeneration returns the number of the live generation of one projector's generations.
func LiveGeneration(all []Generation) int {
	for _, g := range all {
		if g.State == GenerationLive {
			return g.Generation
		}
	}
	return 1
}

// CanSet reports whether SetGeneration, or Switch.Set, can store set if a projector has the generations stored.
func CanSet(stored []Generation, set ...Generation) bool {
	after := make(map[int]Generation, len(stored)+len(set))
	for _, g := range stored {
		after[g.Generation] = g
	}
	for _, g := range set {
		was := after[g.Generation]
		if was.Revision != g.Revision || was.State == GenerationRetired && g.State != GenerationRetired {
			return false
		}
		g.Revision++
		after[g.Generation] = g
	}
	live, next := 0, 0
	for _, g := range after {
		switch g.State {
		case GenerationLive:
			live++
		case GenerationRequested, GenerationBuilding:
			next++
		case GenerationStandby, GenerationRetired:
		}
	}
	return live <= 1 && next <= 1
}
