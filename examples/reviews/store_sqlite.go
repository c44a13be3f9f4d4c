package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/kinora-go/kinora/task"
)

// sqliteStore keeps events, outbox and read models in one file.
type sqliteStore struct{ *sqlite.DB }

var (
	_ serviceStore = (*sqliteStore)(nil)
	_ demoStore    = (*sqliteStore)(nil)
)

// createSQLite opens a file, and creates it and Kinora's tables if they are missing. The runner
// creates those of the read model.
func createSQLite(ctx context.Context, path string, route outbox.Route) (*sqliteStore, error) {
	db, err := sqlite.Open(ctx, path, &sqlite.Config{Route: route})
	if err != nil {
		return nil, err
	}
	if err := db.Migrate(ctx); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return &sqliteStore{db}, nil
}

// openSQLite opens a file that createSQLite prepared. It creates nothing.
func openSQLite(ctx context.Context, path string) (*sqliteStore, error) {
	if info, err := os.Stat(path); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file: give the path of a SQLite file", path)
	}
	db, err := sqlite.Open(ctx, path, nil)
	if err != nil {
		return nil, err
	}
	const find = `select count(*) from sqlite_master where name in ('ratings', 'latest_reviews')`
	var tables int
	if err := db.SQL().QueryRowContext(ctx, find).Scan(&tables); err != nil {
		return nil, errors.Join(fmt.Errorf("find the read model in %s: %w", path, err), db.Close())
	}
	if tables != 2 {
		return nil, errors.Join(fmt.Errorf("%s has no read model of reviews: import a file first", path), db.Close())
	}
	return &sqliteStore{db}, nil
}

func (s *sqliteStore) inTx(ctx context.Context, fn func(eventstore.TxStore) error) error {
	return s.Transact(ctx, func(_ context.Context, tx *sql.Tx) error { return fn(s.InTx(tx)) })
}

var sqliteReviews = serviceReviews[*sql.Tx](sqliteModel{})

func (s *sqliteStore) createReadModel(ctx context.Context) error {
	return sqliteReviews.Create(ctx, s.DB, nil)
}

func (s *sqliteStore) runner(src projector.Source) (*projector.Runner, error) {
	return projector.NewRunner(s.DB, src, projector.RunnerConfig{Lease: lease}, sqliteReviews)
}

func (s *sqliteStore) moderation(m moderation) ([]kinora.Service, error) {
	return moderationServices(s.DB, func(tx *sql.Tx) eventstore.TxStore { return s.InTx(tx) }, m)
}

func (s *sqliteStore) answer(ctx context.Context, a task.Answer) (out task.Outcome, err error) {
	err = s.Transact(ctx, func(ctx context.Context, tx *sql.Tx) error {
		out, err = s.TasksIn(tx).Answer(ctx, a)
		return err
	})
	return out, err
}

func (s *sqliteStore) applyParked(ctx context.Context) error {
	return sqliteReviews.ApplyParked(ctx, s.DB, nil)
}

func (s *sqliteStore) dryRun(ctx context.Context, f projector.ParkedFilter) (*projector.DryRun, error) {
	return sqliteReviews.DryRun(ctx, s.DB, f, nil)
}

func (s *sqliteStore) plan(ctx context.Context, how projector.RebuildHow) (*projector.Plan, error) {
	return sqliteReviews.Plan(ctx, s.DB, how, nil)
}

func (s *sqliteStore) generations(ctx context.Context) ([]projector.Generation, error) {
	return sqliteReviews.Generations(ctx, s.DB)
}

func (s *sqliteStore) verify(ctx context.Context, v projector.Verification) (*projector.Verified, error) {
	return sqliteReviews.Verify(ctx, s.DB, v, nil)
}

func (s *sqliteStore) wait(ctx context.Context, at eventstore.Appended) error {
	return sqliteReviews.Wait(ctx, s.DB, at)
}

func (s *sqliteStore) lag(ctx context.Context) (projector.Lag, error) {
	return sqliteReviews.Lag(ctx, s.DB)
}

func (s *sqliteStore) createDemoTables(ctx context.Context) error {
	return createDemoTables[*sql.Tx](ctx, s.DB, sqliteModel{tables{exactPrefix}}, sqliteModel{tables{controlPrefix}})
}

func (s *sqliteStore) demoRunner(src projector.Source, t *trace) (*projector.Runner, error) {
	return newDemoRunner(s.DB, src, t, sqliteModel{tables{exactPrefix}}, sqliteModel{tables{controlPrefix}})
}

// sqliteModel writes the read models.
type sqliteModel struct{ tables }

