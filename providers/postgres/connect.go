package postgres

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// connect opens a connection outside the pool, configured like those of the pool.
func connect(ctx context.Context, pool *pgxpool.Config) (*pgx.Conn, error) {
	config, err := connConfig(ctx, pool)
	if err != nil {
		return nil, err
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	return conn, prepare(ctx, pool, conn)
}

// connConfig returns the configuration of the pool's connections for one outside the pool.
func connConfig(ctx context.Context, pool *pgxpool.Config) (*pgx.ConnConfig, error) {
	c := pool.ConnConfig.Copy()
	if c.ConnectTimeout <= 0 {
		c.ConnectTimeout = 2 * time.Minute // as pgxpool does
	}
	if pool.BeforeConnect != nil {
		if err := pool.BeforeConnect(ctx, c); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// prepare runs the pool's AfterConnect on a connection outside the pool. On an error it closes
// the connection.
func prepare(ctx context.Context, pool *pgxpool.Config, conn *pgx.Conn) error {
	if pool.AfterConnect == nil {
		return nil
	}
	err := pool.AfterConnect(ctx, conn)
	if err != nil {
		closeConn(ctx, conn)
	}
	return err
}

// closeConn closes a connection. It waits at most five seconds for the server.
func closeConn(ctx context.Context, conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}
