package postgres_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// finds runs a comparison.
func finds(t *testing.T, db *postgres.DB, c provider.Comparison) (found []provider.Difference) {
	t.Helper()
	c.Found = func(all []provider.Difference) { found = all }
	if c.Limit == 0 {
		c.Limit = 10_000
	}
	require.NoError(t, switched(t.Context(), db, provider.Switch{Compare: &c}))
	return found
}

// columnsOfMany are columns of many types. Ones of types without an equality are among them.
const columnsOfMany = `
	id int, part text, n bigint, price numeric, ratio float8, at timestamptz, day date, id2 uuid, raw bytea, tags text[], points int[],
	doc json, docb jsonb, docs json[], place point, note varchar(40), fixed char(5), "odd ""name" text, ok boolean,
	double bigint generated always as (n * 2) stored`

// A row of odd values.
const randomRow = `
	%d, %s, %s, (random() * 100)::int / 10.0, case (random() * 8)::int when 0 then 'NaN' when 1 then '-0' when 2 then 'Infinity' else random() end,
	now() - random() * interval '9 days', current_date - (random() * 9)::int, gen_random_uuid(), sha256(random()::text::bytea), array[random()::text, null, 'a"b'],
	case when random() < 0.5 then array[1, null] end, json_build_object('b', random(), 'a', E'\n', 'n', null), '{"a": 1.50, "x": []}', array['{"a":1}'::json],
	point(random(), 1), 'Ann''s ' || random(), 'ab', 'x', random() < 0.5`

// Random rows are changed, added and deleted. A comparison finds exactly these, and a repair restores them.
func TestCompareFindsExactlyTheChangedRows(t *testing.T) {
	t.Parallel()
	for name, form := range map[string]struct{ table, other, id string }{
		"key":                    {"primary key (id, part)", "primary key (id, part)", "(id, part)"},
		"key of a view's table":  {"primary key (part, id)", "", "(id, part)"},
		"odd columns of the key": {"unique (id)", `primary key (id, part, "odd ""name")`, "(id, part)"},
		"no key":                 {"unique (id)", "", "(id, part)"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, nil, totals)
			create := func(table, extra, key string) {
				if key != "" {
					key = ", " + key
				}
				execAll(t, db, fmt.Sprintf(`create table %s (%s%s%s)`, table, extra, columnsOfMany, key))
			}
			create(`right_one`, "", form.table)
			create(`"Other"`, "seq int generated always as identity, ", form.other)
			random := rand.New(rand.NewPCG(1, uint64(len(name))))
			const columns = `id, part, n, price, ratio, at, day, id2, raw, tags, points, doc, docb, docs, place, note, fixed, "odd ""name", ok`
			insert := func(table string, id int) {
				execAll(t, db, fmt.Sprintf(`insert into %s (%s) values (`+randomRow+`)`, table, columns, id, []string{"'p'", "'ß ''日本'", "'A'"}[id%3], []string{"7", "null"}[id%2]))
			}
			for id := range 60 {
				insert("right_one", id)
			}
			execAll(t, db, fmt.Sprintf(`insert into "Other" (%s) select %[1]s from right_one`, columns))
			pair := provider.TablePair{Table: "right_one", Other: "Other"}
			compare := provider.Comparison{Pairs: []provider.TablePair{pair}}
			require.Empty(t, finds(t, db, compare), "equal tables")
			sets := []string{
				"n = coalesce(n, 0) + 1", "n = case when n is null then 0 end", "price = price + 0.001", "ratio = case when ratio = 'NaN' then 0 else 'NaN'::float8 end", "at = at + interval '1 microsecond'",
				"day = day + 1", "id2 = gen_random_uuid()", `raw = raw || '\x00'`, "tags = array_append(tags, 'x')", "tags[2] = ''", "points = '{}'", `doc = '{"b": 1}'`, "doc = null", `docb = '{}'`,
				"docs = docs || '1'::json", "place = point(7, 7)", "note = upper(note)", "note = ''", "fixed = 'c'", "ok = not ok", "ok = null",
			}
			for range 6 {
				want := map[int]string{}
				for _, id := range random.Perm(60)[:random.IntN(12)] {
					switch random.IntN(3) {
					case 0:
						want[id] = "missing"
						execAll(t, db, fmt.Sprintf(`delete from "Other" where id = %d`, id))
					case 1:
						want[id] = "different"
						execAll(t, db, fmt.Sprintf(`update "Other" set %s where id = %d`, sets[random.IntN(len(sets))], id))
					default:
						want[1000+id] = "extra"
						insert(`"Other"`, 1000+id)
					}
				}
				isFound(t, finds(t, db, compare), want, form.other == "" && form.table != "primary key (part, id)")
				found := append([]provider.Difference{}, finds(t, db, compare)...)
				some := found[:random.IntN(len(found)+1)]
				repair := compare
				repair.Repair, repair.Only = true, slices.Clone(some)
				repair.Only = append(repair.Only, provider.Difference{Table: "another", Key: json.RawMessage(`{}`)})
				repaired := finds(t, db, repair)
				require.Len(t, repaired, len(some))
				only := compare
				only.Only = repair.Only
				require.Empty(t, finds(t, db, only), "these are repaired")
				require.Equal(t, found[len(some):], append([]provider.Difference{}, finds(t, db, compare)...), "others are left")
				repair.Only = found
				require.Len(t, finds(t, db, repair), len(found)-len(some))
				require.Empty(t, finds(t, db, compare))
				execAll(t, db, `insert into "Other" (id, part, note, "odd ""name") values (-1, '', 'another identity', '')`, `delete from "Other" where id = -1`)
			}
			require.Equal(t, 60, count(t, db, fmt.Sprintf(`select count(*) from (select %s from right_one) r join (select %[1]s from "Other") o on r.id = o.id and r::text = o::text`, columns)))
		})
	}
}

