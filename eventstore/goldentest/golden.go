// Package goldentest checks in a test that a program still reads every event that it ever stored.
package goldentest

import (
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/internal/eventtype"
)

// Check checks in a test that the program still reads every event that it ever stored. dir,
// such as "testdata/events", has a file for each type and schema version, such as
// review.posted.v2.json, with samples of stored data: one for each set of fields that this version has
// had. Commit these files. Each table of types needs a directory of its own.
//
//   - The file of the current version is written if it is missing, with a value in every field. The
//     test fails then, so that you read and commit the file. If the environment variable CI is set,
//     the file is not written, and the test fails too.
//   - Every sample must still decode, through the upcasters of its version, to the recorded value.
//   - A stored field that the type does not read is an error, unless it is declared with Removed. A
//     field of the type that stored data does not have is an error, unless it is declared with Added. So
//     a changed struct needs an upcaster or a declaration.
//   - The current version must be written as recorded. Adding or removing declared fields adds a sample.
//   - A missing file of an older version is an error, and so is a file of an unregistered type or version.
//
// With KINORA_GOLDEN=update in the environment, the values that samples decode to are recorded again.
// Stored data in the files is never changed. If a version is not in use yet, delete its file, and it
// is written again.
//
// A type that no generated value fits, such as one whose UnmarshalJSON accepts few texts, is reported.
// Write its file by hand: [{"data": {…}}], with data as the program stores it.
func Check(t testing.TB, types *eventstore.Types, dir string) {
	t.Helper()
	if err := types.Err(); err != nil {
		t.Errorf("%v", err)
		return
	}
	mode := os.Getenv("KINORA_GOLDEN")
	if mode != "" && mode != "update" {
		t.Errorf("KINORA_GOLDEN=%s: must be empty or update", mode)
		return
	}
	files, err := readFiles(dir)
	if err != nil {
		t.Errorf("%v", err)
		return
	}
	g := &run{dir: dir, files: files, update: mode == "update", readOnly: mode == "" && os.Getenv("CI") != ""}
	defs := types.Defs()
	g.checkNames(defs)
	for _, d := range defs {
		(&typeCheck{run: g, d: d, used: map[string]bool{}}).check()
	}
	for _, p := range g.problems {
		t.Errorf("%s", p)
	}
}

// run is one call of Check.
type run struct {
	dir      string
	files    map[fileKey]*file
	update   bool // record decoded values again
	readOnly bool // write nothing
	problems []string
}

func (g *run) problem(format string, args ...any) {
	g.problems = append(g.problems, fmt.Sprintf(format, args...))
}

// checkNames reports files of no registered version, and names whose files are one file on some systems.
func (g *run) checkNames(defs []*eventtype.Def) {
	byName := map[string]*eventtype.Def{}
	for _, d := range defs {
		for _, name := range append([]string{d.Name}, d.Was...) {
			byName[name] = d
		}
	}
	folded := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		if other, ok := folded[strings.ToLower(name)]; ok {
			g.problem("event names %q and %q differ only in case: their files would be one on macOS and Windows: rename one, with Was",
				other, name)
		}
		folded[strings.ToLower(name)] = name
	}
	for _, key := range slices.SortedFunc(maps.Keys(g.files), fileKey.compare) {
		d, ok := byName[key.name]
		switch {
		case !ok:
			g.problem("%s: no type has the name %q: register it, declare it as an earlier name with Was, or delete the file if no such event is stored",
				g.files[key].path, key.name)
		case key.schema > d.Schema():
			g.problem("%s: the current schema version of %q is %d: add the missing upcaster, or delete the file if no such event is stored",
				g.files[key].path, d.Name, d.Schema())
		}
	}
}

// typeCheck checks one type.
type typeCheck struct {
	*run
	d       *eventtype.Def
	full    any             // the JSON of a value with every field; nil if there is none
	sample  []byte          // the same
	dynamic map[string]bool // paths of objects in full whose keys are data
	used    map[string]bool // declarations that a sample needs: "+" or "-" and the path
}

func (g *typeCheck) check() {
	before := len(g.problems)
	current := g.d.Schema()
	g.makeFull()
	grown := true // the newest sample of the current version lacks a field, or there is none
	for schema := 1; schema <= current; schema++ {
		files := g.versions(schema)
		if len(files) == 0 && schema < current {
			g.problem("%s is missing: restore it from version control, or write it with the data of a stored event: [{\"data\": {…}}]",
				filePath(g.dir, g.d.Name, schema))
		}
		for _, f := range files {
			for i := range f.samples {
				g.checkSample(f, i, schema == current)
			}
		}
		if schema == current && len(files) > 0 {
			grown = files[len(files)-1].grown
		}
	}
	if len(g.problems) > before {
		return
	}
	g.checkDeclarations()
	if grown && len(g.problems) == before {
		g.record(current)
	}
	for _, f := range g.ofType() {
		g.save(f)
	}
}

// ofType returns the files of the type, of all its names and versions.
func (g *typeCheck) ofType() (files []*file) {
	for schema := range g.d.Schema() {
		files = append(files, g.versions(schema+1)...)
	}
	return files
}

// versions returns the files of a schema version: those of earlier names first.
func (g *typeCheck) versions(schema int) (files []*file) {
	for _, name := range append(slices.Clone(g.d.Was), g.d.Name) {
		if f := g.files[fileKey{name, schema}]; f != nil {
			files = append(files, f)
		}
	}
	return files
}

