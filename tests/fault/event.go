package main

import (
	"github.com/kinora-go/kinora/eventstore"
)

// moved is the only event type: the n-th command of a stream, and the amount that it adds to the
// stream's sum.
type moved struct {
	Command string `json:"command"`
	Stream  string `json:"stream"`
	N       int    `json:"n"`
	Amount  int64  `json:"amount"`
}

const (
	category = "account"
	movedAs  = "moved"
)

var types = eventstore.NewTypes(eventstore.Type[moved](movedAs))

// tables are the read models of the projector with markers and of the control without.
const tables = `
create table sums (stream text primary key, total bigint not null) with (fillfactor = 50);
create table lists (stream text primary key, items int[] not null) with (fillfactor = 50);
create table control_sums (like sums including all);
create table control_lists (like lists including all)`

// applySQL adds to a sum and appends to a list, so that a lost, doubled or misordered event shows.
const applySQL = `
with s as (
	insert into %[1]ssums as s (stream, total) values ($1, $3)
	on conflict (stream) do update set total = s.total + excluded.total)
insert into %[1]slists as l (stream, items) values ($1, array[$2::int])
on conflict (stream) do update set items = l.items || excluded.items`
