package sqlite

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kinora-go/kinora/provider"
)

const (
	// dueParked lists the first messages of each lane in due: one, or up to ?3 if the first is held.
	dueParked        = `with due (lane, due_at) as materialized (` + dueLanes + firstOfDue
	dueParkedOfLanes = `with due (lane, due_at) as materialized (` + dueOfLanes + firstOfDue

	dueLanes = `
	select lane, due_at from kinora_holds indexed by kinora_holds_due
	where projector = ?1 and due_at <= ` + clock + ` order by due_at limit ?2`

	dueOfLanes = `
	select h.lane, h.due_at from json_each(?4) j cross join kinora_holds h
	where h.projector = ?1 and h.lane = unhex(j.value) and h.due_at <= ` + clock + ` order by h.due_at limit ?2`

	firstOfDue = `)
select ` + parkedColumns + `
from due
cross join kinora_parked f on f.id = (
	select id from kinora_parked indexed by kinora_parked_lane
	where open = 1 and projector = ?1 and lane = due.lane order by id limit 1)
cross join kinora_parked p on p.id in (
	select id from kinora_parked indexed by kinora_parked_lane
	where open = 1 and projector = ?1 and lane = due.lane and id <= iif(f.class = 'held', ` + never + `, f.id)
	order by id limit ?3)`
)

// Due implements provider.Parking.
func (d *DB) Due(ctx context.Context, f provider.DueFilter) (due []provider.Parked, err error) {
	if f.Keys <= 0 || f.Each <= 0 || f.Lanes != nil && len(f.Lanes) == 0 {
		return nil, nil
	}
	query, args := dueParked, []any{"", f.Keys, f.Each}
	if f.Lanes != nil {
		lanes := make([]string, len(f.Lanes))
		for i, l := range f.Lanes {
			lanes[i] = hexOf(l)
		}
		slices.Sort(lanes)
		query, args = dueParkedOfLanes, append(args, jsonOf(slices.Compact(lanes)))
	}
	for _, args[0] = range f.Projectors {
		listed, err := parkedOf(ctx, d.reads, query, args...)
		if err != nil {
			return nil, fmt.Errorf("list due messages: %w", err)
		}
		slices.SortFunc(listed, func(a, b provider.Parked) int {
			return cmp.Or(a.DueAt.Compare(b.DueAt), bytes.Compare(a.Lane[:], b.Lane[:]), cmp.Compare(a.Seq, b.Seq))
		})
		due = append(due, leading(listed)...)
	}
	return due, nil
}

// leading keeps, of each lane, the first message, or those up to the first one that is not held.
func leading(listed []provider.Parked) (due []provider.Parked) {
	var lane provider.Lane
	ended := false
	for i, p := range listed {
		first := i == 0 || p.Lane != lane
		lane, ended = p.Lane, ended && !first
		held := p.Class == provider.ClassHeld
		if p.State != provider.StateWaiting || !first && !held {
			ended = true
		}
		if !ended {
			due = append(due, p)
		}
		ended = ended || !held
	}
	return due
}

const (
	// tryParked counts an attempt at message ?1, or makes it stuck if ?2.
	tryParked = `update kinora_parked set attempts = attempts + iif(?2, 0, 1), state = iif(?2, 'stuck', state) where id = ?1`
	putOff    = `update kinora_holds set due_at = coalesce(` + clock + ` + ?3, ` + never + `) where projector = ?1 and lane = ?2`
)

// Try implements provider.Parking.
func (d *DB) Try(ctx context.Context, p provider.Parked, limit int, again time.Duration) (tried bool, err error) {
	err = d.inTurn(ctx, func(u *unit) error {
		live, err := u.live(ctx, p.Projector, []provider.Message{{Lane: p.Lane, Parked: &p}}, func(is provider.Parked, due bool) bool {
			return is.State == provider.StateWaiting && due
		})
		if err != nil || !live[0] {
			return err
		}
		if tried = limit < 0 || p.Attempts < limit; !tried {
			again = -1
		}
		if _, err := u.exec(ctx, tryParked, p.Seq, !tried); err != nil {
			return err
		}
		_, err = u.exec(ctx, putOff, p.Projector, p.Lane[:], millisOrNever(again))
		return err
	})
	if err != nil {
		return false, fmt.Errorf("try parked message %d: %w", p.Seq, err)
	}
	return tried, nil
}

// selected is the condition of a ParkedFilter: ?1 to ?9. ?10 is its limit (-1 for none), ?11 its projector.
const (
	selected = ` state in (select value from json_each(?1)) and id > ?2 and id <= ?3
	and (?4 = '' or handler = ?4)
	and (?5 = '' or key = ?5)
	and (?6 is null or class = ?6)
	and (?7 = '' or code = ?7)
	and (?8 is null or id in (select value from json_each(?8)))
	and (?9 is null or type in (select cast(unhex(value) as text) from json_each(?9)))
	and (?11 = '' or projector = ?11)`

	listParked     = `select ` + parkedColumns + ` from kinora_parked p where` + selected + ` order by id limit ?10`
	listUnresolved = `
select ` + parkedColumns + ` from kinora_parked p indexed by kinora_parked_open
where open = 1 and projector = ?11 and` + selected + ` order by id limit ?10`
)

