package projector

import (
	"sync"

	"github.com/kinora-go/kinora/provider"
)

// NewTool returns a runner of the zero Source, as ApplyParked makes it.
func NewTool[Tx any](db provider.Units[Tx], cfg RunnerConfig, ps ...*Projector[Tx]) (*Runner, error) {
	return newRunner(db, Source{}, cfg, ps...)
}

// OwnProcess makes r behave as the only runner of its process.
func OwnProcess(r *Runner) { ShareProcess(r) }

// ShareProcess makes runners behave as the only runners of one process.
func ShareProcess(runners ...*Runner) {
	one := new(sync.RWMutex)
	for _, r := range runners {
		r.crashes.Process = one
	}
}
