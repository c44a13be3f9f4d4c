package eventstore_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/stretchr/testify/require"
)

type sealed interface{ sealed() }

type posted struct {
	Stars int
	Text  string
}
type edited struct{ Stars int }
type audited struct{ By string }
type byPointer struct{}

func (posted) sealed()     {}
func (edited) sealed()     {}
func (*byPointer) sealed() {}

func rename(from, to string) func(json.RawMessage) (json.RawMessage, error) {
	return func(old json.RawMessage) (json.RawMessage, error) {
		return json.RawMessage(strings.ReplaceAll(string(old), from, to)), nil
	}
}

var types = eventstore.NewTypes(
	eventstore.Type[posted]("review.posted", rename("points", "rating"), rename("rating", "Stars")).Was("review.created"),
	eventstore.Type[edited]("review.edited"),
	eventstore.Type[audited]("audited"),
	eventstore.Type[byPointer]("by_pointer"),
)

func TestTypesUpcastFromEverySchema(t *testing.T) {
	t.Parallel()
	require.NoError(t, types.Err())
	for schema, data := range map[int]string{0: `{"points":4}`, 1: `{"points":4}`, 2: `{"rating":4}`, 3: `{"Stars":4}`} {
		e, err := eventstore.Decode[posted](types, eventstore.Raw{Type: "review.created", Schema: schema, Data: []byte(data)})
		require.NoError(t, err, "schema %d", schema)
		require.Equal(t, posted{Stars: 4}, e.Data, "schema %d", schema)
		require.Equal(t, "review.posted", e.Type)
		require.Equal(t, 3, e.Schema)
	}
	_, err := eventstore.Decode[posted](types, eventstore.Raw{Type: "review.posted", Schema: 4, Data: []byte(`{}`)})
	require.ErrorIs(t, err, eventstore.ErrUnregistered, "a newer schema is an error")
}

func TestTypesDecode(t *testing.T) {
	t.Parallel()
	e, err := eventstore.Decode[sealed](types, eventstore.Raw{ID: "1", Stream: "s-1", Version: 2, Position: 3, Type: "review.edited", Data: []byte(`{"Stars":1}`)})
	require.NoError(t, err)
	require.Equal(t, sealed(edited{1}), e.Data)
	require.Equal(t, []any{"1", "s-1", int64(2), int64(3)}, []any{e.ID, e.Stream, e.Version, e.Position})
	for name, raw := range map[string]eventstore.Raw{
		"unknown name":     {Type: "unknown", Data: []byte(`{}`)},
		"not of this type": {Type: "audited", Data: []byte(`{}`)},
	} {
		_, err := eventstore.Decode[sealed](types, raw)
		require.ErrorIs(t, err, eventstore.ErrUnregistered, name)
	}
	_, err = eventstore.Decode[edited](types, eventstore.Raw{Type: "review.edited", Data: []byte(`{"Stars":"five"}`)})
	require.Error(t, err)
	require.NotErrorIs(t, err, eventstore.ErrUnregistered)
}

func TestTypesMatching(t *testing.T) {
	t.Parallel()
	require.Equal(t, []string{"review.created", "review.posted"}, eventstore.Matching[posted](types))
	require.Equal(t, []string{"review.created", "review.edited", "review.posted"}, eventstore.Matching[sealed](types),
		"a pointer receiver does not implement the interface for the value")
	require.Len(t, eventstore.Matching[any](types), 5)
	require.Empty(t, eventstore.Matching[*posted](types))
}

func TestTypesEncode(t *testing.T) {
	t.Parallel()
	meta := eventstore.Metadata{CorrelationID: "c", Actor: "ann", Extra: map[string]string{"k": "v"}}
	drafts, err := types.Encode(eventstore.WithMetadata(t.Context(), meta), posted{Stars: 5}, edited{4})
	require.NoError(t, err)
	require.Equal(t, []string{"review.posted", "review.edited"}, []string{drafts[0].Type, drafts[1].Type})
	require.Equal(t, []int{3, 1}, []int{drafts[0].Schema, drafts[1].Schema})
	require.JSONEq(t, `{"Stars":5,"Text":""}`, string(drafts[0].Data))
	require.Equal(t, meta, drafts[1].Metadata)
	for _, d := range drafts {
		id, err := uuid.Parse(d.ID)
		require.NoError(t, err)
		require.EqualValues(t, 7, id.Version())
	}
	require.NotEqual(t, drafts[0].ID, drafts[1].ID)
	for _, v := range []any{&posted{}, struct{}{}, nil} {
		_, err := types.Encode(t.Context(), v)
		require.ErrorIs(t, err, eventstore.ErrUnregistered, "%T", v)
	}
}

func TestTypesErrReportsEveryFault(t *testing.T) {
	t.Parallel()
	bad := eventstore.NewTypes(
		eventstore.Type[posted]("x"), eventstore.Type[posted]("y"), // one Go type with two names
		eventstore.Type[*posted]("z"), eventstore.Type[any]("w"), // not value types
		eventstore.Type[edited]("x"),               // one name with two Go types
		eventstore.Type[audited]("a\x00b"),         // a name that no store accepts
		eventstore.Type[byPointer]("up", nil),      // nil upcaster
		eventstore.Type[sealedStruct]("q").Was(""), // empty old name
	)
	require.Len(t, strings.Split(bad.Err().Error(), "\n"), 7, "%v", bad.Err())
	require.Error(t, (*eventstore.Types)(nil).Err())
	require.Error(t, eventstore.NewTypes(eventstore.TypeDef{}).Err())
}

