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

// maxGrowth is how many bytes CanonicalJSON adds to a value at most, in digits of numbers.
const maxGrowth = 1 << 20

// CanonicalJSON returns the one form in which a JSON value is decoded. A text, and what jsonb makes of it, have
// the same. It has no spaces and no byte order mark. Keys are sorted, and of a key that occurs
// twice the last value counts. Strings have no escapes that are not required. Numbers have no
// exponent, and zero has no sign; their digits stay, also zeros at their end. Text that is not JSON is returned
// as it is, and so is a value to which the digits of its exponents would add more than 1 MiB.
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

// SameJSON reports whether two JSON values are equal, as jsonb compares them (ComparableJSON).
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

// TrimMark returns a text without UTF-8's byte order mark, which parsers of JSON may ignore (RFC 8259, 8.1).
func TrimMark(text []byte) []byte { return bytes.TrimPrefix(text, []byte("\ufeff")) }

func rewriteJSON(data []byte, number func(out []byte, n string) []byte) []byte {
	text := TrimMark(data)
	r := rewriter{
		dec:    jsontext.NewDecoder(bytes.NewBuffer(text), jsontext.AllowDuplicateNames(true)), // a *bytes.Buffer is read in place
		number: number, limit: len(text) + maxGrowth,
	}
	out, err := r.value(make([]byte, 0, len(text)))
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

// value appends the next value, or the name of a member.
func (r *rewriter) value(out []byte) ([]byte, error) {
	switch r.dec.PeekKind() {
	case '{':
		return r.object(out)
	case '[':
		return r.list(out, ']', func(out []byte) ([]byte, error) { return r.value(out) })
	}
	v, err := r.dec.ReadValue()
	switch {
	case err != nil:
		return nil, err
	case v[0] == '"' && bytes.IndexByte(v, '\\') >= 0:
		text, err := jsontext.AppendUnquote(nil, v)
		if err != nil {
			return nil, err
		}
		return jsontext.AppendQuote(out, text)
	case v.Kind() != '0':
		return append(out, v...), nil
	}
	if e := bytes.IndexAny(v, "eE"); e >= 0 {
		exp, err := strconv.Atoi(string(v[e+1:]))
		if err != nil || exp > maxGrowth || exp < -maxGrowth || len(out)+max(exp, -exp) > r.limit {
			return nil, errTooLong
		}
	}
	return r.number(out, string(v)), nil
}

// list appends an array or an object whose values or members next appends.
func (r *rewriter) list(out []byte, end jsontext.Kind, next func(out []byte) ([]byte, error)) ([]byte, error) {
	t, err := r.dec.ReadToken()
	if err != nil {
		return nil, err
	}
	out = append(out, t.String()...)
	for start := len(out); r.dec.PeekKind() != end; {
		if len(out) > start {
			out = append(out, ',')
		}
		if out, err = next(out); err != nil {
			return nil, err
		}
	}
	if t, err = r.dec.ReadToken(); err != nil {
		return nil, err
	}
	return append(out, t.String()...), nil
}

// object appends an object.
func (r *rewriter) object(out []byte) ([]byte, error) {
	type member struct{ from, value, to int } // places behind start; the name is before value
	var members []member
	start, sorted := len(out)+1, true
	name := func(in []byte, m member) []byte { return in[m.from:m.value] }
	out, err := r.list(out, '}', func(out []byte) (_ []byte, err error) {
		m := member{from: len(out) - start}
		if out, err = r.value(out); err != nil {
			return nil, err
		}
		out = append(out, ':')
		m.value = len(out) - start
		if out, err = r.value(out); err != nil {
			return nil, err
		}
		m.to = len(out) - start
		sorted = sorted && (len(members) == 0 || bytes.Compare(name(out[start:], members[len(members)-1]), name(out[start:], m)) < 0)
		members = append(members, m)
		return out, nil
	})
	if err != nil || sorted {
		return out, err
	}
	all := bytes.Clone(out[start:])
	slices.SortStableFunc(members, func(a, b member) int { return bytes.Compare(name(all, a), name(all, b)) })
	out = out[:start]
	for i, m := range members {
		if i+1 < len(members) && bytes.Equal(name(all, members[i+1]), name(all, m)) {
			continue
		}
		if len(out) > start {
			out = append(out, ',')
		}
		out = append(out, all[m.from:m.to]...)
	}
	return append(out, '}'), nil
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
