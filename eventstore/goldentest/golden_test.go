package goldentest_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/eventstore/goldentest"
	"github.com/stretchr/testify/require"
)

type recorder struct {
	testing.TB
	errors []string
}

func (*recorder) Helper() {}
func (r *recorder) Errorf(format string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}

// golden runs Check as on the machine of a developer, and returns its errors.
func golden(t *testing.T, dir string, defs ...eventstore.TypeDef) []string {
	t.Helper()
	t.Setenv("CI", "")
	t.Setenv("KINORA_GOLDEN", "")
	return goldenHere(dir, defs...)
}

func goldenHere(dir string, defs ...eventstore.TypeDef) []string {
	var r recorder
	goldentest.Check(&r, eventstore.NewTypes(defs...), dir)
	return r.errors
}

func update(t *testing.T, dir string, defs ...eventstore.TypeDef) []string {
	t.Helper()
	t.Setenv("KINORA_GOLDEN", "update")
	return goldenHere(dir, defs...)
}

// written returns a directory with the golden files of defs.
func written(t *testing.T, defs ...eventstore.TypeDef) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "events")
	for _, e := range golden(t, dir, defs...) {
		require.Contains(t, e, "it is written now")
	}
	require.Empty(t, golden(t, dir, defs...))
	return dir
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(dir, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
}

type sample struct{ Data, Decoded json.RawMessage }

func samples(t *testing.T, dir, name string) (list []sample) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, name))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &list))
	return list
}

func requireOne(t *testing.T, errs []string, parts ...string) {
	t.Helper()
	require.Len(t, errs, 1, strings.Join(errs, "\n"))
	for _, p := range parts {
		require.Contains(t, errs[0], p)
	}
}

type (
	address struct {
		Street string `json:"street"`
		City   string `json:"city"`
	}
	item struct {
		SKU   string `json:"sku"`
		Count int    `json:"count"`
	}
	base struct {
		By string `json:"by"`
	}
	placed struct {
		Stars  int                `json:"stars"`
		Note   string             `json:"note"`
		Home   address            `json:"home"`
		Items  []item             `json:"items"`
		Prices map[string]address `json:"prices"`
		base
	}
)

func TestGoldenTypesWritesTheCurrentVersion(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "testdata", "events")
	def := eventstore.Type[placed]("placed")
	requireOne(t, golden(t, dir, def), filepath.Join(dir, "placed.v1.json"), "it is written now", "commit the file")
	text, err := os.ReadFile(filepath.Join(dir, "placed.v1.json"))
	require.NoError(t, err)
	require.Equal(t, `[
  {
    "data": {
      "stars": 1,
      "note": "note",
      "home": {
        "street": "street",
        "city": "city"
      },
      "items": [
        {
          "sku": "sku",
          "count": 2
        }
      ],
      "prices": {
        "key": {
          "street": "street",
          "city": "city"
        }
      },
      "by": "by"
    }
  }
]
`, string(text))
	require.Empty(t, golden(t, dir, def))
	again, err := os.ReadFile(filepath.Join(dir, "placed.v1.json"))
	require.NoError(t, err)
	require.Equal(t, text, again)
}

// Promise: G12.1
func TestGoldenTypesWritesNothingInCI(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "events")
	t.Setenv("KINORA_GOLDEN", "")
	t.Setenv("CI", "true")
	for range 2 { // a repetition fails too
		requireOne(t, goldenHere(dir, eventstore.Type[placed]("placed")), "run the test without CI")
	}
	require.NoDirExists(t, dir)
}

func TestGoldenTypesRefusesAnotherMode(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "events")
	t.Setenv("KINORA_GOLDEN", "1")
	requireOne(t, goldenHere(dir, eventstore.Type[placed]("placed")), "KINORA_GOLDEN=1: must be empty or update")
	requireOne(t, golden(t, dir, eventstore.Type[*placed]("placed")), "pointer")
	require.NoDirExists(t, dir)
}

// The types below are what a program could make of placed.

