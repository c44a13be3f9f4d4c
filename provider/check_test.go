package provider_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math/big"
	"strings"
	"testing"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

func draft() eventstore.Draft {
	return eventstore.Draft{ID: "0198c1f0-0000-7000-8000-000000000001", Type: "t", Schema: 1, Data: []byte(`{}`)}
}

func TestCheckJSON(t *testing.T) {
	t.Parallel()
	for _, good := range []string{
		`{}`, `null`, `0`, `-0`, `1E5`, `"a"`, ` [1, 2] `, `{"a":{"a":1}}`, `"\ud83d\ude00"`, "\"\u00e9\"", `1e131071`, `-1.5e-16000`,
		strings.Repeat("[", 1000) + strings.Repeat("]", 1000),
	} {
		require.NoError(t, provider.CheckJSON("data", []byte(good), 0), "%.40s", good)
	}
	for name, bad := range map[string]string{
		"empty":               ``,
		"not JSON":            `{a:1}`,
		"half":                `{"a":`,
		"two values":          `{} {}`,
		"two scalars":         `1 2`,
		"trailing":            `{}x`,
		"NUL":                 `"a\u0000b"`,
		"NUL in a key":        `{"a\u0000":1}`,
		"raw NUL":             "\"a\x00\"",
		"lone high surrogate": `"\ud800"`,
		"lone low surrogate":  `"\udc00"`,
		"surrogates reversed": `"\udc00\ud800"`,
		"not UTF-8":           "\"\xff\"",
		"key twice":           `{"a":1,"a":2}`,
		"key twice, escaped":  `{"a":1,"\u0061":2}`,
		"number too large":    `1e131072`,
		"number too long":     `1` + strings.Repeat("0", 131072),
		"number too small":    `1e-16384`,
		"exponent overflows":  `1e99999999999999999999`,
		"nested too deep":     strings.Repeat("[", 1001) + strings.Repeat("]", 1001),
		"nested 10,000 deep":  strings.Repeat(`{"a":`, 10000) + "1" + strings.Repeat("}", 10000),
		"over the size":       `"` + strings.Repeat("x", provider.DefaultMaxPayload) + `"`,
		"leading zero":        `01`,
	} {
		err := provider.CheckJSON("data", []byte(bad), 0)
		var invalid *eventstore.InvalidError
		require.ErrorAs(t, err, &invalid, name)
		require.ErrorIs(t, err, eventstore.ErrInvalid, name)
		require.Equal(t, "data", invalid.Field, name)
	}
	require.Error(t, provider.CheckJSON("data", []byte(`"123456"`), 7))
	require.NoError(t, provider.CheckJSON("data", []byte(`"123456"`), 8))
}

// A limit of n accepts JSON that PostgreSQL prints in n bytes; a limit of n-1 refuses it.
func TestCheckJSONCountsNumbersInFull(t *testing.T) {
	t.Parallel()
	for number, full := range map[string]int{
		`1e6`: 7, `1E+6`: 7, `-1e6`: 8, `1.5e6`: 7, `-12.345e1`: 7, `12e0`: 4, `1e-6`: 8, `-1e-6`: 9, `12.5e-3`: 7, `1.5e-16000`: 16003,
		`0.5`: 3, `-273.15`: 7, `1e131071`: 131072, `0e20`: 21,
	} {
		for _, data := range []string{number, ` [` + number + `]`, `{"a":` + number + `}`, `["1e9",` + number + `]`} {
			limit := len(data) - len(number) + max(full, len(number))
			require.NoError(t, provider.CheckJSON("data", []byte(data), limit), data)
			require.ErrorIs(t, provider.CheckJSON("data", []byte(data), limit-1), eventstore.ErrInvalid, data)
		}
	}
	many := func(n int) []byte { return []byte("[1e131071" + strings.Repeat(",1e131071", n-1) + "]") }
	require.NoError(t, provider.CheckJSON("data", many(7), 0))
	for _, n := range []int{8, 1000, 20_000} {
		var invalid *eventstore.InvalidError
		require.ErrorAs(t, provider.CheckJSON("data", many(n), 0), &invalid, "%d", n)
		require.Equal(t, "data", invalid.Field)
		require.NotContains(t, invalid.Reason, "1e131071")
	}
}

func TestCheckJSONErrorContainsNoValue(t *testing.T) {
	t.Parallel()
	err := provider.CheckJSON("data", []byte(`{"secret":"hunter2","secret":"hunter2"}`), 0)
	require.Error(t, err)
	require.NotContains(t, err.Error(), "secret")
	err = provider.CheckJSON("data", []byte(`{"hunter2 :"hunter2"`), 0)
	require.Error(t, err)
	require.NotContains(t, err.Error(), "hunter2")
}

