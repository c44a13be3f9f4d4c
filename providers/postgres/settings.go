package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// ErrSettings: a setting of the role, the database or the connection changes the meaning of what this package sends or
// reads. client_encoding must be UTF8. DateStyle must be ISO if the pool sends and reads text
// (pgx.QueryExecModeExec or QueryExecModeSimpleProtocol).
var ErrSettings = errors.New("a setting of the session changes the meaning of statements")

// checkSettings returns ErrEncoding, or ErrSettings for a session whose values this package would misread, or that would misread its
// values. The server reports these settings by itself, and again whenever they change.
func (db *Provider) checkSettings(conn *pgx.Conn) error {
	is := conn.PgConn().ParameterStatus
	if encoding := is("server_encoding"); encoding != "" && encoding != encodingUTF8 {
		return wrongEncoding(encoding)
	}
	if encoding := is("client_encoding"); encoding != "" && encoding != encodingUTF8 {
		return fmt.Errorf("%w: client_encoding is %s: remove it from the role, the database and the connection string", ErrSettings, encoding)
	}
	if style := is("DateStyle"); db.describe && style != "" && !strings.HasPrefix(style, "ISO") {
		return fmt.Errorf("%w: DateStyle is %s: remove it from the role, the database and the connection string, or use another query exec mode", ErrSettings, style)
	}
	return nil
}

// acquire returns a connection of the pool, if its settings are right.
func (db *Provider) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	conn, err := db.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	if err := db.checkSettings(conn.Conn()); err != nil {
		conn.Release()
		return nil, err
	}
	return conn, nil
}
