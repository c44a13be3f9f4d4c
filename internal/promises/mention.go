package main

import (
	"bytes"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// mention is a promise that the comment of a test names.
type mention struct {
	number string
	place  string // file:line
	test   test
}

var mentionForm = regexp.MustCompile(`^//\s*Promises?:\s*(.*)$`)

// readMentions returns the promises that comments of Go files name, in order of files and lines. Its error names
// each comment that belongs to no test.
func readMentions(root string) ([]mention, error) {
	suiteOf, err := readSuites(root)
	if err != nil {
		return nil, err
	}
	var all []mention
	var wrong []error
	err = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && path != root && slices.Contains([]string{".git", ".bin", "testdata"}, entry.Name()):
			return filepath.SkipDir
		case entry.IsDir() || filepath.Ext(path) != ".go":
			return nil
		}
		found, err := mentionsOf(root, path, suiteOf)
		all, wrong = append(all, found...), append(wrong, err)
		return nil
	})
	return all, errors.Join(append(wrong, err)...)
}

// mentionsOf returns the promises that comments of a file name.
func mentionsOf(root, path string, suiteOf map[string]string) (all []mention, wrong error) {
	source, err := os.ReadFile(path)
	if err != nil || !bytes.Contains(source, []byte("Promise")) {
		return nil, err
	}
	name, err := filepath.Rel(root, path)
	if err != nil {
		return nil, err
	}
	name = filepath.ToSlash(name)
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, name, source, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	tests := testsByLine(files, file, filepath.ToSlash(filepath.Dir(name)), suiteOf)
	for _, group := range file.Comments {
		for _, comment := range group.List {
			m := mentionForm.FindStringSubmatch(comment.Text)
			if m == nil {
				continue
			}
			line := files.Position(comment.Pos()).Line
			place := fmt.Sprintf("%s:%d", name, line)
			t, ok := tests[line]
			if !ok {
				wrong = errors.Join(wrong, fmt.Errorf("%s: this comment belongs to no test: "+
					"write it in the doc comment of a test, or above the name of a case or a cell", place))
				continue
			}
			for number := range strings.SplitSeq(m[1], ", ") {
				all = append(all, mention{number, place, t})
			}
		}
	}
	return all, wrong
}
