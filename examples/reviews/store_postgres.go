package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/task"
)

// postgresStore keeps events, outbox and read models in one database. The read model may be in Redis
// instead.
type postgresStore struct {
	*postgres.DB
	projection
}

var (
	_ serviceStore = (*postgresStore)(nil)
	_ demoStore    = (*postgresStore)(nil)
)

// createPostgres connects, and creates Kinora's tables if they are missing. The runner creates those
// of the read model.
func createPostgres(ctx context.Context, d database, route outbox.Route) (*postgresStore, error) {
	db, err := postgres.Open(ctx, d.path, &postgres.Config{Route: route})
	if err != nil {
		return nil, err
	}
	if err := db.Migrate(ctx); err != nil {
		db.Close()
		return nil, err
	}
	return newPostgresStore(ctx, d, db)
}

func (s *postgresStore) operated() operated { return s.DB }

func (s *postgresStore) migrationSQL() (string, error) { return postgres.MigrationSQL("kinora") }

// openPostgres opens a database that createPostgres prepared. It creates nothing.
func openPostgres(ctx context.Context, d database) (*postgresStore, error) {
	db, err := postgres.Open(ctx, d.path, nil)
	if err != nil {
		return nil, err
	}
	return newPostgresStore(ctx, d, db)
}

// newPostgresStore closes db if it returns an error.
func newPostgresStore(ctx context.Context, d database, db *postgres.DB) (*postgresStore, error) {
	if d.redis != (redisKeys{}) {
		p, err := openRedis(ctx, d.redis, db)
		if err != nil {
			db.Close()
			return nil, err
		}
		return &postgresStore{db, p}, nil
	}
	return &postgresStore{db, &projectionOf[pgx.Tx]{
		reader: postgresReader{db.Pool()}, reviews: postgresReviews, db: db, read: db, transact: db.Transact,
		exact: postgresModel{tables{exactPrefix}}, control: postgresModel{tables{controlPrefix}},
	}}, nil
}

func (s *postgresStore) Close() error {
	err := s.closeProjection()
	s.DB.Close()
	return err
}

func (s *postgresStore) inTx(ctx context.Context, fn func(eventstore.TxStore) error) error {
	return s.Transact(ctx, func(_ context.Context, tx pgx.Tx) error { return fn(s.InTx(tx)) })
}

func (s *postgresStore) moderation(m moderation) ([]kinora.Service, error) {
	return moderationServices(s.DB, func(tx pgx.Tx) eventstore.TxStore { return s.InTx(tx) }, m)
}

func (s *postgresStore) answer(ctx context.Context, a task.Answer) (out task.Outcome, err error) {
	err = s.Transact(ctx, func(ctx context.Context, tx pgx.Tx) error {
		out, err = s.TasksIn(tx).Answer(ctx, a)
		return err
	})
	return out, err
}

var postgresReviews = serviceReviews[pgx.Tx](reviewsProjector, sqlTables, postgresModel{})

// postgresModel writes the read models.
type postgresModel struct{ tables }

func (m postgresModel) create(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, strings.NewReplacer("{ratings}", m.ratings(ctx), "{latest}", m.latest(ctx)).Replace(`
		create table {ratings} (
			product text collate "C" primary key,
			reviews bigint not null,
			stars bigint not null
		) with (fillfactor = 50);
		create table {latest} (
			product text collate "C" not null,
			author text collate "C" not null,
			stars int not null,
			summary text not null,
			excerpt text not null,
			reviewed_at timestamptz not null,
			primary key (product, author)
		);
		create index {latest}_newest on {latest} (product, reviewed_at desc);
		create index {latest}_newest_of_all on {latest} (reviewed_at desc, product, author)`))
	return err
}

func (m postgresModel) add(ctx context.Context, tx pgx.Tx, product string, reviews, stars int) error {
	_, err := tx.Exec(ctx, `
		insert into `+m.ratings(ctx)+` as r (product, reviews, stars) values ($1, $2, $3)
		on conflict (product) do update set reviews = r.reviews + excluded.reviews, stars = r.stars + excluded.stars`,
		product, reviews, stars)
	return err
}

