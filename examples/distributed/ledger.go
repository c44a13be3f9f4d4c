package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/providers/postgres"
)

// ledger remembers in this process the amounts that it has appended to each account. It decides
// whether a read model is exact.
type ledger struct {
	db      *postgres.DB
	amounts map[string][]int64 // by stream, in order
	events  int
}

// appendTo appends some events to each of some accounts, with one call for each account.
func (l *ledger) appendTo(ctx context.Context, accounts, events int) error {
	for i := range accounts {
		stream := eventstore.StreamName(topic, fmt.Sprint(i))
		var batch []any
		var amounts []int64
		for n := range events {
			amount := int64((l.events+n)%97) - 40
			batch, amounts = append(batch, Moved{amount}), append(amounts, amount)
		}
		drafts, err := types.Encode(ctx, batch...)
		if err != nil {
			return err
		}
		// After an error the events may be stored. Appending them again is safe: see eventstore.Store.
		for try := 0; ; try++ {
			if _, err = l.db.Append(ctx, stream, eventstore.Expected(len(l.amounts[stream])), drafts); err == nil {
				break
			}
			if try == 50 || ctx.Err() != nil {
				return fmt.Errorf("append to %s: %w", stream, err)
			}
			time.Sleep(100 * time.Millisecond)
		}
		l.amounts[stream] = append(l.amounts[stream], amounts...)
		l.events += events
	}
	return nil
}

// comparison says how a read model differs from the ledger.
type comparison struct {
	applied   int      // events
	wrong     []string // accounts that have not exactly the events of the ledger
	unordered []string // accounts whose events were not applied in order
}

// compare compares the table of a read model with the ledger.
func (l *ledger) compare(ctx context.Context, table string) (comparison, error) {
	type row struct {
		Account string
		Balance int64
		History []int64
	}
	var c comparison
	rows, err := l.db.Pool().Query(ctx, fmt.Sprintf(`select account, balance, history from %s order by account`, table))
	if err != nil {
		return c, err
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	if err != nil {
		return c, err
	}
	missing := map[string]bool{}
	for stream := range l.amounts {
		missing[stream] = true
	}
	for _, r := range found {
		var balance int64
		var versions []int64
		for i, amount := range l.amounts[r.Account] {
			balance, versions = balance+amount, append(versions, int64(i+1))
		}
		c.applied += len(r.History)
		if !slices.IsSorted(r.History) {
			c.unordered = append(c.unordered, r.Account)
		}
		slices.Sort(r.History)
		if r.Balance != balance || !slices.Equal(r.History, versions) {
			c.wrong = append(c.wrong, r.Account)
		}
		delete(missing, r.Account)
	}
	for stream := range missing {
		c.wrong = append(c.wrong, stream)
	}
	return c, nil
}
