//go:build mutant_marker_apart

package mutant

// MarkerApart: markers are committed before the handler's transaction.
const MarkerApart = true
