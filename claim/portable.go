package claim

import "context"

// Portable claims rows with one read, and one guarded update per row, in the order of candidates.
//   - candidates reads at most limit rows that may be claimed.
//   - take checks again, in one atomic statement, everything that made the row a candidate, and
//     takes it. If another claim was faster, take returns (row, false, nil), and Portable skips
//     the row.
//   - alone reports whether a row must be claimed without others. If such a row is the first, it
//     is the only one that is taken; otherwise the claim ends before it. A nil alone means no
//     such rows.
//   - An error ends the claim. The rows taken before it are returned with it and stay claimed.
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
