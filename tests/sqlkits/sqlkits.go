// Package sqlkits shows how sqlx, GORM and code that sqlc generates use a transaction of Kinora's PostgreSQL
// provider, and the other way round. Its tests run each with a server. It is a module of its own, so that
// applications do not inherit its requirements.
package sqlkits

import (
	"context"
	"database/sql"
	"errors"
	"strings"

	"github.com/jmoiron/sqlx"
	"github.com/jmoiron/sqlx/reflectx"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/clause"
	"gorm.io/gorm/logger"
)

// Rating is the row of a product in the read model.
type Rating struct {
	Product string `db:"product" gorm:"primaryKey"`
	Reviews int    `db:"reviews"`
	Stars   int    `db:"stars"`
}

// Schema creates the table of the read model.
const Schema = `create table ratings (product text primary key, reviews int not null, stars int not null)`

const addSQL = `insert into ratings as r (product, reviews, stars) values (:product, 1, :stars)
on conflict (product) do update set reviews = r.reviews + 1, stars = r.stars + excluded.stars`

// SQLX is code for sqlx.
type SQLX struct{ names *reflectx.Mapper }

// NewSQLX returns code for sqlx.
func NewSQLX() SQLX { return SQLX{reflectx.NewMapperFunc("db", strings.ToLower)} }

// Transact runs fn in a transaction of sqlx.
func (x SQLX) Transact(ctx context.Context, pool *sql.DB, fn func(tx *sql.Tx) error) (err error) {
	tx, err := sqlx.NewDb(pool, "pgx").BeginTxx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ended(tx.Rollback())) }()
	if err := fn(tx.Tx); err != nil {
		return err
	}
	return tx.Commit()
}

// Add adds a review. A sqlx.Tx that is made from a *sql.Tx does not know its driver, so named
// parameters are rebound here.
func (x SQLX) Add(ctx context.Context, tx *sql.Tx, product string, stars int) error {
	t := &sqlx.Tx{Tx: tx, Mapper: x.names}
	query, args, err := sqlx.Named(addSQL, Rating{Product: product, Stars: stars})
	if err != nil {
		return err
	}
	_, err = t.ExecContext(ctx, sqlx.Rebind(sqlx.DOLLAR, query), args...)
	return err
}

// Get reads the rating of a product.
func (x SQLX) Get(ctx context.Context, tx *sql.Tx, product string) (r Rating, err error) {
	t := &sqlx.Tx{Tx: tx, Mapper: x.names}
	return r, t.GetContext(ctx, &r, `select product, reviews, stars from ratings where product = $1`, product)
}

// GORM is code for GORM.
type GORM struct {
	Prepared bool // the service's *gorm.DB keeps prepared statements
}

func (g GORM) open(conn gorm.ConnPool, prepared bool) (*gorm.DB, error) {
	return gorm.Open(postgres.New(postgres.Config{Conn: conn}), &gorm.Config{PrepareStmt: prepared, Logger: logger.Discard})
}

// Transact runs fn in a transaction of GORM.
func (g GORM) Transact(ctx context.Context, pool *sql.DB, fn func(tx *sql.Tx) error) error {
	db, err := g.open(pool, g.Prepared)
	if err != nil {
		return err
	}
	return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		t, err := SQLTx(tx)
		if err != nil {
			return err
		}
		return fn(t)
	})
}

// SQLTx returns the transaction of GORM as database/sql has it.
func SQLTx(tx *gorm.DB) (*sql.Tx, error) {
	switch t := tx.Statement.ConnPool.(type) {
	case *sql.Tx:
		return t, nil
	case *gorm.PreparedStmtTX: // with PrepareStmt
		if t, ok := t.Tx.(*sql.Tx); ok {
			return t, nil
		}
	}
	return nil, errors.New("this *gorm.DB is no transaction of database/sql")
}

// Add adds a review, in a savepoint as nested transactions of GORM are. GORM accepts no PrepareStmt with a
// *sql.Tx.
func (g GORM) Add(ctx context.Context, tx *sql.Tx, product string, stars int) error {
	db, err := g.open(tx, false)
	if err != nil {
		return err
	}
	return db.WithContext(ctx).Transaction(func(db *gorm.DB) error {
		return db.Clauses(clause.OnConflict{Columns: []clause.Column{{Name: "product"}}, DoUpdates: clause.Assignments(map[string]any{
			"reviews": gorm.Expr("ratings.reviews + 1"), "stars": gorm.Expr("ratings.stars + excluded.stars"),
		})}).Create(&Rating{Product: product, Reviews: 1, Stars: stars}).Error
	})
}

// Get reads the rating of a product.
func (g GORM) Get(ctx context.Context, tx *sql.Tx, product string) (r Rating, err error) {
	db, err := g.open(tx, false)
	if err != nil {
		return r, err
	}
	return r, db.WithContext(ctx).First(&r, "product = ?", product).Error
}

// DBTX is what code that sqlc generates for database/sql requires: a *sql.DB or a *sql.Tx.
type DBTX interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
	PrepareContext(context.Context, string) (*sql.Stmt, error)
	QueryContext(context.Context, string, ...any) (*sql.Rows, error)
	QueryRowContext(context.Context, string, ...any) *sql.Row
}

// Queries is code as sqlc generates it.
type Queries struct{ db DBTX }

const addRating = `-- name: AddRating :exec
insert into ratings as r (product, reviews, stars) values ($1, 1, $2)
on conflict (product) do update set reviews = r.reviews + 1, stars = r.stars + excluded.stars`

// AddRating adds a review, with a prepared statement.
func (q *Queries) AddRating(ctx context.Context, product string, stars int) (err error) {
	s, err := q.db.PrepareContext(ctx, addRating)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	_, err = s.ExecContext(ctx, product, stars)
	return err
}

const getRating = `-- name: GetRating :one
select product, reviews, stars from ratings where product = $1`

// GetRating reads the rating of a product.
func (q *Queries) GetRating(ctx context.Context, product string) (Rating, error) {
	var r Rating
	err := q.db.QueryRowContext(ctx, getRating, product).Scan(&r.Product, &r.Reviews, &r.Stars)
	return r, err
}

// SQLC is code that uses Queries.
type SQLC struct{}

// Transact runs fn in a transaction of database/sql.
func (SQLC) Transact(ctx context.Context, pool *sql.DB, fn func(tx *sql.Tx) error) (err error) {
	tx, err := pool.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ended(tx.Rollback())) }()
	if err := fn(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// Add adds a review.
func (SQLC) Add(ctx context.Context, tx *sql.Tx, product string, stars int) error {
	return (&Queries{tx}).AddRating(ctx, product, stars)
}

// Get reads the rating of a product.
func (SQLC) Get(ctx context.Context, tx *sql.Tx, product string) (Rating, error) {
	return (&Queries{tx}).GetRating(ctx, product)
}

// ended returns nil for the error of a rollback after a commit.
func ended(err error) error {
	if errors.Is(err, sql.ErrTxDone) {
		return nil
	}
	return err
}