type placedSame struct {
	Rating float64 `json:"stars"` // another Go name and type
	Note   *string `json:"note"`
	Home   struct {
		Street json.RawMessage `json:"street"`
		City   any             `json:"city"`
	} `json:"home"`
	Items  [1]item            `json:"items"`
	Prices map[string]address `json:"prices"`
	By     string             `json:"by"` // was embedded
}
type placedAdded[T any] struct {
	placed
	New T `json:"new"`
}
type placedAddedOmitempty struct {
	placed
	New string `json:"new,omitempty"`
}
type placedAddedOmitzero struct {
	placed
	New time.Time `json:"new,omitzero"`
}
type placedExcluded struct {
	placed
	Note string `json:"-"`
}
type placedWithout struct {
	Stars  int                `json:"stars"`
	Home   address            `json:"home"`
	Items  []item             `json:"items"`
	Prices map[string]address `json:"prices"`
	base
}
type placedNoHome struct {
	Stars  int                `json:"stars"`
	Note   string             `json:"note"`
	Items  []item             `json:"items"`
	Prices map[string]address `json:"prices"`
	base
}
type placedRenamed struct {
	placedWithout
	Text string `json:"text"`
}
type placedOtherCase struct {
	placedWithout
	Note string `json:"Note"`
}
type placedNoTag struct {
	placedWithout
	Note string
}
type placedAmbiguous struct { // encoding/json ignores both notes
	placed
	Other struct{ Note string } `json:"-"`
	placedRenamed
}
type placedOtherType struct {
	placedWithout
	Note int `json:"note"`
}
type placedQuoted struct {
	placed
	Stars int `json:"stars,string"`
}
type placedPlace struct {
	Road    string `json:"road"`
	City    string `json:"city"`
	Country string `json:"country,omitempty"`
}
type placedNested struct {
	placed
	Home placedPlace `json:"home"`
}
type placedInArray struct {
	placed
	Items []struct {
		Count int    `json:"count"`
		Unit  string `json:"unit"`
	} `json:"items"`
}
type placedInMap struct {
	placed
	Prices map[string]placedPlace `json:"prices"`
}

