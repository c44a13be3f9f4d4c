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
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/kinora-go/kinora/task"
)

// sqliteStore keeps events, outbox and read models in one file. The read model may be in Redis instead.
type sqliteStore struct {
	*sqlite.DB
	projection
}

var (
	_ serviceStore = (*sqliteStore)(nil)
	_ demoStore    = (*sqliteStore)(nil)
)

// createSQLite opens a file, and creates it and Kinora's tables if they are missing. The runner
// creates those of the read model.
func createSQLite(ctx context.Context, d database, route outbox.Route) (*sqliteStore, error) {
	db, err := sqlite.Open(ctx, d.path, &sqlite.Config{Route: route})
	if err != nil {
		return nil, err
	}
	if err := db.Migrate(ctx); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return newSQLiteStore(ctx, d, db)
}

func (s *sqliteStore) operated() operated { return s.DB }

func (s *sqliteStore) migrationSQL() (string, error) { return sqlite.MigrationSQL(), nil }

// openSQLite opens a file that createSQLite prepared. It creates nothing.
func openSQLite(ctx context.Context, d database) (*sqliteStore, error) {
	if info, err := os.Stat(d.path); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file: give the path of a SQLite file", d.path)
	}
	db, err := sqlite.Open(ctx, d.path, nil)
	if err != nil {
		return nil, err
	}
	return newSQLiteStore(ctx, d, db)
}

// newSQLiteStore closes db if it returns an error.
func newSQLiteStore(ctx context.Context, d database, db *sqlite.DB) (*sqliteStore, error) {
	if d.redis != (redisKeys{}) {
		p, err := openRedis(ctx, d.redis, db)
		if err != nil {
			return nil, errors.Join(err, db.Close())
		}
		return &sqliteStore{db, p}, nil
	}
	return &sqliteStore{db, &projectionOf[*sql.Tx]{
		reader: sqliteReader{db.SQL()}, reviews: sqliteReviews, db: db, read: db, transact: db.Transact,
		exact: sqliteModel{tables{exactPrefix}}, control: sqliteModel{tables{controlPrefix}},
	}}, nil
}

func (s *sqliteStore) Close() error { return errors.Join(s.closeProjection(), s.DB.Close()) }

func (s *sqliteStore) inTx(ctx context.Context, fn func(eventstore.TxStore) error) error {
	return s.Transact(ctx, func(_ context.Context, tx *sql.Tx) error { return fn(s.InTx(tx)) })
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

var sqliteReviews = serviceReviews[*sql.Tx](reviewsProjector, sqlTables, sqliteModel{})

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

// sqliteReader reads the read model.
type sqliteReader struct{ db *sql.DB }

func (r sqliteReader) ratings(ctx context.Context, prefix string) ([]rating, error) {
	return query(ctx, r.db, scanRating, `select product, reviews, stars from `+prefix+`ratings order by product`)
}

func scanRating(rows *sql.Rows) (r rating, err error) {
	err = rows.Scan(&r.Product, &r.Reviews, &r.Stars)
	return r, err
}

func (r sqliteReader) products(ctx context.Context, after string, limit int) ([]rating, error) {
	return query(ctx, r.db, scanRating, `
		select product, reviews, stars from ratings where product > ?1 and reviews > 0 order by product limit ?2`, after, limit)
}

func (r sqliteReader) best(ctx context.Context, limit int) ([]rating, error) {
	return query(ctx, r.db, scanRating, `
		select product, reviews, stars from ratings where reviews > 0 order by stars desc, product limit ?1`, limit)
}

// product uses one statement, so that both results are of one snapshot.
func (r sqliteReader) product(ctx context.Context, product string, limit int) (of rating, latest []currentReview, err error) {
	of.Product = product
	rows, err := query(ctx, r.db, func(rows *sql.Rows) (one currentReview, err error) {
		var at int64
		err = rows.Scan(&of.Reviews, &of.Stars, &one.Author, &one.Stars, &one.Summary, &one.Excerpt, &at)
		one.Product, one.ReviewedAt = product, time.UnixMilli(at).UTC()
		return one, err
	}, `
		select r.reviews, r.stars, coalesce(l.author, ''), coalesce(l.stars, 0), coalesce(l.summary, ''), coalesce(l.excerpt, ''), coalesce(l.reviewed_at, 0)
		from ratings r left join (
			select author, stars, summary, excerpt, reviewed_at from latest_reviews
			where product = ?1 order by reviewed_at desc, author limit ?2) l
		where r.product = ?1 order by l.reviewed_at desc, l.author`, product, limit)
	return of, withoutEmptyRow(rows), err
}

func (r sqliteReader) newest(ctx context.Context, limit int) ([]currentReview, error) {
	return query(ctx, r.db, func(rows *sql.Rows) (one currentReview, err error) {
		var at int64
		err = rows.Scan(&one.Product, &one.Author, &one.Stars, &one.Summary, &one.Excerpt, &at)
		one.ReviewedAt = time.UnixMilli(at).UTC()
		return one, err
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
