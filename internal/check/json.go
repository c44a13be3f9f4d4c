package check

import (
	"encoding/json"
	"io"
	"strings"
)

// CanonicalJSON returns a JSON value with sorted keys and without spaces. Numbers keep their
// digits. Text that is not one JSON value is returned as it is.
func CanonicalJSON(data []byte) string {
	dec := json.NewDecoder(strings.NewReader(string(data)))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		return string(data)
	}
	if _, err := dec.Token(); err != io.EOF {
		return string(data)
	}
	canonical, err := json.Marshal(v)
	if err != nil {
		return string(data)
	}
	return string(canonical)
}

// SameJSON reports whether two JSON values differ only in spaces and in the order of keys.
func SameJSON(a, b []byte) bool { return CanonicalJSON(a) == CanonicalJSON(b) }
