package provider_test

import (
	"encoding/json"
	"maps"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

func TestParseHeaders(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]map[string]string{
		`{}`:                                     {},
		" { } \n":                                {},
		`{"a": "1", "b": ""}`:                    {"a": "1", "b": ""},
		" {\t\"a\"\r\n:\n \"1\" , \"\" : \"2\"}": {"a": "1", "": "2"},
		`{"a": "1", "a": "2"}`:                   {"a": "2"},
		`{"日本": "v'al\"ue\\ \n\t\/ ü😀 日"}`: {"日本": "v'al\"ue\\ \n\t/ ü😀 日"},
		`{"a:b,c}": "{\"d\": [1, null]}"}`: {"a:b,c}": `{"d": [1, null]}`},
		`{"\\": "\\\\"}`:                   {`\`: `\\`},
	} {
		got, err := provider.ParseHeaders(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
}

func TestParseHeadersRefuses(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		``, ` `, `null`, `true`, `1`, `"text"`, `[]`, `["a", "b"]`, `oops`, `{`, `}`, `{"a"`, `{"a":`, `{"a": "1"`, `{"a": "1",}`, `{,}`,
		`{"a": 1}`, `{"a": null}`, `{"a": true}`, `{"a": []}`, `{"a": {}}`, `{"a": "1", "b": {"c": "d"}}`, `{a: "1"}`, `{1: "1"}`, `{'a': '1'}`,
		`{"a" "1"}`, `{"a": "1" "b": "2"}`, `{"a": "1"}}`, `{"a": "1"} x`, `{"a": "1"}{}`, "{\"a\": \"\n\"}", `{"a": "\x"}`, `{"a": "\`, `{"a": "\"`,
		`{"a": "\u12"}`, "{\"a\": \"\xff\"}", "\xef\xbb\xbf{}",
	} {
		got, err := provider.ParseHeaders(text)
		require.ErrorIs(t, err, outbox.ErrMalformed, text)
		require.Nil(t, got, text)
	}
}

// encoding/json is the reference for objects of strings.
func FuzzParseHeaders(f *testing.F) {
	for _, seed := range []string{`{}`, `{"a": "1", "b": "\u00fc\n"}`, `{"a": 1}`, `{"a": "\\"}`, `[]`, ` {"" :"x" , "\"": "}"} `, `{"a": "\ud83d\ude00"}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		got, err := provider.ParseHeaders(string(text))
		var want map[string]any
		ok := utf8.Valid(text) && json.Unmarshal(text, &want) == nil && want != nil
		all := map[string]string{}
		for name, value := range want {
			s, isText := value.(string)
			ok = ok && isText
			all[name] = s
		}
		// A value that is replaced by a later one of the same name must be valid too.
		if !ok || err != nil {
			require.ErrorIs(t, err, outbox.ErrMalformed)
			require.True(t, !ok || strings.Count(string(text), ":") > len(want), "%s", text)
			return
		}
		require.True(t, maps.Equal(all, got), "%s: %v, want %v", text, got, all)
	})
}