// Changes of a type without a new schema version, and the declarations that allow them.
// Promise: G12.1
func TestGoldenTypesReportsAChange(t *testing.T) {
	type (
		plain   = eventstore.TypeDef
		declare = func(plain) plain
	)
	stored := func(path string) string { return fmt.Sprintf("stored field %q is not read", path) }
	missing := func(path string) string { return fmt.Sprintf("field %q is not stored", path) }
	for name, c := range map[string]struct {
		def     plain
		want    []string // parts of the error, or none
		declare declare  // allows the change, unless it is nil
	}{
		"another Go name and compatible type": {def: eventstore.Type[placedSame]("placed")},
		"added":                               {eventstore.Type[placedAdded[int]]("placed"), []string{missing("new")}, func(d plain) plain { return d.Added("new") }},
		"added slice":                         {eventstore.Type[placedAdded[[]item]]("placed"), []string{missing("new")}, func(d plain) plain { return d.Added("new") }},
		"added with omitempty":                {eventstore.Type[placedAddedOmitempty]("placed"), []string{missing("new")}, func(d plain) plain { return d.Added("new") }},
		"added with omitzero":                 {eventstore.Type[placedAddedOmitzero]("placed"), []string{missing("new")}, func(d plain) plain { return d.Added("new") }},
		"removed":                             {eventstore.Type[placedWithout]("placed"), []string{stored("note")}, func(d plain) plain { return d.Removed("note") }},
		"removed object":                      {eventstore.Type[placedNoHome]("placed"), []string{stored("home")}, func(d plain) plain { return d.Removed("home") }},
		"excluded":                            {eventstore.Type[placedExcluded]("placed"), nil, nil}, // the promoted field of placed is read
		"renamed": {eventstore.Type[placedRenamed]("placed"), []string{stored("note"), missing("text"), "delete the file instead"},
			func(d plain) plain { return d.Removed("note").Added("text") }},
		"another case": {eventstore.Type[placedOtherCase]("placed"), []string{`field "note" was stored, and is not written under this name any more`}, nil},
		"no tag":       {eventstore.Type[placedNoTag]("placed"), []string{`field "note" was stored, and is not written under this name any more`}, nil},
		"ambiguous":    {eventstore.Type[placedAmbiguous]("placed"), []string{"a value is lost"}, nil},
		"another type": {eventstore.Type[placedOtherType]("placed"), []string{"cannot unmarshal string"}, nil},
		"quoted":       {eventstore.Type[placedQuoted]("placed"), []string{"invalid use of ,string"}, nil},
		"nested": {eventstore.Type[placedNested]("placed"), []string{stored("home.street"), missing("home.road"), missing("home.country")},
			func(d plain) plain { return d.Removed("home.street").Added("home.road", "home.country") }},
		"in an array": {eventstore.Type[placedInArray]("placed"), []string{stored("items.sku"), missing("items.unit")},
			func(d plain) plain { return d.Removed("items.sku").Added("items.unit") }},
		"in a map": {eventstore.Type[placedInMap]("placed"), []string{stored("prices.*.street"), missing("prices.*.road"), missing("prices.*.country")},
			func(d plain) plain { return d.Removed("prices.*.street").Added("prices.*.road", "prices.*.country") }},
	} {
		t.Run(name, func(t *testing.T) {
			dir := written(t, eventstore.Type[placed]("placed"))
			before := samples(t, dir, "placed.v1.json")
			errs := golden(t, dir, c.def)
			if len(c.want) == 0 {
				require.Empty(t, errs)
				return
			}
			for _, want := range c.want {
				require.Contains(t, strings.Join(errs, "\n"), want)
			}
			require.Equal(t, before, samples(t, dir, "placed.v1.json"), "a refused change writes nothing")
			require.NotEmpty(t, update(t, dir, c.def), "update does not allow it either")
			require.Equal(t, before, samples(t, dir, "placed.v1.json"))
			if c.declare == nil {
				return
			}
			for _, e := range golden(t, dir, c.declare(c.def)) {
				require.NotContains(t, e, "is not")
			}
			require.Empty(t, update(t, dir, c.declare(c.def)))
			require.Empty(t, golden(t, dir, c.declare(c.def)))
			after := samples(t, dir, "placed.v1.json")
			require.Len(t, after, 2, "a sample with the new fields is added")
			require.Equal(t, before[0].Data, after[0].Data)
			require.NotEmpty(t, golden(t, dir, c.def), "the declaration is still needed")
		})
	}
}

type (
	posted1 struct {
		Author string `json:"author"`
		Stars  int    `json:"stars"`
	}
	posted2 struct {
		Author string `json:"author"`
		Rating int    `json:"rating"`
	}
)

func renameStars(old json.RawMessage) (json.RawMessage, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(old, &fields); err != nil {
		return nil, err
	}
	if fields["stars"] == nil {
		return nil, errors.New("no stars")
	}
	fields["rating"] = fields["stars"]
	delete(fields, "stars")
	return json.Marshal(fields)
}

