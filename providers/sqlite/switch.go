package sqlite

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/provider"
)

const busyAfter = time.Second // a unit with Switch waits this long for other writers

// errSnapshot rolls a snapshot back.
var errSnapshot = errors.New("it was a snapshot")

// doSwitch is Do for a unit with Switch. Its transaction is immediate also with Snapshot, because
// it writes: other writers wait, as for each unit.
func (d *Provider) doSwitch(ctx context.Context, p *provider.Unit, run runFunc) error {
	if err := provider.CheckSwitch(p); err != nil {
		return invalidSwitch(err)
	}
	wait, cancel := context.WithTimeout(ctx, busyAfter)
	defer cancel()
	if p.Switch.Snapshot {
		wait = ctx
	}
	err := d.writeTxWithin(ctx, wait, func(u *unit) error { return u.workSwitch(ctx, p, run) })
	switch at, _ := errors.AsType[step](err); {
	case errors.Is(err, errSnapshot):
		return nil
	case at == beginning && wait.Err() != nil && ctx.Err() == nil:
		return &provider.Error{Class: provider.ClassTransient, Code: provider.CodeBusy, Err: err}
	}
	return unitError(ctx, err)
}

func invalidSwitch(err error) error {
	return &provider.Error{Class: provider.ClassPermanent, Code: "invalid", Err: err}
}

// workSwitch runs the steps of a unit with Switch.
func (u *unit) workSwitch(ctx context.Context, p *provider.Unit, run runFunc) error {
	stored, err := generationsOf(ctx, u, p.Projector)
	if err != nil {
		return inStep("open", err)
	}
	if err := p.OpenSwitch(u.within(ctx), stored, u.live); err != nil { // this context reads through a pool of one connection
		return err
	}
	if err := checkUnit(p); err != nil {
		return err
	}
	if err := u.work(ctx, p, run); err != nil {
		return err
	}
	if err := u.checkCreated(ctx, p.Switch.Create); err != nil {
		return err
	}
	if renamed := p.Switch.Rename; len(renamed) > 0 { // other tables would refer to rows that no program writes
		if _, err := u.unreferenced(ctx, tablesOf(mapSlice(renamed, func(p provider.TablePair) string { return p.Table }))); err != nil {
			return err
		}
	}
	err = p.Switch.Finish(provider.SwitchSteps{
		Rename:  func(p provider.TablePair) error { return wrap("rename "+p.Table, u.rename(ctx, p)) },
		Show:    func(p provider.TablePair) error { return wrap("show "+p.Table, u.show(ctx, p)) },
		Compare: func(c *provider.Comparison) error { return u.compare(ctx, c) },
		Set:     func(all []provider.Generation) error { return inStep("close", u.setGenerations(ctx, stored, all...)) },
	})
	if err == nil && p.Switch.Snapshot {
		err = errSnapshot
	}
	return err
}

// live reads a generation for Last.
func (u *unit) live(ctx context.Context, b provider.Build) (provider.Live, error) {
	c, err := wholeCheckpoint(ctx, u, b)
	return provider.Live{
		Checkpoint: c,
		Unapplied: func(ctx context.Context, messages []provider.Message) ([]bool, error) {
			return unapplied(ctx, u, b, messages)
		},
	}, inStep("open", err)
}

// reset deletes the rows of tables.
func (u *unit) reset(ctx context.Context, names []string) error {
	if len(names) == 0 {
		return nil
	}
	return wrap("reset "+strings.Join(names, ", "), u.empty(ctx, `delete from `, tablesOf(names)))
}

func (u *unit) show(ctx context.Context, p provider.TablePair) error {
	view := tableOf(p.Other).sql()
	_, err := u.tx.ExecContext(ctx, fmt.Sprintf(`drop view if exists %[1]s; create view %[1]s%[2]s`, view, asSelect(p.Table)))
	return err
}

// asSelect is the end of the statement that creates the view of a table.
func asSelect(table string) string { return ` as select * from ` + tableOf(table).sql() }

// rename renames a table, if it exists and is not a view. Views that show the table still do.
func (u *unit) rename(ctx context.Context, p provider.TablePair) error {
	from, to := tableOf(p.Table), tableOf(p.Other)
	if !strings.EqualFold(from.schema, to.schema) {
		return invalidSwitch(fmt.Errorf("%w: %s and %s are in different schemas", provider.ErrInput, p.Table, p.Other))
	}
	exists, err := u.isTable(ctx, from)
	if err == nil && exists {
		_, err = u.tx.ExecContext(ctx, fmt.Sprintf(`alter table %s rename to %s`, from.sql(), nameSQL(to.name)))
	}
	return err
}

const findTable = `
select true from pragma_table_list where schema = ?1 collate nocase and name = ?2 collate nocase and type <> 'view'`

func (u *unit) isTable(ctx context.Context, t tableName) (bool, error) {
	found, err := column[bool](ctx, u, findTable, t.schema, t.name)
	return slices.Contains(found, true), err
}

// tableOf parses a name that provider.CheckTables has checked.
func tableOf(name string) tableName {
	if schema, table, ok := strings.Cut(name, "."); ok {
		return tableName{schema, table}
	}
	return tableName{"main", name}
}

func tablesOf(names []string) []tableName {
	return mapSlice(names, tableOf)
}

func (t tableName) sql() string { return nameSQL(t.schema) + "." + nameSQL(t.name) }

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

// empty runs a statement that deletes the rows of tables: children first. Foreign keys are then checked at the commit. It
// returns an error if another table refers to them, because its rows would be changed or deleted.
func (u *unit) empty(ctx context.Context, statement string, tables []tableName) error {
	all, err := u.unreferenced(ctx, tables)
	if err == nil {
		_, err = u.tx.ExecContext(ctx, deferForeignKeys)
	}
	for _, t := range slices.Backward(parentsFirst(all, tables, func(t tableName) tableName { return t })) {
		if err == nil {
			_, err = u.tx.ExecContext(ctx, statement+t.sql())
		}
	}
	return err
}

// unreferenced returns the references of all tables, and an error if a table that is not one of tables refers to one of them.
func (u *unit) unreferenced(ctx context.Context, tables []tableName) ([]reference, error) {
	all, err := u.references(ctx)
	for _, r := range all {
		if isOneOf(r.to, tables) && !isOneOf(r.from, tables) {
			return nil, referenced(r, "it is not one of the projector's tables: remove the foreign key")
		}
	}
	return all, err
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
	plainly := mapSlice(created, plain)
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
