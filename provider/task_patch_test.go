package provider_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// RFC 7386, appendix A: a document, a patch, and the result.
var mergePatches = [][3]string{
	{`{"a":"b"}`, `{"a":"c"}`, `{"a":"c"}`},
	{`{"a":"b"}`, `{"b":"c"}`, `{"a":"b","b":"c"}`},
	{`{"a":"b"}`, `{"a":null}`, `{}`},
	{`{"a":"b","b":"c"}`, `{"a":null}`, `{"b":"c"}`},
	{`{"a":["b"]}`, `{"a":"c"}`, `{"a":"c"}`},
	{`{"a":"c"}`, `{"a":["b"]}`, `{"a":["b"]}`},
	{`{"a":{"b":"c"}}`, `{"a":{"b":"d","c":null}}`, `{"a":{"b":"d"}}`},
	{`{"a":[{"b":"c"}]}`, `{"a":[1]}`, `{"a":[1]}`},
	{`["a","b"]`, `["c","d"]`, `["c","d"]`},
	{`{"a":"b"}`, `["c"]`, `["c"]`},
	{`{"a":"foo"}`, `null`, ``}, // as a member: it is removed
	{`{"a":"foo"}`, `"bar"`, `"bar"`},
	{`{"e":null}`, `{"a":1}`, `{"a":1,"e":null}`},
	{`[1,2]`, `{"a":"b","c":null}`, `{"a":"b"}`},
	{`{}`, `{"a":{"bb":{"ccc":null}}}`, `{"a":{"bb":{}}}`},
}

func TestPatchStateIsAMergePatch(t *testing.T) {
	t.Parallel()
	for _, c := range mergePatches {
		state := map[string]provider.Slot{"x": {Call: 1, Out: json.RawMessage(c[0])}, "y": {Call: 2, Out: json.RawMessage(`null`)}}
		got, err := provider.PatchState(state, fmt.Appendf(nil, `{"x":{"out":%s}}`, c[1]))
		require.NoError(t, err, c)
		require.Equal(t, c[2], string(got["x"].Out), c)
		require.Equal(t, 1, got["x"].Call, c)
		require.Equal(t, state["y"], got["y"], "a null that is not patched is a value")
		require.Equal(t, c[0], string(state["x"].Out), "the state that was patched is unchanged")
	}
}

func TestPatchStateKeepsDigits(t *testing.T) {
	t.Parallel()
	got, err := provider.PatchState(map[string]provider.Slot{"x": {Out: json.RawMessage(`{"n":12345678901234567890.10}`)}}, []byte(`{"y":{"n":3,"out":0.1e-7}}`))
	require.NoError(t, err)
	require.JSONEq(t, `{"n":12345678901234567890.10}`, string(got["x"].Out))
	require.Contains(t, string(got["x"].Out), "12345678901234567890.10")
	require.Equal(t, provider.Slot{Call: 3, Out: json.RawMessage(`0.1e-7`)}, got["y"])
}

func TestPatchStateRefusesWhatIsNoState(t *testing.T) {
	t.Parallel()
	state := map[string]provider.Slot{"x": {Call: 1}}
	large := `"` + strings.Repeat("x", provider.MaxTaskState/2) + `"`
	for name, patch := range map[string]string{
		"nothing": ``, "no JSON": `{`, "a number": `1`, "a list": `[]`, "null": `null`, "a NUL": `{"a":{"out":"\u0000"}}`, "a key twice": `{"a":{},"a":{}}`,
		"a value": `{"a":1}`, "a name": `{"A":{"n":1}}`, "an undo of no step": `{"undo:":{"n":1}}`, "an undo of an undo": `{"undo:undo:a":{}}`,
		"a negative call": `{"a":{"n":-1}}`, "a call of text": `{"a":{"n":"1"}}`, "a deep patch": strings.Repeat("[", 1001) + strings.Repeat("]", 1001),
	} {
		_, err := provider.PatchState(state, []byte(patch))
		requireField(t, err, "patch", name)
	}
	full, err := provider.PatchState(nil, fmt.Appendf(nil, `{"a":{"out":%s}}`, large))
	require.NoError(t, err)
	_, err = provider.PatchState(full, fmt.Appendf(nil, `{"b":{"out":%s}}`, large))
	requireField(t, err, "patch", "two large slots")
}

func TestParseState(t *testing.T) {
	t.Parallel()
	state, err := provider.ParseState("state", []byte(`{"a":{"n":1,"out":null},"b":{"n":2},"undo:a":{"out":true},"w":{"n":3,"by":"m1","until":"x","at":"y","timeout":true}}`))
	require.NoError(t, err)
	require.Equal(t, map[string]provider.Slot{
		"a": {Call: 1, Out: json.RawMessage(`null`)}, "b": {Call: 2}, "undo:a": {Out: json.RawMessage(`true`)},
		"w": {Call: 3, By: "m1", Until: "x", At: "y", Timeout: true},
	}, state)
	for name, filled := range map[string]bool{"a": true, "b": false, "undo:a": true, "w": true} {
		require.Equal(t, filled, state[name].Filled(), name)
	}
	text, err := json.Marshal(state["a"])
	require.NoError(t, err)
	require.JSONEq(t, `{"n":1,"out":null}`, string(text))
	for name, text := range map[string]string{
		"empty": ``, "null": `null`, "a list": `[]`, "a slot of text": `{"a":""}`, "a bad name": `{"a b":{}}`, "a negative call": `{"a":{"n":-1}}`,
		"large": `{"a":{"out":"` + strings.Repeat("x", provider.MaxTaskState) + `"}}`,
	} {
		_, err := provider.ParseState("state", []byte(text))
		requireField(t, err, "state", name)
	}
	empty, err := provider.ParseState("state", []byte(`{}`))
	require.NoError(t, err)
	require.NotNil(t, empty)
}