// A field is renamed with an upcaster. The sample of version 1 stays, and its decoded value is
// recorded on request.
// Promise: G12.2, G12.1
func TestGoldenTypesNewVersion(t *testing.T) {
	dir := written(t, eventstore.Type[posted1]("review.posted"))
	v1 := samples(t, dir, "review.posted.v1.json")
	requireOne(t, golden(t, dir, eventstore.Type[posted2]("review.posted")),
		`stored field "stars" is not read`, `field "rating" is not stored`, "new events have schema version 2")

	def := eventstore.Type[posted2]("review.posted", renameStars)
	requireOne(t, golden(t, dir, def), "review.posted.v1.json", `{"author":"author","rating":1}`, `{"author":"author","stars":1}`, "KINORA_GOLDEN=update")
	require.NoFileExists(t, filepath.Join(dir, "review.posted.v2.json"))
	require.Empty(t, update(t, dir, def))
	require.Empty(t, golden(t, dir, def))
	after := samples(t, dir, "review.posted.v1.json")
	require.Equal(t, v1[0].Data, after[0].Data)
	require.JSONEq(t, `{"author":"author","rating":1}`, string(after[0].Decoded))
	require.JSONEq(t, `{"author":"author","rating":1}`, string(samples(t, dir, "review.posted.v2.json")[0].Data))

	t.Run("an upcaster changes what it gives", func(t *testing.T) {
		other := func(old json.RawMessage) (json.RawMessage, error) {
			return bytes.ReplaceAll(bytes.ReplaceAll(old, []byte("stars"), []byte("rating")), []byte("1"), []byte("10")), nil
		}
		requireOne(t, golden(t, dir, eventstore.Type[posted2]("review.posted", other)), "review.posted.v1.json", `"rating":10}`)
	})
	t.Run("an upcaster loses a field", func(t *testing.T) {
		lose := func(json.RawMessage) (json.RawMessage, error) { return json.RawMessage(`{"author":"author"}`), nil }
		requireOne(t, golden(t, dir, eventstore.Type[posted2]("review.posted", lose)), `field "rating" is not stored`)
		requireOne(t, golden(t, dir, eventstore.Type[posted2]("review.posted", lose).Added("rating")), `"rating":0`)
	})
	t.Run("an upcaster fails", func(t *testing.T) {
		fail := func(json.RawMessage) (json.RawMessage, error) { return nil, errors.New("broken") }
		requireOne(t, golden(t, dir, eventstore.Type[posted2]("review.posted", fail)), "upcast from schema 1: broken")
	})
	t.Run("a file is missing", func(t *testing.T) {
		require.NoError(t, os.Rename(filepath.Join(dir, "review.posted.v1.json"), filepath.Join(dir, "away")))
		requireOne(t, golden(t, dir, def), "review.posted.v1.json is missing: restore it")
		require.NoFileExists(t, filepath.Join(dir, "review.posted.v1.json"))
		require.NoError(t, os.Rename(filepath.Join(dir, "away"), filepath.Join(dir, "review.posted.v1.json")))
	})
	t.Run("an upcaster is taken out", func(t *testing.T) {
		errs := golden(t, dir, eventstore.Type[posted2]("review.posted"))
		require.Contains(t, strings.Join(errs, "\n"), `review.posted.v2.json: the current schema version of "review.posted" is 1`)
	})
	t.Run("a type is taken out", func(t *testing.T) {
		require.Len(t, golden(t, dir), 2)
		require.Contains(t, golden(t, dir)[0], `review.posted.v1.json: no type has the name "review.posted"`)
	})
}

// Each set of fields of a version keeps its sample, so a later upcaster is tried with each.
// Promise: G12.2
func TestGoldenTypesKeepsEarlierSamplesOfAVersion(t *testing.T) {
	type reviewed struct {
		Author string `json:"author"`
	}
	dir := written(t, eventstore.Type[reviewed]("review.posted"))
	require.Empty(t, update(t, dir, eventstore.Type[posted1]("review.posted").Added("stars")))
	require.Len(t, samples(t, dir, "review.posted.v1.json"), 2)
	errs := golden(t, dir, eventstore.Type[posted2]("review.posted", renameStars))
	require.Contains(t, errs[0], "review.posted.v1.json, sample 1")
	require.Contains(t, errs[0], "no stars")
}

// An earlier name keeps its files, and needs Was as long as it has files.
// Promise: G12.1
func TestGoldenTypesOfAnEarlierName(t *testing.T) {
	dir := written(t, eventstore.Type[posted1]("posted"))
	require.Empty(t, golden(t, dir, eventstore.Type[posted1]("review.posted").Was("posted")))
	require.Empty(t, update(t, dir, eventstore.Type[posted2]("review.posted", renameStars).Was("posted")))
	require.FileExists(t, filepath.Join(dir, "review.posted.v2.json"))
	require.Contains(t, strings.Join(golden(t, dir, eventstore.Type[posted2]("review.posted", renameStars)), "\n"),
		`posted.v1.json: no type has the name "posted"`)
}

