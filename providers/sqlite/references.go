package sqlite

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/provider"
)

// reference is a foreign key.
type reference struct {
	from, to  tableName
	acts      bool // a delete of a row changes or deletes rows that refer to it, or fails at once
	restricts bool // it fails at once
}

const (
	// deferForeignKeys checks foreign keys at the commit. RESTRICT is still checked at once.
	deferForeignKeys = `pragma defer_foreign_keys = on`

	listReferences = `
select t.schema, t.name, f."table", lower(f.on_delete) <> 'no action', lower(f.on_delete) = 'restrict'
from pragma_table_list t, pragma_foreign_key_list(t.name, t.schema) f where t.type = 'table' and f.seq = 0`
)

// references returns the foreign keys of all tables.
func (u *unit) references(ctx context.Context) (all []reference, err error) {
	all, err = rowsOf(ctx, u, func(r *reference) []any {
		return []any{&r.from.schema, &r.from.name, &r.to.name, &r.acts, &r.restricts}
	}, listReferences)
	for i := range all {
		all[i].to.schema = all[i].from.schema
	}
	return all, err
}

func (t tableName) is(o tableName) bool {
	return strings.EqualFold(t.schema, o.schema) && strings.EqualFold(t.name, o.name)
}

func isOneOf(t tableName, tables []tableName) bool { return slices.ContainsFunc(tables, t.is) }

// referenced is the error of a table that another one refers to.
func referenced(r reference, why string) error {
	return &provider.Error{Class: provider.ClassPermanent, Code: provider.CodeReferenced,
		Err: fmt.Errorf("%w: table %s has a foreign key to %s: %s", provider.ErrInput, r.from.name, r.to.name, why)}
}

// beginEmptying returns tables in an order in which their rows can be deleted: children first. Foreign keys are then checked
// at the commit. It returns an error if another table refers to them, because its rows would be changed or deleted.
func (u *unit) beginEmptying(ctx context.Context, tables []tableName) ([]tableName, error) {
	all, err := u.references(ctx)
	if err != nil {
		return nil, err
	}
	if err := unreferenced(all, tables); err != nil {
		return nil, err
	}
	if _, err := u.tx.ExecContext(ctx, deferForeignKeys); err != nil {
		return nil, err
	}
	sorted := parentsFirst(all, tables, func(t tableName) tableName { return t })
	slices.Reverse(sorted)
	return sorted, nil
}

// checkRenamed returns an error if another table refers to one of those to rename: it would refer to rows that no program writes.
func (u *unit) checkRenamed(ctx context.Context, pairs []provider.TablePair) error {
	if len(pairs) == 0 {
		return nil
	}
	all, err := u.references(ctx)
	if err == nil {
		var tables []tableName
		for _, p := range pairs {
			tables = append(tables, tableOf(p.Table))
		}
		err = unreferenced(all, tables)
	}
	return err
}

// unreferenced returns an error if a table that is not one of tables refers to one of them.
func unreferenced(all []reference, tables []tableName) error {
	for _, r := range all {
		if isOneOf(r.to, tables) && !isOneOf(r.from, tables) {
			return referenced(r, "it is not one of the projector's tables: remove the foreign key")
		}
	}
	return nil
}

var numberOfGeneration = regexp.MustCompile(`_g[0-9]+$`)

// checkCreated returns an error if the foreign keys do not allow these tables of a new generation.
func (u *unit) checkCreated(ctx context.Context, names []string) error {
	if len(names) == 0 {
		return nil
	}
	all, err := u.references(ctx)
	if err != nil {
		return err
	}
	plain := func(t tableName) tableName {
		return tableName{t.schema, numberOfGeneration.ReplaceAllString(t.name, "")}
	}
	created := tablesOf(names)
	var plainly []tableName
	for _, t := range created {
		plainly = append(plainly, plain(t))
	}
	sorted := parentsFirst(all, created, func(t tableName) tableName { return t })
	for _, r := range all {
		from, to := slices.IndexFunc(sorted, r.from.is), slices.IndexFunc(sorted, r.to.is)
		switch {
		case from >= 0 && to < 0 && isOneOf(plain(r.to), plainly):
			return referenced(r, "it is a view, or a table of another generation: use projector.Table")
		case from < 0 && to >= 0:
			return referenced(r, "add the first one to Options.Tables")
		case from >= 0 && r.restricts && to >= from:
			return referenced(r, "SQLite cannot delete rows that refer to each other with RESTRICT: use NO ACTION")
		case !isOneOf(plain(r.from), plainly) && isOneOf(r.to, plainly):
			return referenced(r, "it is to be replaced by a view: remove the foreign key")
		}
	}
	return nil
}

// parentsFirst sorts tables by the foreign keys that are checked at once.
func parentsFirst[T any](all []reference, tables []T, of func(T) tableName) []T {
	return check.ParentsFirst(tables, func(child, parent T) bool {
		return slices.ContainsFunc(all, func(r reference) bool { return r.restricts && r.from.is(of(child)) && r.to.is(of(parent)) })
	})
}
