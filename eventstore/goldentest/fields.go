package goldentest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/kinora-go/kinora/internal/eventtype"
)

// Paths are names of JSON fields, joined by dots. Elements of an array have the path of the array,
// and a key that is data, such as one of a map, is "*".
func joinPath(path, key string, dynamic map[string]bool) string {
	if dynamic[path] {
		key = "*"
	}
	if path == "" {
		return key
	}
	return path + "." + key
}

// parseJSON returns a tree of a JSON value, or nil. Numbers keep their digits.
func parseJSON(data []byte) any {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	var v any
	if dec.Decode(&v) != nil {
		return nil
	}
	return v
}

// reader finds out which fields of data a type reads, by changing the data. So it needs to know
// nothing of tags, codecs and UnmarshalJSON.
type reader struct {
	decode  func([]byte) (any, error)
	root    any // the data
	value   any // the value that root decodes to
	dynamic map[string]bool
}

// unread returns the paths whose values do not matter.
func (r *reader) unread() []string {
	var found []string
	r.walk(r.root, "", &found)
	return found
}

func (r *reader) walk(node any, path string, found *[]string) {
	switch node := node.(type) {
	case []any:
		for _, e := range node {
			r.walk(e, path, found)
		}
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(node)) {
			at := joinPath(path, key, r.dynamic)
			if r.reads(node, key) {
				r.walk(node[key], at, found)
			} else if !slices.Contains(*found, at) {
				*found = append(*found, at)
			}
		}
	}
}

// reads reports whether a field matters: the data without it, or with another value, decodes to
// another value, or does not decode.
func (r *reader) reads(object map[string]any, key string) bool {
	was := object[key]
	defer func() { object[key] = was }()
	delete(object, key)
	if r.changed() {
		return true
	}
	for _, other := range []any{1, "x", true, nil, []any{}, map[string]any{}} {
		object[key] = other
		if r.changed() {
			return true
		}
	}
	return false
}

func (r *reader) changed() (changed bool) {
	data, err := json.Marshal(r.root)
	if err != nil {
		return true
	}
	defer func() {
		if recover() != nil { // an UnmarshalJSON that does not expect this
			changed = true
		}
	}()
	v, err := r.decode(data)
	return err != nil || !reflect.DeepEqual(v, r.value)
}

// dynamicKeys returns the paths of the objects in full whose keys are data. Renamed, such a key is in
// the value that is decoded.
func dynamicKeys(d *eventtype.Def, full any) map[string]bool {
	dynamic := map[string]bool{}
	renamed := func(object map[string]any) (kept bool) {
		defer func() {
			if recover() != nil {
				kept = false
			}
		}()
		key := slices.Min(slices.Collect(maps.Keys(object)))
		other := key + "1"
		for ; object[other] != nil; other += "1" {
		}
		object[other] = object[key]
		delete(object, key)
		defer func() {
			object[key] = object[other]
			delete(object, other)
		}()
		data, err := json.Marshal(full)
		if err != nil {
			return false
		}
		v, err := d.Decode(data)
		if err != nil {
			return false
		}
		again, err := d.Encode(v)
		return err == nil && len(differences(full, parseJSON(again), nil, nil)) == 0
	}
	var walk func(node any, path string)
	walk = func(node any, path string) {
		switch node := node.(type) {
		case []any:
			for _, e := range node {
				walk(e, path)
			}
		case map[string]any:
			if len(node) > 0 && renamed(node) {
				dynamic[path] = true
			}
			for key, v := range node {
				walk(v, joinPath(path, key, dynamic))
			}
		}
	}
	walk(full, "")
	return dynamic
}

// missingFields returns the paths of full that data does not have. Like encoding/json it ignores the
// case of a name if no name is the same. Data that is null, or has another form, lacks nothing.
func missingFields(full, data any, dynamic map[string]bool) (missing []string) {
	var walk func(full, data any, path string)
	walk = func(full, data any, path string) {
		switch full := full.(type) {
		case []any:
			list, _ := data.([]any)
			for i, e := range list {
				if len(full) > 0 {
					walk(full[min(i, len(full)-1)], e, path)
				}
			}
		case map[string]any:
			object, ok := data.(map[string]any)
			if !ok {
				return
			}
			keys := slices.Sorted(maps.Keys(full))
			if dynamic[path] {
				for key, v := range object {
					walk(full[keys[0]], v, joinPath(path, key, dynamic))
				}
				return
			}
			for _, key := range keys {
				at := joinPath(path, key, dynamic)
				if v, ok := lookup(object, key); ok {
					walk(full[key], v, at)
				} else if !slices.Contains(missing, at) {
					missing = append(missing, at)
				}
			}
		}
	}
	walk(full, data, "")
	return missing
}

func lookup(object map[string]any, key string) (any, bool) {
	if v, ok := object[key]; ok {
		return v, true
	}
	for k, v := range object {
		if strings.EqualFold(k, key) {
			return v, true
		}
	}
	return nil, false
}

// differences describes the fields of data that are written with another name or value now. Names
// count exactly, because other programs read them. An empty value may be left out.
func differences(data, now any, unread []string, dynamic map[string]bool) (found []string) {
	var walk func(data, now any, path string)
	walk = func(data, now any, path string) {
		add := func(format string, args ...any) { found = append(found, fmt.Sprintf(format, args...)) }
		switch data := data.(type) {
		case map[string]any:
			object, ok := now.(map[string]any)
			if !ok {
				add("field %q was stored as an object, and is now written as %s", path, textJSON(now))
				return
			}
			for _, key := range slices.Sorted(maps.Keys(data)) {
				at := joinPath(path, key, dynamic)
				v, ok := object[key]
				switch {
				case ok:
					walk(data[key], v, at)
				case !slices.Contains(unread, at) && !emptyJSON(data[key]):
					add("field %q was stored, and is not written under this name any more", at)
				}
			}
		case []any:
			list, ok := now.([]any)
			if !ok || len(list) != len(data) {
				add("field %q was stored as %s, and is now written as %s", path, textJSON(data), textJSON(now))
				return
			}
			for i := range data {
				walk(data[i], list[i], path)
			}
		default:
			if !sameScalar(data, now) {
				add("field %q was stored as %s, and is now written as %s", path, textJSON(data), textJSON(now))
			}
		}
	}
	walk(data, now, "")
	return found
}

func emptyJSON(v any) bool {
	switch v := v.(type) {
	case map[string]any:
		return len(v) == 0
	case []any:
		return len(v) == 0
	}
	return v == nil || v == false || v == "" || sameScalar(v, json.Number("0"))
}

// withoutEmpty returns v without fields that are empty.
func withoutEmpty(v any) any {
	switch v := v.(type) {
	case []any:
		for i := range v {
			v[i] = withoutEmpty(v[i])
		}
	case map[string]any:
		for key := range v {
			if v[key] = withoutEmpty(v[key]); emptyJSON(v[key]) {
				delete(v, key)
			}
		}
	}
	return v
}

func sameScalar(a, b any) bool {
	x, ok := a.(json.Number)
	y, ok2 := b.(json.Number)
	if !ok || !ok2 {
		return reflect.DeepEqual(a, b)
	}
	f, err := strconv.ParseFloat(string(x), 64)
	g, err2 := strconv.ParseFloat(string(y), 64)
	return x == y || err == nil && err2 == nil && f == g && strings.ContainsAny(string(x+y), ".eE")
}

func textJSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprint(v)
	}
	return string(text)
}
