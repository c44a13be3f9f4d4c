package postgres

import (
	"context"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/internal/purpose"
)

// The rights that each kind of service always needs, by table. Rights that only some of them need
// are not in the list: inserts into the outbox for handlers that emit, and updates of generations
// for a switch. An appender also needs the outbox if the DB has a route.
var (
	relayNeeds  = rights("migrations: select", "outbox: select update delete")
	runnerNeeds = rights("migrations: select", "generations: select", "markers: select insert delete", "low_water_marks: select insert update",
		"parked: select insert update delete", "holds: select insert update delete", "runners: select insert update delete",
		"in_flight: select insert update delete")
	appenderNeeds = rights("migrations: select", "streams: select insert update", "events: select insert")
	routeNeeds    = rights("outbox: insert")
)

// right is a right on a table.
type right struct{ right, table string }

func rights(lines ...string) (all []right) {
	for _, line := range lines {
		table, names, _ := strings.Cut(line, ": ")
		for name := range strings.FieldsSeq(names) {
			all = append(all, right{name, table})
		}
	}
	return all
}

// allRights has each of these rights once. stateSQL checks all of them.
var allRights = func() (all []right) {
	for _, r := range slices.Concat(relayNeeds, runnerNeeds, appenderNeeds, routeNeeds) {
		if !slices.Contains(all, r) {
			all = append(all, r)
		}
	}
	return all
}()

// lacks returns the rights of missing that the calling service needs. If the application calls
// Ready, lacks returns those of the kind of service that lacks the fewest.
func (db *DB) lacks(ctx context.Context, missing []right) []string {
	appender := appenderNeeds
	if db.cfg.Route != nil {
		appender = slices.Concat(appenderNeeds, routeNeeds)
	}
	services := [][]right{appender, runnerNeeds, relayNeeds}
	switch purpose.Of(ctx) {
	case purpose.Relay:
		services = [][]right{relayNeeds}
	case purpose.Runner:
		services = [][]right{runnerNeeds}
	}
	var fewest []string
	for i, needs := range services {
		var lacks []string
		for _, need := range needs {
			if slices.Contains(missing, need) {
				lacks = append(lacks, need.right+" on "+db.cfg.Schema+"."+need.table)
			}
		}
		if i == 0 || len(lacks) < len(fewest) {
			fewest = lacks
		}
	}
	return fewest
}