func (m sqliteModel) create(ctx context.Context, tx *sql.Tx) error {
	_, err := tx.ExecContext(ctx, strings.NewReplacer("{ratings}", m.ratings(ctx), "{latest}", m.latest(ctx)).Replace(`
		create table {ratings} (
			product text primary key,
			reviews integer not null,
			stars integer not null
		) strict, without rowid;
		create table {latest} (
			product text not null,
			author text not null,
			stars integer not null,
			summary text not null,
			excerpt text not null,
			reviewed_at integer not null, -- milliseconds since 1970
			primary key (product, author)
		) strict, without rowid;
		create index {latest}_newest on {latest} (product, reviewed_at desc);
		create index {latest}_newest_of_all on {latest} (reviewed_at desc, product, author)`))
	return err
}

func (m sqliteModel) add(ctx context.Context, tx *sql.Tx, product string, reviews, stars int) error {
	_, err := tx.ExecContext(ctx, `
		insert into `+m.ratings(ctx)+` (product, reviews, stars) values (?1, ?2, ?3)
		on conflict (product) do update set reviews = reviews + ?2, stars = stars + ?3`, product, reviews, stars)
	return err
}

func (m sqliteModel) put(ctx context.Context, tx *sql.Tx, s currentReview) error {
	_, err := tx.ExecContext(ctx, `
		insert into `+m.latest(ctx)+` (product, author, stars, summary, excerpt, reviewed_at)
		values (?1, ?2, ?3, ?4, ?5, ?6)
		on conflict (product, author) do update set stars = ?3, summary = ?4, excerpt = ?5, reviewed_at = ?6`,
		s.Product, s.Author, s.Stars, s.Summary, s.Excerpt, s.ReviewedAt.UnixMilli())
	return err
}

func (m sqliteModel) remove(ctx context.Context, tx *sql.Tx, product, author string) error {
	_, err := tx.ExecContext(ctx, `delete from `+m.latest(ctx)+` where product = ?1 and author = ?2`, product, author)
	return err
}

func (s *sqliteStore) ratings(ctx context.Context, prefix string) ([]rating, error) {
	return query(ctx, s.SQL(), scanRating, `select product, reviews, stars from `+prefix+`ratings order by product`)
}

func scanRating(rows *sql.Rows) (r rating, err error) {
	err = rows.Scan(&r.Product, &r.Reviews, &r.Stars)
	return r, err
}

func (s *sqliteStore) products(ctx context.Context, after string, limit int) ([]rating, error) {
	return query(ctx, s.SQL(), scanRating, `
		select product, reviews, stars from ratings where product > ?1 and reviews > 0 order by product limit ?2`, after, limit)
}

// product uses one statement, so that both results are of one snapshot.
func (s *sqliteStore) product(ctx context.Context, product string, limit int) (r rating, latest []currentReview, err error) {
	r.Product = product
	rows, err := query(ctx, s.SQL(), func(rows *sql.Rows) (one currentReview, err error) {
		var at int64
		err = rows.Scan(&r.Reviews, &r.Stars, &one.Author, &one.Stars, &one.Summary, &one.Excerpt, &at)
		one.Product, one.ReviewedAt = product, time.UnixMilli(at).UTC()
		return one, err
	}, `
		select r.reviews, r.stars, coalesce(l.author, ''), coalesce(l.stars, 0), coalesce(l.summary, ''), coalesce(l.excerpt, ''), coalesce(l.reviewed_at, 0)
		from ratings r left join (
			select author, stars, summary, excerpt, reviewed_at from latest_reviews
			where product = ?1 order by reviewed_at desc, author limit ?2) l
		where r.product = ?1 order by l.reviewed_at desc, l.author`, product, limit)
	return r, withoutEmptyRow(rows), err
}

func (s *sqliteStore) newest(ctx context.Context, limit int) ([]currentReview, error) {
	return query(ctx, s.SQL(), func(rows *sql.Rows) (r currentReview, err error) {
		var at int64
		err = rows.Scan(&r.Product, &r.Author, &r.Stars, &r.Summary, &r.Excerpt, &at)
		r.ReviewedAt = time.UnixMilli(at).UTC()
		return r, err
	}, `
		select product, author, stars, summary, excerpt, reviewed_at from latest_reviews
		order by reviewed_at desc, product, author limit ?1`, limit)
}

// query scans all rows.
func query[T any](ctx context.Context, db *sql.DB, scan func(*sql.Rows) (T, error), stmt string, args ...any) (all []T, err error) {
	rows, err := db.QueryContext(ctx, stmt, args...)
	if err != nil {
		return nil, fmt.Errorf("query the read model: %w", err)
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		one, err := scan(rows)
		if err != nil {
			return nil, fmt.Errorf("query the read model: %w", err)
		}
		all = append(all, one)
	}
	return all, rows.Err()
}