// makeFull sets full: the newest sample with the fields that it lacks.
func (g *typeCheck) makeFull() {
	start := reflect.Zero(g.d.Go).Interface()
	if files := g.ofType(); len(files) > 0 {
		f := files[len(files)-1]
		data, err := g.d.Upcast(f.schema, f.samples[len(f.samples)-1].Data)
		if err != nil {
			return // checkSample reports it
		}
		if start, err = g.d.Decode(data); err != nil {
			return
		}
	}
	sample, err := fill(g.d, start)
	if err != nil {
		g.problem("event type %q: %v, or write %s by hand, with the data of an event that has every field: [{\"data\": {…}}]",
			g.d.Name, err, filePath(g.dir, g.d.Name, g.d.Schema()))
		return
	}
	g.sample, g.full = sample, parseJSON(sample)
	g.dynamic = dynamicKeys(g.d, g.full)
}

// checkSample checks that a sample decodes as recorded, and that no field is lost.
func (g *typeCheck) checkSample(f *file, i int, current bool) {
	sample := &f.samples[i]
	var faults []string
	fault := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	defer func() { g.report(f, i, faults) }()
	data, err := g.d.Upcast(f.schema, sample.Data)
	if err != nil {
		fault("upcast %v: correct the upcaster", err)
		return
	}
	value, err := g.d.Decode(data)
	if err != nil {
		fault("%v: correct the type, or add an upcaster", err)
		return
	}
	again, err := g.d.Encode(value)
	if err != nil {
		fault("encode what was decoded: %v", err)
		return
	}
	tree := parseJSON(data)
	unread := (&reader{decode: g.d.Decode, root: tree, value: value, dynamic: g.dynamic}).unread()
	missing := missingFields(g.full, tree, g.dynamic)
	zero := missingFields(g.full, withoutEmpty(parseJSON(again)), g.dynamic)
	missing = slices.DeleteFunc(missing, func(path string) bool { return !slices.Contains(zero, path) })
	for _, path := range unread {
		if !g.declared("-", path, g.d.Removed) {
			fault("stored field %q is not read: add an upcaster that converts it, or declare Removed(%q)", path, path)
		}
	}
	for _, path := range missing {
		if !g.declared("+", path, g.d.Added) {
			fault("field %q is not stored, so it decodes to its zero value: add an upcaster that sets it, or declare Added(%q)", path, path)
		}
	}
	if last := i == len(f.samples)-1; last && current {
		f.grown = len(unread)+len(missing) > 0
		for _, d := range differences(tree, parseJSON(again), unread, g.dynamic) {
			fault("%s: add an upcaster", d)
		}
	}
	if len(faults) > 0 && current {
		fault("With a new upcaster, new events have schema version %d. If no event of version %d is stored yet, delete the file instead",
			f.schema+1, f.schema)
	}
	if len(faults) > 0 || check.SameJSON(sample.decoded(), again) {
		return
	}
	if g.update {
		sample.Decoded, f.changed = again, true
		return
	}
	fault("the data decodes to\n\t\t%s\n\tand the file has\n\t\t%s\n\tIf the new value is right, run the test with KINORA_GOLDEN=update",
		check.CanonicalJSON(again), check.CanonicalJSON(sample.decoded()))
}

func (g *typeCheck) report(f *file, i int, faults []string) {
	if len(faults) == 0 {
		return
	}
	at := f.path
	if len(f.samples) > 1 {
		at += fmt.Sprintf(", sample %d", i+1)
	}
	g.problem("%s: %s\n\t%s", at, g.d.Go, strings.Join(faults, "\n\t"))
}

// declared reports whether path is in list, and notes that the declaration is needed.
func (g *typeCheck) declared(kind, path string, list []string) bool {
	g.used[kind+path] = true
	return slices.Contains(list, path)
}

// checkDeclarations reports declarations that no sample needs.
func (g *typeCheck) checkDeclarations() {
	for _, path := range g.d.Added {
		if !g.used["+"+path] {
			g.problem("event type %q: Added(%q): every sample has this field, or the type has none of this name: correct or delete the declaration",
				g.d.Name, path)
		}
	}
	for _, path := range g.d.Removed {
		if !g.used["-"+path] {
			g.problem("event type %q: Removed(%q): no sample has this field, or the type reads it: correct or delete the declaration",
				g.d.Name, path)
		}
	}
}

// record adds a sample of the current version with every field.
func (g *typeCheck) record(schema int) {
	path := filePath(g.dir, g.d.Name, schema)
	key := fileKey{g.d.Name, schema}
	f := g.files[key]
	if f == nil {
		f = &file{path: path, schema: schema}
	}
	what := fmt.Sprintf("schema version %d of %q has no sample", schema, g.d.Name)
	if len(g.versions(schema)) > 0 {
		what = fmt.Sprintf("schema version %d of %q has no sample with the fields that it has now", schema, g.d.Name)
	}
	if g.readOnly {
		g.problem("%s: %s: run the test without CI in the environment, which writes the sample, and commit the file", path, what)
		return
	}
	f.samples, f.changed = append(f.samples, sample{Data: g.sample}), true
	g.files[key] = f
	if !g.update {
		g.problem("%s: %s, so it is written now: read it, commit the file, and run the test again", path, what)
	}
}

func (g *typeCheck) save(f *file) {
	if !f.changed {
		return
	}
	if err := f.write(); err != nil {
		g.problem("write a golden file: %v", err)
	}
}
