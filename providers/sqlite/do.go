package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"errors"

	"github.com/kinora-go/kinora/provider"
)

// runFunc is the function that Do calls between the opening and the closing of a unit.
type runFunc = func(ctx context.Context, tx *sql.Tx, found provider.Found) (provider.Closing, error)

// Keeps implements provider.Units.
func (d *Provider) Keeps() provider.Keeps {
	return provider.Keeps{Atomic: true, Markers: true, Output: true, DryRun: d.owned, Tables: true, Reset: true}
}

// Do implements provider.Units. It calls run once. run may read through SQL, but must write
// through tx. If ctx ends, the transaction is rolled back and the write lock released at once,
// even if run has not returned.
func (d *Provider) Do(ctx context.Context, p provider.Unit, run func(ctx context.Context, tx *sql.Tx, found provider.Found) (provider.Closing, error)) error {
	if err := checkUnit(&p); err != nil {
		return unitError(ctx, err)
	}
	switch {
	case p.Switch != nil:
		return d.doSwitch(ctx, &p, run)
	case p.DryRun != nil:
		return d.dryRun(ctx, &p, run)
	}
	return unitError(ctx, d.writeTx(ctx, func(u *unit) error { return u.work(ctx, &p, run) }))
}

// work opens p, runs it and closes it. The caller commits.
func (u *unit) work(ctx context.Context, p *provider.Unit, run runFunc) error {
	found, err := u.open(ctx, p)
	if err != nil {
		return inStep("open", err)
	}
	if p.Switch != nil {
		if err := u.reset(ctx, p.Switch.Reset); err != nil {
			return err
		}
	}
	closing, err := run(u.inside(ctx), u.tx, found)
	if err == nil && u.rolledBack.Load() {
		err = sql.ErrTxDone
	}
	if err != nil {
		return u.withMessage(err)
	}
	if err := p.CheckClosing(&closing); err != nil {
		return err
	}
	if closing.Output, err = u.db.normalize(ctx, closing.Output); err != nil {
		return err
	}
	return inStep("close", u.close(ctx, p, found, closing))
}

// withMessage adds to an error of run the message whose statement failed or ended the
// transaction.
func (u *unit) withMessage(err error) error {
	_, classed := errors.AsType[*provider.Error](err)
	of := int(u.message.Load())
	if classed || of < 0 || !u.rolledBack.Load() && codeOf(err) == 0 && !isTxEnded(err) {
		return err
	}
	return &provider.MessageError{Message: of, Err: err}
}

// checkUnit refuses markers whose handler or message id is invalid. It does not check messages
// without markers: a message can be parked whatever its id is.
func checkUnit(p *provider.Unit) error {
	for i, m := range p.Messages {
		err := provider.CheckText("message id", m.ID, provider.MaxIDBytes)
		for _, h := range m.Handlers {
			err = cmp.Or(err, provider.CheckText("handler", h.Name, provider.MaxIDBytes))
		}
		if m.Mark && err != nil {
			return &provider.MessageError{Message: i, Err: err}
		}
	}
	return nil
}
