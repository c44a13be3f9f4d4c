package sqlite

import (
	"context"
	"fmt"
	"strings"

	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/projector"
)

// outcome looks for ?2 at any of the handlers ?1. A message that was parked before it got to a handler is parked
// for every handler of its projector. Where one of its parkings was skipped and another is left, it is parked.
const outcome = `
select
	exists (select 1 from kinora_markers
		where handler in (select value from json_each(?1)) and generation = ` + live + ` and message_id = ?2),
	coalesce((
		select min(state) from kinora_parked
		where message_id = ?2 and message_id <> '' and state <> 'replayed'
			and (handler in (select value from json_each(?1)) or handler = '' and projector = ?3)), '')`

// Outcomes implements projector.State.
func (d *DB) Outcomes(ctx context.Context, keys []marker.Key) ([]projector.Outcome, error) {
	outcomes := make([]projector.Outcome, len(keys))
	for i, k := range keys {
		owner, _, _ := strings.Cut(k.Handler, "/")
		names := jsonOf(append([]string{k.Handler}, k.Was...))
		var applied bool
		var state string
		if err := one(ctx, d.reads, []any{&applied, &state}, outcome, names, k.MessageID, owner); err != nil {
			return nil, fmt.Errorf("look for %s: %w", k.Handler, err)
		}
		switch {
		case applied:
			outcomes[i] = projector.Applied
		case state != "":
			outcomes[i] = map[string]projector.Outcome{"parked": projector.IsParked, "skipped": projector.IsSkipped}[state]
		}
	}
	return outcomes, nil
}
