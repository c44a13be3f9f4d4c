package provider

import "fmt"

// NewerError is returned by Migrate and Ready of a provider, and so by relays and runners when they
// start: a newer program has migrated the database, and this one does not know its tables. Nothing
// was changed.
type NewerError struct {
	Database int64 // the version of the database's schema
	Program  int64 // the newest version that this program knows
}

func (e *NewerError) Error() string {
	return fmt.Sprintf("the database's schema has version %d, and this program knows versions up to %d: "+
		"deploy the program that migrated the database, or a later one", e.Database, e.Program)
}
