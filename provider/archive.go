package provider

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/eventstore"
)

// Passed is the check of Archive in a store. behind has the projectors that take an event of the stream
// that is to be deleted, and whose checkpoint is before it, except those of retired generations. If
// ArchiveOptions.Ignore does not have all of them, the error is eventstore.ErrNotPassed with their names.
func Passed(behind []string, o eventstore.ArchiveOptions) error {
	behind = slices.DeleteFunc(slices.Clone(behind), func(name string) bool { return slices.Contains(o.Ignore, name) })
	if len(behind) == 0 {
		return nil
	}
	slices.Sort(behind)
	return fmt.Errorf("%w: %s. Wait for them, or name those that no longer run in Ignore",
		eventstore.ErrNotPassed, strings.Join(slices.Compact(behind), ", "))
}
