package sqlite

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

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
	limit := busyAfter
	if p.Switch.Snapshot {
		limit = 0
	}
	err := d.writeTxWithin(ctx, limit, func(u *unit) error { return u.workSwitch(ctx, p, run) })
	if errors.Is(err, errSnapshot) {
		return nil
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
	if err := u.checkRenamed(ctx, p.Switch.Rename); err != nil {
		return err
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
	tables, err := u.beginEmptying(ctx, tablesOf(names))
	if err != nil {
		return wrap("reset "+strings.Join(names, ", "), err)
	}
	for _, t := range tables {
		if _, err := u.tx.ExecContext(ctx, `delete from `+t.sql()); err != nil {
			return wrap("reset "+t.name, err)
		}
	}
	return nil
}

func (u *unit) show(ctx context.Context, p provider.TablePair) error {
	view := tableOf(p.Other).sql()
	_, err := u.tx.ExecContext(ctx, fmt.Sprintf(`drop view if exists %[1]s; create view %[1]s as select * from %[2]s`, view, tableOf(p.Table).sql()))
	return err
}

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
	tables := make([]tableName, len(names))
	for i, name := range names {
		tables[i] = tableOf(name)
	}
	return tables
}

func (t tableName) sql() string { return nameSQL(t.schema) + "." + nameSQL(t.name) }
