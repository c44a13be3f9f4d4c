package goldentest

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
)

// fileKey names a golden file: a stored name and a schema version.
type fileKey struct {
	name   string
	schema int
}

func (k fileKey) compare(other fileKey) int {
	return cmp.Or(cmp.Compare(k.name, other.name), cmp.Compare(k.schema, other.schema))
}

// file has the samples of one stored name and schema version.
type file struct {
	path    string
	schema  int
	samples []sample // at least one
	grown   bool     // the type has other fields than the last sample
	changed bool     // the file must be written
}

// sample is stored data, and the JSON of the value that it decodes to. Decoded is empty if it
// is the same as Data.
type sample struct {
	Data    json.RawMessage `json:"data"`
	Decoded json.RawMessage `json:"decoded,omitempty"`
}

func (s sample) decoded() []byte {
	if len(s.Decoded) > 0 {
		return s.Decoded
	}
	return s.Data
}

var fileForm = regexp.MustCompile(`^(.+)\.v([1-9]\d{0,4})\.json$`)

// filePath escapes in name what a file name cannot have.
func filePath(dir, name string, schema int) string {
	return filepath.Join(dir, fmt.Sprintf("%s.v%d.json", url.QueryEscape(name), schema))
}

// readFiles reads the files of dir that end in ".json". A dir that does not exist has none.
func readFiles(dir string) (map[fileKey]*file, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	files := map[fileKey]*file{}
	for _, e := range entries {
		if filepath.Ext(e.Name()) != ".json" {
			continue
		}
		path := filepath.Join(dir, e.Name())
		m := fileForm.FindStringSubmatch(e.Name())
		if m == nil {
			return nil, fmt.Errorf("%s: the name of the file must be a stored name, .v, a schema version and .json", path)
		}
		name, err := url.QueryUnescape(m[1])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		f := &file{path: path}
		f.schema, _ = strconv.Atoi(m[2])
		if err := f.read(); err != nil {
			return nil, fmt.Errorf("%s: %w: it must be a list of samples: [{\"data\": {…}}]", path, err)
		}
		files[fileKey{name, f.schema}] = f
	}
	return files, nil
}

func (f *file) read() error {
	text, err := os.ReadFile(f.path)
	if err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&f.samples); err != nil {
		return err
	}
	if dec.More() {
		return errors.New("text after the list")
	}
	if len(f.samples) == 0 {
		return errors.New("no sample")
	}
	for i, s := range f.samples {
		if len(s.Data) == 0 {
			return fmt.Errorf("sample %d has no data", i+1)
		}
	}
	return nil
}

func (f *file) write() error {
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	for i, s := range f.samples {
		if bytes.Equal(s.Decoded, s.Data) {
			f.samples[i].Decoded = nil
		}
	}
	if err := enc.Encode(f.samples); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(f.path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(f.path, text.Bytes(), 0o644)
}