func TestGoldenTypesReportsDeclarationsWithoutUse(t *testing.T) {
	three := eventstore.Type[posted2]("posted").Added("a").Added("b").Added("c") // with room for a fourth
	one, _ := three.Added("one"), three.Added("two")
	require.Contains(t, strings.Join(golden(t, t.TempDir(), one), "\n"), `Added("one")`)
	less := eventstore.Type[posted2]("posted").Removed("a").Removed("b").Removed("c")
	one, _ = less.Removed("one"), less.Removed("two")
	require.Contains(t, strings.Join(golden(t, t.TempDir(), one), "\n"), `Removed("one")`)

	dir := written(t, eventstore.Type[posted1]("posted"))
	requireOne(t, golden(t, dir, eventstore.Type[posted1]("posted").Added("lang")), `Added("lang")`, "correct or delete")
	requireOne(t, golden(t, dir, eventstore.Type[posted1]("posted").Removed("stars")), `Removed("stars")`, "correct or delete")
	require.Empty(t, golden(t, dir, eventstore.Type[posted1]("posted")))
}

// What an upcaster sets counts as stored, also if it is empty.
func TestGoldenTypesUpcasterSetsEmptyValues(t *testing.T) {
	type v2 struct {
		posted1
		Text   string         `json:"text,omitempty"`
		Labels map[string]int `json:"labels,omitempty"`
		Items  []item         `json:"items,omitempty"`
		Home   *address       `json:"home,omitempty"`
	}
	with := func(fields string) func(json.RawMessage) (json.RawMessage, error) {
		return func(old json.RawMessage) (json.RawMessage, error) {
			return json.RawMessage(strings.TrimSuffix(string(old), "}") + fields + "}"), nil
		}
	}
	dir := written(t, eventstore.Type[posted1]("posted"))
	requireOne(t, golden(t, dir, eventstore.Type[v2]("posted", with(``))), `"text"`, `"labels"`, `"items"`, `"home"`)
	def := eventstore.Type[v2]("posted", with(`,"text":"","labels":{},"items":[],"home":null`))
	requireOne(t, golden(t, dir, def), "posted.v2.json", "it is written now")
	require.Empty(t, golden(t, dir, def))
	requireOne(t, golden(t, dir, eventstore.Type[v2]("posted", with(`,"txt":"","labels":{},"items":[],"home":null`))),
		`stored field "txt" is not read`, `field "text" is not stored`)
}

type either struct{ Rating int }

func (e *either) UnmarshalJSON(b []byte) error {
	var v struct{ Stars, Rating int }
	err := json.Unmarshal(b, &v)
	e.Rating = max(v.Stars, v.Rating)
	return err
}

type (
	// present reads that a field is there, whatever its value.
	present struct{ Gift bool }
	// trimmed panics if its JSON is shorter than expected.
	trimmed string
)

func (p *present) UnmarshalJSON(b []byte) error {
	var fields map[string]json.RawMessage
	err := json.Unmarshal(b, &fields)
	_, p.Gift = fields["Gift"]
	return err
}

func (s *trimmed) UnmarshalJSON(b []byte) error {
	*s = trimmed(b[1 : len(b)-1])
	return nil
}

// Promise: G12.1
func TestGoldenTypesFindsOutWhatAnUnusualTypeReads(t *testing.T) {
	type posted struct {
		Note  string `json:",omitempty"`
		Text  trimmed
		Rated map[int]int `json:",omitempty"`
	}
	dir := t.TempDir()
	write(t, dir, "posted.v1.json", `[{"data": {"Text": "", "Note": "", "Rated": {}}}]`)
	write(t, dir, "gift.v1.json", `[{"data": {"Gift": true}}]`)
	defs := []eventstore.TypeDef{eventstore.Type[posted]("posted"), eventstore.Type[present]("gift")}
	for _, e := range golden(t, dir, defs...) {
		require.Contains(t, e, `the data decodes to`, "the note is left out")
	}
	require.Empty(t, update(t, dir, defs...))
	require.Empty(t, golden(t, dir, defs...))
}

// A type that reads an old name itself needs neither an upcaster nor a declaration.
func TestGoldenTypesOfATypeThatReadsTwoNames(t *testing.T) {
	same := func(old json.RawMessage) (json.RawMessage, error) { return old, nil }
	dir := t.TempDir()
	write(t, dir, "posted.v1.json", `[{"data": {"Stars": 4}}]`)
	requireOne(t, golden(t, dir, eventstore.Type[either]("posted")), `field "Stars" was stored, and is not written`)
	require.Empty(t, update(t, dir, eventstore.Type[either]("posted", same)))
	require.Empty(t, golden(t, dir, eventstore.Type[either]("posted", same)))
	require.JSONEq(t, `{"Rating":4}`, string(samples(t, dir, "posted.v1.json")[0].Decoded))
}

