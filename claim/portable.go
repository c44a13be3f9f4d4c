package claim

import "context"

// Portable claims with one read and one guarded update a row, in the order that candidates gives.
//   - take must re-assert in its own atomic statement all that made the row a candidate; a lost race is
//     (row, false, nil), and the row is skipped.
//   - alone, where not nil, tells whether a row must be claimed with no other: such a row is taken if it is
//     the first, and ends the claim before it otherwise.
//   - An error ends the claim; the rows taken until then are returned with it and stay claimed.
func Portable[R any](ctx context.Context, t Terms,
	candidates func(ctx context.Context, limit int) ([]R, error),
	take func(ctx context.Context, row R, t Terms) (R, bool, error),
	alone func(row R) bool,
) ([]R, error) {
	rows, err := candidates(ctx, t.Limit)
	if err != nil {
		return nil, err
	}
	taken := make([]R, 0, len(rows))
	for _, row := range rows {
		single := alone != nil && alone(row)
		if single && len(taken) > 0 {
			break
		}
		got, ok, err := take(ctx, row, t)
		if err != nil {
			return taken, err
		}
		if !ok {
			continue
		}
		taken = append(taken, got)
		if single {
			break
		}
	}
	return taken, nil
}