// isFound checks the differences against the ids that were changed. If rows are compared as a whole,
// a different row is a missing one and an extra one.
func isFound(t *testing.T, found []provider.Difference, want map[int]string, whole bool) {
	t.Helper()
	got := map[int]string{}
	for _, d := range found {
		var key struct{ ID *int }
		require.NoError(t, json.Unmarshal(d.Key, &key))
		require.NotNil(t, key.ID)
		is := "different"
		switch {
		case d.Got == nil:
			is = "missing"
		case d.Want == nil:
			is = "extra"
		}
		if whole && want[*key.ID] == "different" {
			require.NotEqual(t, "different", is)
			is = "different"
		}
		got[*key.ID] = is
	}
	// an update may have set the same value
	maps.DeleteFunc(want, func(id int, is string) bool { _, ok := got[id]; return is == "different" && !ok })
	require.Equal(t, want, got)
}

func TestCompareCountsEqualRowsWithoutAKey(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	execAll(t, db, `create table a (n int, s text)`, `create table b (s text, n bigint)`,
		`insert into a values (1, 'x'), (1, 'x'), (1, 'x'), (2, null), (3, 'y')`, `insert into b values ('x', 1), (null, 2), (null, 2), ('z', 3)`)
	c := provider.Comparison{Pairs: []provider.TablePair{{Table: "a", Other: "b"}}}
	found := finds(t, db, c)
	var got []string
	for _, d := range found {
		got = append(got, strings.ReplaceAll(string(d.Want)+" "+string(d.Got), `": `, `":`))
	}
	require.ElementsMatch(t, []string{`{"n":1, "s":"x"} `, `{"n":1, "s":"x"} `, `{"n":3, "s":"y"} `, ` {"n":2, "s":null}`, ` {"n":3, "s":"z"}`}, got)
	c.Repair, c.Only = true, found
	require.Len(t, finds(t, db, c), 5)
	require.Equal(t, 5, count(t, db, `select count(*) from b`))
	require.Equal(t, 3, count(t, db, `select count(*) from b where s = 'x'`))
}

