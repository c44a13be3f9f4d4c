package postgres

import (
	"strings"

	"github.com/kinora-go/kinora/internal/mutant"
)

// mutated takes a mechanism out of a statement where a build tag asks for it. See internal/mutant.
func mutated(statement string) string {
	if mutant.HalfGuard {
		statement = strings.ReplaceAll(statement, "and e.id not in (select id from picked where not spent)", "and false")
	}
	if mutant.ClockPerRow {
		statement = strings.ReplaceAll(statement, "ck.t", "clock_timestamp()")
	}
	if mutant.NoFence {
		statement = strings.ReplaceAll(statement, "o.token = m.token", "m.token is not null")
		statement = strings.ReplaceAll(statement, "o.token = $2::uuid", "$2::uuid is not null")
	}
	if mutant.HeldNoBarrier {
		statement = strings.ReplaceAll(statement, "e.held and e.topic <> ''", "false")
	}
	if mutant.NoVersionGuard {
		statement = strings.ReplaceAll(statement, "and version = $9::bigint", "and $9::bigint is not null")
	}
	if mutant.NoGenerationFence {
		statement = strings.ReplaceAll(statement, "select pg_advisory_xact_lock_shared($1::int, $2::int)", "select $1::int, $2::int")
	}
	if mutant.BatchOnConflict && statement == mustInsertMarkersSQL {
		statement += " on conflict do nothing"
	}
	return statement
}