type sealedStruct struct{}

func TestTypesCodec(t *testing.T) {
	t.Parallel()
	wrapped := eventstore.NewTypes(eventstore.Type[edited]("e").Codec(
		func(v any) ([]byte, error) { return json.Marshal([]any{"v1", v}) },
		func(b []byte) (any, error) {
			var e edited
			err := json.Unmarshal(b, &[]any{new(string), &e})
			return e, err
		}))
	drafts, err := wrapped.Encode(t.Context(), edited{3})
	require.NoError(t, err)
	require.JSONEq(t, `["v1",{"Stars":3}]`, string(drafts[0].Data))
	e, err := eventstore.Decode[edited](wrapped, eventstore.Raw{Type: "e", Data: drafts[0].Data})
	require.NoError(t, err)
	require.Equal(t, edited{3}, e.Data)
}

func TestWasDoesNotShareItsArray(t *testing.T) {
	t.Parallel()
	base := eventstore.Type[posted]("p").Was("a", "b", "c")
	one, two := base.Was("one"), base.Was("two")
	require.Equal(t, 1, eventstore.NewTypes(one).Newest("one"))
	require.Equal(t, 1, eventstore.NewTypes(two).Newest("two"))
	require.Zero(t, eventstore.NewTypes(one).Newest("two"))
	require.False(t, errors.Is(eventstore.NewTypes(two).Err(), eventstore.ErrInvalid))
}

// Decoders and upcasters get one form of a value. The data of other software, which may be no JSON, stays.
func TestDecodeGetsOneFormOfAValue(t *testing.T) {
	t.Parallel()
	var got []string
	note := func(data json.RawMessage) (json.RawMessage, error) {
		got = append(got, string(data))
		return data, nil
	}
	codec := func(data []byte) (any, error) { _, err := note(data); return edited{}, err }
	types := eventstore.NewTypes(
		eventstore.Type[posted]("posted", note), eventstore.Type[edited]("edited").Codec(json.Marshal, codec))
	for _, e := range [][3]string{
		{"posted", `{"Text": "a", "Stars": 1E+1}`, `{"Stars":10,"Text":"a"}`},
		{"edited", `{"b": 1, "a": [1.0]}`, `{"a":[1.0],"b":1}`},
		{"edited", " 1", " 1"}, // Protobuf: field 4 is 49
	} {
		_, err := eventstore.Decode[any](types, eventstore.Raw{Type: e[0], Data: []byte(e[1])})
		require.NoError(t, err)
		require.Equal(t, e[2], got[len(got)-1])
	}
}

type (
	emptied struct{}
	byWord  map[string]int
	decides struct{ Null bool }
)

func (d *decides) UnmarshalJSON(data []byte) error { d.Null = string(data) == "null"; return nil }

// Promise: G10.2
func TestNullIsNoEventOfFields(t *testing.T) {
	t.Parallel()
	upcast := func(json.RawMessage) (json.RawMessage, error) { return json.RawMessage(`{"Stars":1}`), nil }
	types := eventstore.NewTypes(
		eventstore.Type[posted]("posted"), eventstore.Type[edited]("upcast", upcast), eventstore.Type[int]("number"), eventstore.Type[string]("text"),
		eventstore.Type[emptied]("emptied"), eventstore.Type[byWord]("by word"), eventstore.Type[json.RawMessage]("raw"), eventstore.Type[decides]("decides"),
		eventstore.Type[audited]("codec").Codec(json.Marshal, func([]byte) (any, error) { return audited{"codec"}, nil }))
	require.NoError(t, types.Err())
	for _, null := range []string{"null", " null\n", "\ufeffnull"} {
		for _, name := range []string{"posted", "upcast", "number", "text"} {
			_, err := eventstore.Decode[any](types, eventstore.Raw{Type: name, Data: []byte(null)})
			require.ErrorContains(t, err, "null", "%s %q", name, null)
		}
		for name, want := range map[string]any{
			"emptied": emptied{}, "by word": byWord(nil), "raw": json.RawMessage("null"), "decides": decides{true}, "codec": audited{"codec"},
		} {
			e, err := eventstore.Decode[any](types, eventstore.Raw{Type: name, Data: []byte(null)})
			require.NoError(t, err, "%s %q", name, null)
			require.Equal(t, want, e.Data, name)
		}
	}
	e, err := eventstore.Decode[posted](types, eventstore.Raw{Type: "posted", Data: []byte("\ufeff{\"Stars\":4}")})
	require.NoError(t, err)
	require.Equal(t, 4, e.Data.Stars)
}

// Decoding ignores the declarations: a field that an event has or lacks is no error.
// Promise: G12.3
func TestDecodeIgnoresUnknownAndMissingFields(t *testing.T) {
	t.Parallel()
	type posted struct {
		Author string `json:"author"`
		Stars  int    `json:"stars"`
	}
	for _, def := range []eventstore.TypeDef{
		eventstore.Type[posted]("posted"), eventstore.Type[posted]("posted").Added("stars").Removed("note"),
	} {
		e, err := eventstore.Decode[posted](eventstore.NewTypes(def), eventstore.Raw{Type: "posted", Data: []byte(`{"author":"ann","new":[1],"note":"x"}`)})
		require.NoError(t, err)
		require.Equal(t, posted{Author: "ann"}, e.Data)
	}
}
