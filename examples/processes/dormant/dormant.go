// Package dormant marks customers who have not ordered for 90 days.
package dormant

import (
	"errors"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// After is how long after the last order a customer is dormant.
const After = 90 * 24 * time.Hour

// Events of a customer. Period counts from 1: it is one more after each time that the customer was
// dormant.
type (
	// Ordered is the event of a customer who placed an order.
	Ordered struct {
		Customer string
		Period   int
		At       time.Time
	}
	// Dormant is the event of a customer who has not ordered for 90 days.
	Dormant struct{ Customer string }
	// Left is the event of a customer who closed the account.
	Left struct {
		Customer string
		Period   int
	}
)

// Types gives each event its stored name.
var Types = eventstore.NewTypes(
	eventstore.Type[Ordered]("customer.ordered"),
	eventstore.Type[Dormant]("customer.dormant"),
	eventstore.Type[Left]("customer.left"),
)

// Customer is the state of one customer.
type Customer struct {
	id     string
	period int
	last   time.Time // of the last order
	left   bool
}

// Apply adds one event to the state.
func (c *Customer) Apply(event any) {
	switch e := event.(type) {
	case Ordered:
		c.last = e.At
	case Dormant:
		c.period++
	case Left:
		c.left = true
	}
}

// Order places an order.
func (c *Customer) Order(at time.Time) ([]any, error) {
	if c.left {
		return nil, errors.New("the customer has left")
	}
	return []any{Ordered{c.id, c.period, at.UTC()}}, nil
}

// Leave closes the account.
func (c *Customer) Leave() ([]any, error) {
	if c.left {
		return nil, nil
	}
	return []any{Left{c.id, c.period}}, nil
}

// errOrdered passes without help: the projector is about to postpone the timer.
var errOrdered = &provider.Error{
	Class: provider.ClassTransient, Code: "ordered", Err: errors.New("there is a newer order"),
}

// Expire makes the customer dormant, unless that is not true, or no longer true.
func (c *Customer) Expire(period int, now time.Time) ([]any, error) {
	switch {
	case c.left || c.period != period:
		return nil, nil
	case now.Before(c.last.Add(After)):
		return nil, errOrdered
	}
	return []any{Dormant{c.id}}, nil
}
