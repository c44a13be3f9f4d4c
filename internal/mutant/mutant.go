// Package mutant names the mechanisms that can be taken out by build tag, to show that a test fails without
// them. Every constant is false in an ordinary build, and what it guards is then not compiled in.
//
//	go test -tags mutant_no_marker -run TestConformance ./providers/sqlite   # must fail
package mutant