func TestCheckAppend(t *testing.T) {
	t.Parallel()
	require.NoError(t, provider.CheckAppend("review-42-ann", eventstore.Any, []eventstore.Draft{draft()}, 0))
	for name, change := range map[string]func(stream *string, x *eventstore.Expected, ds *[]eventstore.Draft){
		"no stream":           func(s *string, _ *eventstore.Expected, _ *[]eventstore.Draft) { *s = "" },
		"no id":               func(s *string, _ *eventstore.Expected, _ *[]eventstore.Draft) { *s = "review-" },
		"no category":         func(s *string, _ *eventstore.Expected, _ *[]eventstore.Draft) { *s = "-42" },
		"no dash":             func(s *string, _ *eventstore.Expected, _ *[]eventstore.Draft) { *s = "review" },
		"upper-case category": func(s *string, _ *eventstore.Expected, _ *[]eventstore.Draft) { *s = "Review-42" },
		"quoted category":     func(s *string, _ *eventstore.Expected, _ *[]eventstore.Draft) { *s = `a";drop--` },
		"stream of 256 bytes": func(s *string, _ *eventstore.Expected, _ *[]eventstore.Draft) { *s = "a-" + strings.Repeat("x", 254) },
		"stream with NUL":     func(s *string, _ *eventstore.Expected, _ *[]eventstore.Draft) { *s = "a-\x00" },
		"stream not UTF-8":    func(s *string, _ *eventstore.Expected, _ *[]eventstore.Draft) { *s = "a-\xff" },
		"expected below Any":  func(_ *string, x *eventstore.Expected, _ *[]eventstore.Draft) { *x = -2 },
		"no events":           func(_ *string, _ *eventstore.Expected, ds *[]eventstore.Draft) { *ds = nil },
		"id twice":            func(_ *string, _ *eventstore.Expected, ds *[]eventstore.Draft) { *ds = append(*ds, draft()) },
		"id not a UUID":       func(_ *string, _ *eventstore.Expected, ds *[]eventstore.Draft) { (*ds)[0].ID = "7" },
		"id in upper case": func(_ *string, _ *eventstore.Expected, ds *[]eventstore.Draft) {
			(*ds)[0].ID = "0198C1F0-0000-7000-8000-000000000001"
		},
		"no type":           func(_ *string, _ *eventstore.Expected, ds *[]eventstore.Draft) { (*ds)[0].Type = "" },
		"schema 0":          func(_ *string, _ *eventstore.Expected, ds *[]eventstore.Draft) { (*ds)[0].Schema = 0 },
		"no data":           func(_ *string, _ *eventstore.Expected, ds *[]eventstore.Draft) { (*ds)[0].Data = nil },
		"metadata with NUL": func(_ *string, _ *eventstore.Expected, ds *[]eventstore.Draft) { (*ds)[0].Metadata.Actor = "a\x00" },
		"metadata too long": func(_ *string, _ *eventstore.Expected, ds *[]eventstore.Draft) {
			(*ds)[0].Metadata.Actor = strings.Repeat("x", 1025)
		},
		"extra with bad UTF-8": func(_ *string, _ *eventstore.Expected, ds *[]eventstore.Draft) {
			(*ds)[0].Metadata.Extra = map[string]string{"\xff": ""}
		},
	} {
		stream, expected, drafts := "review-42", eventstore.NoStream, []eventstore.Draft{draft()}
		change(&stream, &expected, &drafts)
		require.ErrorIs(t, provider.CheckAppend(stream, expected, drafts, 0), eventstore.ErrInvalid, name)
	}
}

// Accepted data is within the limit, even with its numbers written in full.
// Promise: G1.15
func FuzzCheckJSON(f *testing.F) {
	for _, s := range []string{
		`{"a":[1,2,{"b":null}]}`, `"\ud800"`, `1e131072`, `{"a":1,"a":2}`, "\xff", ``,
		`1e4096`, `[1e2000,-1.5E+2000]`, `[1e-4000,0.25e-90]`, `{"a":12.5e-3}`,
	} {
		f.Add([]byte(s))
	}
	const limit = 4096
	f.Fuzz(func(t *testing.T, data []byte) {
		if provider.CheckJSON("data", data, limit) != nil {
			return
		}
		d := draft()
		d.Data = data
		require.NoError(t, provider.CheckAppend("a-b", eventstore.Any, []eventstore.Draft{d}, 0))
		require.NotContains(t, string(data), "\x00")
		dec := json.NewDecoder(bytes.NewReader(data))
		dec.UseNumber()
		size := 0
		for {
			token, err := dec.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err)
			if n, ok := token.(json.Number); ok {
				r, ok := new(big.Rat).SetString(n.String())
				require.True(t, ok)
				digits, exact := r.FloatPrec()
				require.True(t, exact)
				size += len(r.FloatString(digits))
			}
		}
		require.LessOrEqual(t, size, limit)
	})
}

func FuzzCheckStream(f *testing.F) {
	for _, s := range []string{"a-b", `a"-b`, "a;---", "größe-1", "-", "a-\x00", strings.Repeat("a", 64) + "-1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if err := provider.CheckStream(s); err != nil {
			require.ErrorIs(t, err, eventstore.ErrInvalid)
			return
		}
		require.Regexp(t, `^[a-z][a-z0-9_]{0,40}$`, provider.Category(s))
		require.LessOrEqual(t, len(s), provider.MaxIDBytes)
		require.NotContains(t, s, "\x00")
	})
}
