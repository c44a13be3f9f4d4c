//go:build mutant_batch_on_conflict

package mutant

// BatchOnConflict: a unit in one round trip ignores a mark that is there instead of failing.
const BatchOnConflict = true
