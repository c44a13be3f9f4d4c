package commands

import (
	"fmt"
	"strings"

	"github.com/kinora-go/kinora/internal/filters"
)

// selects returns an error unless an act selects rows, by a list of package filters or, if hasAll, with --all alone.
func selects(list any, all, hasAll bool) error {
	if (filters.Selected(list) != "") != all {
		return nil
	}
	var flags []string
	for _, f := range filters.Fields(list) {
		if f.Selects {
			flags = append(flags, "--"+f.Name)
		}
	}
	last := len(flags) - 1
	message := "select with " + strings.Join(flags[:last], ", ") + " or " + flags[last]
	if hasAll {
		message += ", or use --all alone"
	}
	return fmt.Errorf("%s", message)
}
