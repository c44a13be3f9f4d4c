package postgres

import (
	"slices"
	"strings"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// reserved are the words that PostgreSQL does not accept as a schema name without quotes.
// pg_get_keywords lists them in the categories R and T. This is the list of version 15, plus
// system_user, which is reserved since version 16.
var reserved = strings.Fields(`
all analyse analyze and any array as asc asymmetric authorization binary both case cast check collate collation column concurrently
constraint create cross current_catalog current_date current_role current_schema current_time current_timestamp current_user default
deferrable desc distinct do else end except false fetch for foreign freeze from full grant group having ilike in initially inner
intersect into is isnull join lateral leading left like limit localtime localtimestamp natural not notnull null offset on only or
order outer overlaps placing primary references returning right select session_user similar some symmetric system_user table
tablesample then to trailing true union unique user using variadic verbose when where window with`)

// checkSchema returns an *eventstore.InvalidError for a name that SQL does not accept without quotes,
// and for a name of PostgreSQL's own schemas.
func checkSchema(name string) error {
	if err := provider.CheckName("schema", name); err != nil {
		return err
	}
	if strings.HasPrefix(name, "pg_") || name == "information_schema" {
		return &eventstore.InvalidError{Field: "schema", Reason: "the name belongs to PostgreSQL itself: choose another one"}
	}
	if slices.Contains(reserved, name) {
		return &eventstore.InvalidError{Field: "schema", Reason: "the name is a reserved word of PostgreSQL: choose another one"}
	}
	return nil
}
