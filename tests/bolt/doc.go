// Package bolt has, in its tests, a provider of the first two tiers on a file of bbolt, a key-value store. It
// shows what docs/providers.md asks for, and is no part of the library.
//
// Read bolt_test.go for transactions, table_test.go for the stored rows, events_test.go and entries_test.go
// for the first tier, and units_test.go, parked_test.go, records_test.go and progress_test.go for the second.
package bolt
