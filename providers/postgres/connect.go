package postgres

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// connect makes a connection next to the pool, prepared as the pool's own are.
func connect(ctx context.Context, pool *pgxpool.Config) (*pgx.Conn, error) {
	config, err := connConfig(ctx, pool)
	if err != nil {
		return nil, err
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	return conn, settle(ctx, pool, conn)
}

// connConfig returns the configuration of a connection next to the pool: that of the pool's own connections.
func connConfig(ctx context.Context, pool *pgxpool.Config) (*pgx.ConnConfig, error) {
	c := pool.ConnConfig.Copy()
	if c.ConnectTimeout <= 0 {
		c.ConnectTimeout = 2 * time.Minute // the pool's
	}
	if pool.BeforeConnect != nil {
		if err := pool.BeforeConnect(ctx, c); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// settle prepares a new connection next to the pool as the pool prepares its own. On an error it closes the connection.
func settle(ctx context.Context, pool *pgxpool.Config, conn *pgx.Conn) error {
	if pool.AfterConnect == nil {
		return nil
	}
	err := pool.AfterConnect(ctx, conn)
	if err != nil {
		shut(ctx, conn)
	}
	return err
}

// shut closes a connection. It waits at most five seconds for the server.
func shut(ctx context.Context, conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}
