package memory

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/kinora-go/kinora/marker"
)

var _ marker.Keeper = (*DB)(nil)

// MarkedHandlers implements marker.Keeper.
func (db *DB) MarkedHandlers(ctx context.Context) ([]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("list handlers with markers: %w", err)
	}
	var names []string
	for at := range db.committed.Load().markers.from("") {
		if name := handlerOf(at); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// handlerOf is the first of a pair.
func handlerOf(pair string) string {
	size, both, _ := strings.Cut(pair, ":")
	n, _ := strconv.Atoi(size)
	return both[:n]
}

// DropMarkers implements marker.Keeper.
func (db *DB) DropMarkers(ctx context.Context, handler string, limit int) (n int, err error) {
	err = db.Tx(ctx, func(tx *Model) error {
		for at := range tx.staged.markers.from("") {
			if n < limit && handlerOf(at) == handler {
				tx.staged.markers = tx.staged.markers.drop(at)
				n++
			}
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("drop markers: %w", err)
	}
	return n, nil
}
