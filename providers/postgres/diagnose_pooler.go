package postgres

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/provider"
)

const (
	poolerTries = 5
	poolerLimit = 2 * time.Second // for one statement of a probe
)

// findPooler checks with connections of its own whether prepared statements and LISTEN survive the end
// of a transaction, as they do on a direct connection.
func (db *Provider) findPooler(ctx context.Context, _ provider.DiagnosisLimits) (found []provider.Finding, err error) {
	conn, err := connect(ctx, db.pool.Config())
	if err != nil {
		return nil, err
	}
	defer closeConn(ctx, conn)
	other, err := connect(ctx, db.pool.Config())
	if err != nil {
		return nil, err
	}
	defer closeConn(ctx, other)
	loses, err := losesStatements(ctx, conn, other)
	if err != nil {
		return nil, err
	}
	if !loses {
		return nil, nil
	}
	mode := db.pool.Config().ConnConfig.DefaultQueryExecMode
	if mode == pgx.QueryExecModeCacheStatement || mode == pgx.QueryExecModeDescribeExec {
		found = append(found, provider.Finding{
			Blocks: true, // they would fail at random too
			Check:  provider.FindingPooler, Title: "A pooler on the way loses prepared statements",
			Meaning: "The pooler is in transaction mode and does not support prepared statements. Statements fail at random, or another client's statement runs.",
			Facts:   []provider.Fact{{Name: "default_query_exec_mode", Value: mode.String()}},
			Remedy:  []string{"add default_query_exec_mode=cache_describe to the connection string", "or use pgbouncer 1.21 or later with max_prepared_statements, or connect to the server"},
		})
	}
	heard, err := hearsItself(ctx, conn, other)
	if err == nil && !heard {
		found = append(found, provider.Finding{
			Check: provider.FindingPooler, Title: "A pooler on the way loses notifications",
			Meaning: "LISTEN has no effect through a pooler in transaction mode. Services that run a postgres.Listener on this address are woken by polling only, about once a second.",
			Remedy:  []string{"set postgres.ListenerConfig.DSN to the address of the server itself; if that is done, run kinora doctor with that address"},
		})
	}
	return found, err
}

// losesStatements prepares a statement on conn, and runs it while other holds the session that it was
// prepared in. Behind a pooler in transaction mode another session gets it then.
func losesStatements(ctx context.Context, conn, other *pgx.Conn) (bool, error) {
	for range poolerTries {
		name := "kinora_" + strings.ToLower(rand.Text())
		limited, cancel := context.WithTimeout(ctx, poolerLimit)
		lost, err := func() (lost bool, err error) {
			if _, err := conn.PgConn().Prepare(limited, name, "select 1", nil); err != nil {
				return false, err
			}
			tx, err := other.Begin(limited)
			if err != nil {
				return false, err
			}
			defer func() { _ = tx.Rollback(limited) }()
			if _, err := tx.Exec(limited, "select 1", pgx.QueryExecModeSimpleProtocol); err != nil {
				return false, err
			}
			_, err = conn.PgConn().ExecPrepared(limited, name, nil, nil, nil).Close()
			if e := pgError(err); e != nil && e.Code == "26000" { // it does not exist in this session
				return true, nil
			}
			return false, err
		}()
		cancel()
		if lost || err != nil {
			// A pool of one session cannot serve both: nothing is known then.
			if ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
				return false, nil
			}
			return lost, err
		}
		if _, err := conn.Exec(ctx, "deallocate "+name, pgx.QueryExecModeSimpleProtocol); err != nil {
			return pgError(err) != nil && pgError(err).Code == "26000", nil
		}
	}
	return false, nil
}

// hearsItself reports whether conn gets a notification that other sends.
func hearsItself(ctx context.Context, conn, other *pgx.Conn) (bool, error) {
	channel := "kinora_probe_" + strings.ToLower(rand.Text())
	if _, err := conn.Exec(ctx, "listen "+channel, pgx.QueryExecModeSimpleProtocol); err != nil {
		return false, err
	}
	if _, err := other.Exec(ctx, "notify "+channel, pgx.QueryExecModeSimpleProtocol); err != nil {
		return false, err
	}
	limited, cancel := context.WithTimeout(ctx, poolerLimit)
	defer cancel()
	if _, err := conn.WaitForNotification(limited); err != nil {
		if ctx.Err() == nil && limited.Err() != nil {
			return false, nil
		}
		return false, err
	}
	_, _ = conn.Exec(ctx, "unlisten "+channel, pgx.QueryExecModeSimpleProtocol)
	return true, nil
}
