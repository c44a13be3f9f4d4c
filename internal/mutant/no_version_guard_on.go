//go:build mutant_no_version_guard

package mutant

// NoVersionGuard: an append moves its stream's row whatever its version.
const NoVersionGuard = true
