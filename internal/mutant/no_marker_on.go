//go:build mutant_no_marker

package mutant

// NoMarker: units of work write no markers.
const NoMarker = true
