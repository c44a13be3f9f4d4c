package check

import (
	"bytes"
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
)

// maxGrowth is how many bytes CanonicalJSON adds to a value at most.
const maxGrowth = 1 << 20

// CanonicalJSON returns the form of a JSON value that everything decodes: jsonb and a text of the value
// that jsonb was made from have the same. It has no spaces and no byte order mark. Keys are in the order of their bytes, and
// of a key that occurs twice the last value counts. Strings have no escapes that are not required. Numbers
// have no exponent, and zero has no sign; their other digits stay, as do zeros at their end. Text that is not
// JSON is returned as it is, and so is a value to which the digits of its exponents would add more than 1 MiB.
func CanonicalJSON(data []byte) []byte { return rewriteJSON(data, plainNumber) }

// ComparableJSON is CanonicalJSON, and equal numbers are also the same text.
func ComparableJSON(data []byte) []byte {
	return rewriteJSON(data, func(out []byte, n string) []byte {
		start := len(out)
		if out = plainNumber(out, n); bytes.IndexByte(out[start:], '.') >= 0 {
			out = bytes.TrimSuffix(bytes.TrimRight(out, "0"), []byte("."))
		}
		return out
	})
}

// SameJSON reports whether two JSON values are equal, as jsonb compares them: spaces, the order of keys,
// escapes and the form of numbers make no difference.
func SameJSON(a, b []byte) bool { return bytes.Equal(ComparableJSON(a), ComparableJSON(b)) }

// IsNull reports whether data is JSON's null.
func IsNull(data []byte) bool { return string(bytes.TrimSpace(TrimMark(data))) == "null" }

// TakesNull reports whether JSON's null has a value of type t, or t decides itself. To decode it into another
// type, such as a struct with fields, would give a zero value, as if each field had been written so.
func TakesNull(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Pointer, reflect.Interface, reflect.Map, reflect.Slice:
		return true
	}
	return t.Kind() == reflect.Struct && t.NumField() == 0 || reflect.PointerTo(t).Implements(reflect.TypeFor[json.Unmarshaler]())
}

// TrimMark returns a text without the byte order mark of UTF-8 at its beginning, which parsers of JSON may
// ignore (RFC 8259, 8.1).
func TrimMark(text []byte) []byte { return bytes.TrimPrefix(text, []byte("\ufeff")) }

func rewriteJSON(data []byte, number func(out []byte, n string) []byte) []byte {
	text := TrimMark(data)
	r := rewriter{
		dec:    jsontext.NewDecoder(bytes.NewBuffer(text), jsontext.AllowDuplicateNames(true)), // a *bytes.Buffer is read in place
		number: number, limit: len(text) + maxGrowth,
	}
	out, err := r.value(make([]byte, 0, len(data)))
	if err != nil || len(bytes.TrimLeft(text[r.dec.InputOffset():], " \t\r\n")) > 0 {
		return data
	}
	return out
}

type rewriter struct {
	dec    *jsontext.Decoder
	number func(out []byte, n string) []byte
	limit  int // of out
}

var errTooLong = errors.New("too many digits")

// value appends the next value.
func (r *rewriter) value(out []byte) ([]byte, error) {
	t, err := r.dec.ReadToken()
	if err != nil {
		return nil, err
	}
	switch t.Kind() {
	case '{':
		return r.object(append(out, '{'))
	case '[':
		out = append(out, '[')
		for r.dec.PeekKind() != ']' {
			if out, err = r.value(out); err != nil {
				return nil, err
			}
			out = append(out, ',')
		}
		return r.end(out)
	case '"':
		return jsontext.AppendQuote(out, t.String())
	case '0':
		n := t.String()
		if e := strings.IndexAny(n, "eE"); e >= 0 {
			if exp, err := strconv.Atoi(n[e+1:]); err != nil || len(out)+max(exp, -exp) > r.limit {
				return nil, errTooLong
			}
		}
		return r.number(out, n), nil
	}
	return append(out, t.String()...), nil
}

// end appends the end of an array or an object instead of the comma of its last value.
func (r *rewriter) end(out []byte) ([]byte, error) {
	t, err := r.dec.ReadToken()
	if err != nil {
		return nil, err
	}
	if last := len(out) - 1; out[last] == ',' {
		out = out[:last]
	}
	return append(out, t.String()...), nil
}

// object appends the members of an object and its end.
func (r *rewriter) object(out []byte) ([]byte, error) {
	type member struct {
		name     string
		from, to int
	}
	var members []member
	start, sorted := len(out), true
	for r.dec.PeekKind() != '}' {
		t, err := r.dec.ReadToken()
		if err != nil {
			return nil, err
		}
		m := member{name: t.String(), from: len(out)}
		if out, err = jsontext.AppendQuote(out, m.name); err != nil {
			return nil, err
		}
		if out, err = r.value(append(out, ':')); err != nil {
			return nil, err
		}
		out = append(out, ',')
		m.to = len(out)
		sorted = sorted && (len(members) == 0 || members[len(members)-1].name < m.name)
		members = append(members, m)
	}
	if !sorted {
		slices.SortStableFunc(members, func(a, b member) int { return strings.Compare(a.name, b.name) })
		all := bytes.Clone(out[start:])
		out = out[:start]
		for i, m := range members {
			if i+1 == len(members) || members[i+1].name != m.name {
				out = append(out, all[m.from-start:m.to-start]...)
			}
		}
	}
	return r.end(out)
}

// plainNumber appends a JSON number without its exponent, as PostgreSQL's numeric writes it.
func plainNumber(out []byte, n string) []byte {
	mantissa, exponent := n, 0
	if e := strings.IndexAny(n, "eE"); e >= 0 {
		mantissa = n[:e]
		exponent, _ = strconv.Atoi(n[e+1:]) // value has checked it
	}
	digits, negative := strings.CutPrefix(mantissa, "-")
	if negative && strings.Trim(digits, "0.") != "" {
		out = append(out, '-')
	}
	whole, fraction, _ := strings.Cut(digits, ".")
	digits, point := whole+fraction, len(whole)+exponent
	if point < 1 {
		digits, point = strings.Repeat("0", 1-point)+digits, 1
	}
	digits += strings.Repeat("0", max(point-len(digits), 0))
	whole = strings.TrimLeft(digits[:point-1], "0") + digits[point-1:point]
	if out = append(out, whole...); point < len(digits) {
		out = append(append(out, '.'), digits[point:]...)
	}
	return out
}
