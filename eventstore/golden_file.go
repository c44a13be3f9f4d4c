package eventstore

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

// goldenKey names a golden file: a stored name and a schema version.
type goldenKey struct {
	name   string
	schema int
}

func (k goldenKey) compare(other goldenKey) int {
	return cmp.Or(cmp.Compare(k.name, other.name), cmp.Compare(k.schema, other.schema))
}

// goldenFile has the samples of one stored name and schema version.
type goldenFile struct {
	path    string
	schema  int
	samples []goldenSample // at least one
	grown   bool           // the type has other fields than the last sample
	changed bool           // the file must be written
}

// goldenSample is stored data, and the JSON of the value that it decodes to. Decoded is empty if it
// is the same as Data.
type goldenSample struct {
	Data    json.RawMessage `json:"data"`
	Decoded json.RawMessage `json:"decoded,omitempty"`
}

func (s goldenSample) decoded() []byte {
	if len(s.Decoded) > 0 {
		return s.Decoded
	}
	return s.Data
}

var goldenForm = regexp.MustCompile(`^(.+)\.v([1-9]\d{0,4})\.json$`)

// goldenPath escapes in name what a file name cannot have.
func goldenPath(dir, name string, schema int) string {
	return filepath.Join(dir, fmt.Sprintf("%s.v%d.json", url.QueryEscape(name), schema))
}

// readGolden reads the files of dir that end in ".json". A dir that does not exist has none.
func readGolden(dir string) (map[goldenKey]*goldenFile, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	files := map[goldenKey]*goldenFile{}
	for _, e := range entries {
		if filepath.Ext(e.Name()) != ".json" {
			continue
		}
		path := filepath.Join(dir, e.Name())
		m := goldenForm.FindStringSubmatch(e.Name())
		if m == nil {
			return nil, fmt.Errorf("%s: the name of the file must be a stored name, .v, a schema version and .json", path)
		}
		name, err := url.QueryUnescape(m[1])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		f := &goldenFile{path: path}
		f.schema, _ = strconv.Atoi(m[2])
		if err := f.read(); err != nil {
			return nil, fmt.Errorf("%s: %w: it must be a list of samples: [{\"data\": {…}}]", path, err)
		}
		files[goldenKey{name, f.schema}] = f
	}
	return files, nil
}

func (f *goldenFile) read() error {
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

func (f *goldenFile) write() error {
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
