// Package transfers moves money between accounts.
package transfers

import (
	"errors"

	"github.com/kinora-go/kinora/eventstore"
)

// Events of an account. Transfer is the id of the transfer, or of another cause.
type (
	// Deposited is the event of money that came in.
	Deposited struct {
		Transfer string
		Cents    int64
	}
	// Withdrawn is the event of money that went out.
	Withdrawn struct {
		Transfer string
		Cents    int64
	}
	// Returned is the event of money that came back, because the other account did not take it.
	Returned struct {
		Transfer string
		Cents    int64
	}
	// Closed is the event of an account that takes no more money.
	Closed struct{}
)

// Types gives each event its stored name.
var Types = eventstore.NewTypes(
	eventstore.Type[Deposited]("account.deposited"),
	eventstore.Type[Withdrawn]("account.withdrawn"),
	eventstore.Type[Returned]("account.returned"),
	eventstore.Type[Closed]("account.closed"),
)

// Reasons to refuse a transfer.
var (
	ErrFunds  = errors.New("the account has too little money")
	ErrClosed = errors.New("the account is closed")
)

// Account is the state of one account.
type Account struct {
	Cents  int64
	closed bool
	known  map[string]bool // transfers of this account
}

// Apply adds one event to the state.
func (a *Account) Apply(event any) {
	switch e := event.(type) {
	case Deposited:
		a.Cents += e.Cents
		a.known[e.Transfer] = true
	case Withdrawn:
		a.Cents -= e.Cents
		a.known[e.Transfer] = true
	case Returned:
		a.Cents += e.Cents
	case Closed:
		a.closed = true
	}
}

// Withdraw takes money out for a transfer. A repeated command changes nothing.
func (a *Account) Withdraw(transfer string, cents int64) ([]any, error) {
	switch {
	case a.known[transfer]:
		return nil, nil
	case a.closed:
		return nil, ErrClosed
	case a.Cents < cents:
		return nil, ErrFunds
	}
	return []any{Withdrawn{transfer, cents}}, nil
}

// Deposit adds the money of a transfer. A repeated command changes nothing.
func (a *Account) Deposit(transfer string, cents int64) ([]any, error) {
	switch {
	case a.known[transfer]:
		return nil, nil
	case a.closed:
		return nil, ErrClosed
	}
	return []any{Deposited{transfer, cents}}, nil
}

// Close closes the account.
func (a *Account) Close() ([]any, error) {
	if a.closed {
		return nil, nil
	}
	return []any{Closed{}}, nil
}