func (m postgresModel) put(ctx context.Context, tx pgx.Tx, s currentReview) error {
	_, err := tx.Exec(ctx, `
		insert into `+m.latest(ctx)+` (product, author, stars, summary, excerpt, reviewed_at)
		values ($1, $2, $3, $4, $5, $6)
		on conflict (product, author) do update set stars = excluded.stars, summary = excluded.summary,
			excerpt = excluded.excerpt, reviewed_at = excluded.reviewed_at`,
		s.Product, s.Author, s.Stars, s.Summary, s.Excerpt, s.ReviewedAt)
	return err
}

func (m postgresModel) remove(ctx context.Context, tx pgx.Tx, product, author string) error {
	_, err := tx.Exec(ctx, `delete from `+m.latest(ctx)+` where product = $1 and author = $2`, product, author)
	return err
}

// postgresReader reads the read model.
type postgresReader struct{ db *pgxpool.Pool }

func (r postgresReader) ratings(ctx context.Context, prefix string) ([]rating, error) {
	return queryPostgres(ctx, r.db, pgx.RowToStructByPos[rating], `select product, reviews, stars from `+prefix+`ratings order by product`)
}

func (r postgresReader) products(ctx context.Context, after string, limit int) ([]rating, error) {
	return queryPostgres(ctx, r.db, pgx.RowToStructByPos[rating], `
		select product, reviews, stars from ratings where product > $1 and reviews > 0 order by product limit $2`, after, limit)
}

func (r postgresReader) best(ctx context.Context, limit int) ([]rating, error) {
	return queryPostgres(ctx, r.db, pgx.RowToStructByPos[rating], `
		select product, reviews, stars from ratings where reviews > 0 order by stars desc, product limit $1`, limit)
}

// product uses one statement, so that both results are of one snapshot.
func (r postgresReader) product(ctx context.Context, product string, limit int) (of rating, latest []currentReview, err error) {
	of.Product = product
	rows, err := queryPostgres(ctx, r.db, func(row pgx.CollectableRow) (one currentReview, err error) {
		err = row.Scan(&of.Reviews, &of.Stars, &one.Author, &one.Stars, &one.Summary, &one.Excerpt, &one.ReviewedAt)
		one.Product, one.ReviewedAt = product, one.ReviewedAt.Truncate(time.Millisecond).UTC()
		return one, err
	}, `
		select r.reviews, r.stars, coalesce(l.author, ''), coalesce(l.stars, 0), coalesce(l.summary, ''), coalesce(l.excerpt, ''), coalesce(l.reviewed_at, 'epoch')
		from ratings r left join (
			select author, stars, summary, excerpt, reviewed_at from latest_reviews
			where product = $1 order by reviewed_at desc, author limit $2) l on true
		where r.product = $1 order by l.reviewed_at desc, l.author`, product, limit)
	return of, withoutEmptyRow(rows), err
}

func (r postgresReader) newest(ctx context.Context, limit int) ([]currentReview, error) {
	return queryPostgres(ctx, r.db, func(row pgx.CollectableRow) (currentReview, error) {
		one, err := pgx.RowToStructByPos[currentReview](row)
		one.ReviewedAt = one.ReviewedAt.Truncate(time.Millisecond).UTC()
		return one, err
	}, `
		select product, author, stars, summary, excerpt, reviewed_at from latest_reviews
		order by reviewed_at desc, product, author limit $1`, limit)
}

// postgresUnavailable reports whether the database is unreachable, is starting or stopping, or has
// no free connection.
func postgresUnavailable(err error) bool {
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return true
	}
	if _, ok := errors.AsType[net.Error](err); ok {
		return true
	}
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (strings.HasPrefix(pg.Code, "08") || strings.HasPrefix(pg.Code, "53") || strings.HasPrefix(pg.Code, "57"))
}

func queryPostgres[T any](ctx context.Context, db *pgxpool.Pool, scan pgx.RowToFunc[T], stmt string, args ...any) ([]T, error) {
	rows, err := db.Query(ctx, stmt, args...)
	if err == nil {
		var all []T
		if all, err = pgx.CollectRows(rows, scan); err == nil {
			return all, nil
		}
	}
	return nil, fmt.Errorf("query the read model: %w", err)
}
