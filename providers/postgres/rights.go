package postgres

import (
	"slices"
	"strings"

	"github.com/kinora-go/kinora/provider"
)

// The rights that each service must have, by table. Rights that only some services use are not
// required: inserts into the outbox by handlers that emit. An appender must have the rights to insert
// into the outbox and to identify the log if the DB has a route.
var (
	relayNeeds = rights("migrations: select", "outbox: select update delete", "leases: select insert update delete",
		"services: select insert update delete", "pauses: select")
	runnerNeeds = rights("migrations: select", "generations: select insert update", "markers: select insert delete", "low_water_marks: select insert update",
		"parked: select insert update delete", "holds: select insert update delete", "runners: select insert update delete",
		"in_flight: select insert update delete", "checkpoints: select insert update", "leases: select insert update delete",
		"services: select insert update delete", "pauses: select", "acts: select update")
	appenderNeeds = rights("migrations: select", "streams: select insert update", "events: select insert", "snapshots: select insert update delete")
	workerNeeds   = rights("migrations: select", "tasks: select insert update delete", "task_groups: select insert update delete",
		"task_trail: select insert delete", "leases: select insert update delete",
		"services: select insert update delete")
	routeNeeds = rights("outbox: insert", "incarnation: select")
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

// asked are all rights, each once, which stateSQL looks at.
var asked = func() (all []right) {
	for _, r := range slices.Concat(relayNeeds, runnerNeeds, workerNeeds, appenderNeeds, routeNeeds) {
		if !slices.Contains(all, r) {
			all = append(all, r)
		}
	}
	return all
}()

// lacks returns the missing rights that the service needs. For provider.AnyService these are the rights of the service that lacks the
// fewest.
func (db *Provider) lacks(service provider.Service, missing []right) []string {
	appender := appenderNeeds
	if db.cfg.Route != nil {
		appender = slices.Concat(appenderNeeds, routeNeeds)
	}
	services := [][]right{appender, runnerNeeds, relayNeeds, workerNeeds}
	switch service {
	case provider.RelayService:
		services = [][]right{relayNeeds}
	case provider.RunnerService:
		services = [][]right{runnerNeeds}
	case provider.WorkerService:
		services = [][]right{workerNeeds}
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