// The columns of a table of another generation may have other types.
func TestCompareWithColumnsOfOtherTypes(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	execAll(t, db, `create table a (id int primary key, n int, s varchar(9), j json, at timestamptz, gone int)`,
		`create table b (id bigint primary key, n numeric, s text collate "C", j jsonb, at timestamptz, made int)`,
		`insert into a select g, g, 's' || g, '{"a": 1}', now(), 1 from generate_series(1, 3) g`, `insert into b select id, n, s, j, at, 2 from a`)
	c := provider.Comparison{Pairs: []provider.TablePair{{Table: "a", Other: "b"}}}
	require.Empty(t, finds(t, db, c))
	execAll(t, db, `update b set n = 2.5 where id = 2`, `delete from b where id = 1`)
	require.Len(t, finds(t, db, c), 2)
	c.Ignore = []string{"n"}
	found := finds(t, db, c)
	require.Len(t, found, 1)
	c.Repair, c.Only = true, found
	finds(t, db, c)
	require.Equal(t, 1, count(t, db, `select n from b where id = 1`), "an inserted row has all columns")
	require.Equal(t, 1, count(t, db, `select count(*) from b where n = 2.5`), "it was ignored")
	for _, pair := range []provider.TablePair{{Table: "none", Other: "a"}, {Table: "a", Other: "none"}, {Table: "a", Other: "totals"}} {
		err := switched(t.Context(), db, provider.Switch{Compare: &provider.Comparison{
			Pairs: []provider.TablePair{pair}, Ignore: []string{"n"}, Limit: 1, Found: func([]provider.Difference) {}}})
		require.ErrorIs(t, err, provider.ErrInput)
		require.Equal(t, provider.ClassPermanent, provider.ClassOf(err))
	}
}

// Rows of tables that refer to each other are repaired in any order of the pairs, also by a role that may not make a foreign key
// deferrable. The foreign keys stay as they were.
func TestRepairKeepsReferences(t *testing.T) {
	t.Parallel()
	for _, isOwner := range []bool{true, false} {
		for _, isReversed := range []bool{true, false} {
			t.Run(fmt.Sprintf("owner %t, reversed %t", isOwner, isReversed), func(t *testing.T) {
				t.Parallel()
				db := postgrestest.OpenBusy(t, nil, totals)
				execAll(t, db, `create table a (id int primary key)`, `create table a2 (id int primary key)`,
					`create table b (id int primary key, a int)`, `create table b2 (id int primary key, a int not null references a2)`,
					`insert into a values (1), (2)`, `insert into b values (1, 1), (2, 2), (4, 2)`, `insert into a2 values (1), (3)`, `insert into b2 values (1, 1), (3, 3), (4, 3)`)
				if !isOwner {
					execAll(t, db, script(t, postgres.RolesSQL, "kinora"), script(t, postgres.GrantsSQL, "kinora"), `grant all on a, b, a2, b2 to kinora_projector`)
					db = as(t, db, "kinora_projector")
				}
				c := provider.Comparison{Pairs: []provider.TablePair{{Table: "a", Other: "a2"}, {Table: "b", Other: "b2"}}}
				if isReversed {
					slices.Reverse(c.Pairs)
				}
				found := finds(t, db, c)
				require.Len(t, found, 5)
				require.Equal(t, "a2", found[0].Table)
				c.Limit = 3
				require.Equal(t, found[:3], finds(t, db, c), "the limit is that of all tables")
				c.Limit, c.Repair, c.Only = 100, true, found
				finds(t, db, c)
				c.Repair, c.Only = false, nil
				require.Empty(t, finds(t, db, c))
				require.Zero(t, count(t, db, `select count(*)::int from pg_constraint where condeferrable`))
			})
		}
	}
}