// filterOf are the arguments of selected. They select nothing if none is true.
func filterOf(f provider.ParkedFilter, states []provider.ParkedState, limit int) (args []any, none bool) {
	after, upto := f.After, int64(math.MaxInt64)
	if len(f.Seqs) > 0 {
		after, upto = max(after, slices.Min(f.Seqs)-1), slices.Max(f.Seqs)
	}
	names := make([]string, len(states))
	for i, s := range states {
		names[i] = s.String()
	}
	var class, types any
	if f.Class != nil {
		class = f.Class.String()
	}
	if f.Types != nil {
		all := make([]string, len(f.Types)) // in hex, since a type may be no UTF-8
		for i, t := range f.Types {
			all[i] = hex.EncodeToString([]byte(t))
		}
		types = jsonOf(all)
	}
	none = len(states) == 0 || f.Seqs != nil && len(f.Seqs) == 0 || f.Types != nil && len(f.Types) == 0
	return []any{arrayOf(names), after, upto, f.Handler, f.Key, class, f.Code, anyOf(f.Seqs), types, limit, f.Projector}, none
}

// unresolvedStates are the states of rows that are open.
var unresolvedStates = []provider.ParkedState{provider.StateWaiting, provider.StateStuck}

func isResolved(s provider.ParkedState) bool { return !slices.Contains(unresolvedStates, s) }

// Parked implements provider.Parking.
func (d *DB) Parked(ctx context.Context, f provider.ParkedFilter) ([]provider.Parked, error) {
	limit, states := f.Limit, f.States
	if limit <= 0 {
		limit = defaultPage
	}
	if states == nil {
		states = unresolvedStates
	}
	args, none := filterOf(f, states, limit)
	if none {
		return nil, nil
	}
	query := listParked
	if f.Projector != "" && !slices.ContainsFunc(states, isResolved) {
		query = listUnresolved
	}
	parked, err := parkedOf(ctx, d.reads, query, args...)
	if err != nil {
		return nil, fmt.Errorf("list parked messages: %w", err)
	}
	return parked, nil
}

const (
	countParked   = `select count(*) from kinora_parked indexed by kinora_parked_open where open = 1`
	countParkedOf = countParked + ` and projector = ?1`
)

// ParkedCount is how many messages of a projector, or of all if it is empty, are waiting or stuck.
func (d *DB) ParkedCount(ctx context.Context, projector string) (n int64, err error) {
	query, args := countParked, []any(nil)
	if projector != "" {
		query, args = countParkedOf, []any{projector}
	}
	if err = one(ctx, d.reads, []any{&n}, query, args...); err != nil {
		return 0, fmt.Errorf("count parked messages: %w", err)
	}
	return n, nil
}

const parkedColumns = `p.id, p.projector, p.handler, p.handlers, p.message_id, p.topic, p.key, p.lane, p.type, p.payload, p.headers,
	p.class, p.code, p.attempts, p.version, p.parked_at, p.state, p.resolved_at, p.resolved_by, p.reason,
	(select nullif(h.due_at, ` + never + `) from kinora_holds h
		where h.projector = p.projector and h.lane = p.lane and p.open = 1)`

// parkedOf lists what a query that selects parkedColumns finds.
func parkedOf(ctx context.Context, q querier, query string, args ...any) (parked []provider.Parked, err error) {
	err = each(ctx, q, func(rows *sql.Rows) error {
		p, err := scanParked(rows)
		parked = append(parked, p)
		return err
	}, query, args...)
	if err != nil {
		return nil, err
	}
	return parked, nil
}

func scanParked(rows *sql.Rows) (p provider.Parked, err error) {
	var handlers, lane, headers []byte
	var class, state string
	var at int64
	var resolved, due sql.NullInt64
	err = rows.Scan(&p.Seq, &p.Projector, &p.Handler, &handlers, &p.MessageID, &p.Topic, &p.Key, &lane, &p.Type, &p.Payload, &headers,
		&class, &p.Code, &p.Attempts, &p.Version, &at, &state, &resolved, &p.By, &p.Reason, &due)
	if err != nil {
		return p, err
	}
	copy(p.Lane[:], lane)
	p.Class, p.State = provider.ParseClass(class), provider.ParseParkedState(state)
	p.At, p.ResolvedAt, p.DueAt = timeOf(at), timeOrZero(resolved), timeOrZero(due)
	if string(headers) != `{}` {
		p.Headers, err = parseHeaders(headers)
	}
	if string(handlers) != `[]` {
		err = errors.Join(err, json.Unmarshal(handlers, &p.Handlers))
	}
	if err != nil {
		return p, fmt.Errorf("parked message %d: %w", p.Seq, err)
	}
	return p, nil
}