// encoding/json ignores the case of a name, and so old data in another case is read.
func TestGoldenTypesOfOldDataInAnotherCase(t *testing.T) {
	same := func(old json.RawMessage) (json.RawMessage, error) { return old, nil }
	dir := t.TempDir()
	write(t, dir, "posted.v1.json", `[{"data": {"Author": "ann", "STARS": 4}, "decoded": {"author": "ann", "stars": 4}}]`)
	requireOne(t, golden(t, dir, eventstore.Type[posted1]("posted", same)), "posted.v2.json", "it is written now")
	require.JSONEq(t, `{"author":"ann","stars":4}`, string(samples(t, dir, "posted.v2.json")[0].Data))
}

func TestGoldenTypesRefusesFilesThatAreNoSamples(t *testing.T) {
	def := eventstore.Type[posted1]("posted")
	for _, text := range []string{``, `{}`, `[]`, `[{}]`, `[{"dta":{}}]`, `[{"data":{},"decodd":{}}]`, `[{"data":{}}] []`} {
		dir := t.TempDir()
		write(t, dir, "posted.v1.json", text)
		requireOne(t, golden(t, dir, def), "posted.v1.json", "must be a list of samples")
	}
	for _, name := range []string{"posted.json", "posted.v0.json", ".v1.json"} {
		dir := t.TempDir()
		write(t, dir, name, `[{"data":{}}]`)
		requireOne(t, golden(t, dir, def), name)
	}
	dir := written(t, def)
	write(t, dir, "README.md", "not a sample")
	require.Empty(t, golden(t, dir, def))
}

func TestGoldenTypesNamesOfFiles(t *testing.T) {
	dir := written(t, eventstore.Type[posted1]("shop/review posted:1%"), eventstore.Type[posted2]("überprüft"))
	require.FileExists(t, filepath.Join(dir, "shop%2Freview+posted%3A1%25.v1.json"))
	require.Contains(t, golden(t, t.TempDir(), eventstore.Type[posted1]("Posted").Was("posted"))[0], "differ only in case")
}

type refusing posted1

func (*refusing) UnmarshalJSON([]byte) error { return errors.New("not this way") }

// A codec of the type counts, with its rules for case.
// Promise: G12.1
func TestGoldenTypesWithACodec(t *testing.T) {
	strict := func(field string) eventstore.TypeDef {
		return eventstore.Type[posted1]("posted").Codec(
			func(v any) ([]byte, error) {
				return fmt.Appendf(nil, `["v",{%q:%d,"author":%q}]`, field, v.(posted1).Stars, v.(posted1).Author), nil
			},
			func(b []byte) (any, error) {
				var fields map[string]json.RawMessage
				var p posted1
				if err := json.Unmarshal(b, &[]any{new(string), &fields}); err != nil {
					return nil, err
				}
				if fields[field] != nil {
					if err := json.Unmarshal(fields[field], &p.Stars); err != nil {
						return nil, err
					}
				}
				return p, json.Unmarshal(fields["author"], &p.Author)
			})
	}
	drifts := func(b []byte) (any, error) {
		var p posted1
		err := json.Unmarshal(b, &p)
		p.Stars++
		return p, err
	}
	requireOne(t, golden(t, t.TempDir(), eventstore.Type[posted1]("posted").Codec(json.Marshal, drifts)), "decoded and encoded again")
	own := eventstore.Type[refusing]("posted").Codec( // whose UnmarshalJSON is not called
		func(v any) ([]byte, error) { return json.Marshal(posted1(v.(refusing))) },
		func(b []byte) (any, error) { var p posted1; err := json.Unmarshal(b, &p); return refusing(p), err })
	require.JSONEq(t, `{"author":"author","stars":1}`, string(samples(t, written(t, own), "posted.v1.json")[0].Data))
	dir := written(t, strict("stars"))
	requireOne(t, golden(t, dir, strict("Stars")), `stored field "stars" is not read`)
}
