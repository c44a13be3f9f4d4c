package taskrow

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/provider"
)

// IsOf reports whether r was added as d, outside of a group.
func (r *Row) IsOf(d *provider.TaskDraft) bool {
	return r.ID == d.ID && r.Kind == d.Kind && r.Group == "" && check.SameJSON(r.Input, d.Input)
}

// Digest identifies the ids, the kinds and the inputs of tasks, in any order. It is stored with their group: tasks may
// be deleted before the group.
func Digest(tasks []provider.TaskDraft) string {
	all := make([][3]string, len(tasks))
	for i, d := range tasks {
		all[i] = [3]string{d.ID, d.Kind, string(check.ComparableJSON(d.Input))}
	}
	slices.SortFunc(all, func(a, b [3]string) int { return strings.Compare(a[0], b[0]) })
	text, _ := json.Marshal(all) // cannot fail
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// IsGroup reports whether the stored group, which has this digest, was added as g.
func IsGroup(stored provider.TaskGroup, digest string, g provider.TaskGroupDraft) bool {
	return stored.Kind == g.Kind && digest == Digest(g.Tasks) && check.SameJSON(stored.Data, g.Data)
}
