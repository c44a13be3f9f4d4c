package postgres_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// noServer is an address without a server: New and the checks of names need none.
const noServer = "postgres://nobody@127.0.0.1:1/none"

// nameUses returns the functions that put a schema name into SQL.
func nameUses(t *testing.T) map[string]func(schema string) error {
	pool, err := pgxpool.New(t.Context(), noServer)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return map[string]func(schema string) error{
		"MigrationSQL": func(schema string) error { _, err := postgres.MigrationSQL(schema); return err },
		"GrantsSQL":    func(schema string) error { _, err := postgres.GrantsSQL(schema); return err },
		"RolesSQL":     func(schema string) error { _, err := postgres.RolesSQL(schema); return err },
		"New":          func(schema string) error { _, err := postgres.New(pool, &postgres.Config{Schema: schema}); return err },
	}
}

// script returns the SQL that of generates for the schema.
func script(t *testing.T, of func(schema string) (string, error), schema string) string {
	t.Helper()
	sql, err := of(schema)
	require.NoError(t, err)
	return sql
}

func TestInvalidSchemaNamesAreRefused(t *testing.T) {
	t.Parallel()
	names := []string{
		"1a", "Shop", "sh op", "sh-op", "shöp", `shop"`, "shop;drop schema public", "shop.a", strings.Repeat("a", 42), "a\x00", "\xff", "_shop",
		"user", "order", "select", "table", "left", "join", "analyze", "current_user", "pg_catalog", "pg_toast", "pg_", "pg_shop", "information_schema",
	}
	for what, use := range nameUses(t) {
		for _, name := range append(names, "") {
			if name == "" && what == "New" { // the default name
				continue
			}
			var invalid *eventstore.InvalidError
			err := use(name)
			require.ErrorAs(t, err, &invalid, "%s(%q)", what, name)
			require.Equal(t, "schema", invalid.Field)
			require.NotEmpty(t, invalid.Reason)
		}
		for _, name := range []string{"kinora", "shop", "a", "shop_2", "public", "users", "orders", "values", strings.Repeat("a", 41)} {
			require.NoError(t, use(name), "%s(%q)", what, name)
		}
	}
	_, err := postgres.Open(patience.Context(t), noServer, &postgres.Config{Schema: "order"})
	require.ErrorIs(t, err, eventstore.ErrInvalid)
	require.NotContains(t, err.Error(), "connect", "Open does not try to connect")
}

// The server's reserved words are refused. Each of its other keywords can be the name of a schema.
func TestTheServersReservedWordsAreRefused(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	rows, err := db.Pool().Query(t.Context(), `select word, catcode::text from pg_get_keywords()`)
	require.NoError(t, err)
	categories := map[string][]string{}
	for rows.Next() {
		var word, category string
		require.NoError(t, rows.Scan(&word, &category))
		categories[category] = append(categories[category], word)
	}
	require.NoError(t, rows.Err())
	for _, reserved := range []string{"R", "T"} {
		require.Greater(t, len(categories[reserved]), 20)
		for _, word := range categories[reserved] {
			_, err := postgres.MigrationSQL(word)
			require.ErrorIs(t, err, eventstore.ErrInvalid, word)
		}
	}
	for _, usable := range []string{"U", "C"} {
		for _, word := range categories[usable] {
			_, err := postgres.MigrationSQL(word)
			require.NoError(t, err, word)
			_, err = db.Pool().Exec(t.Context(), "create schema "+word+"; create table "+word+".a (); drop table "+word+".a; drop schema "+word)
			require.NoError(t, err, word)
		}
	}
	for _, word := range []string{"values", "row", "between", "view"} {
		shop, err := postgres.New(db.Pool(), &postgres.Config{Schema: word})
		require.NoError(t, err)
		require.NoError(t, shop.Migrate(t.Context()), word)
		require.NoError(t, shop.Ready(t.Context()), word)
		_, err = shop.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
		require.NoError(t, err, word)
		require.NoError(t, do(t.Context(), shop, marked("m"), nil), word) // this calls functions of the schema
		u := marked("n")
		require.NoError(t, shop.Do(t.Context(), u, func(context.Context, pgx.Tx, provider.Found) (provider.Closing, error) {
			aside := provider.Aside{Parked: provider.Parked{Projector: u.Projector, MessageID: "n", Lane: u.Messages[0].Lane}}
			return provider.Closing{Park: []provider.Aside{aside}}, nil
		}), word) // this uses types of the schema
		list, err := shop.Parked(t.Context(), provider.ParkedFilter{})
		require.NoError(t, err, word)
		require.Len(t, list, 1, word)
	}
}
