package goldentest

import (
	"cmp"
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/internal/eventtype"
)

// fill returns the JSON of start after giving each field that is zero a value.
func fill(d *eventtype.Def, start any) ([]byte, error) {
	v := reflect.New(d.Go).Elem()
	v.Set(reflect.ValueOf(start))
	f := &filler{}
	set := f.fill
	if d.OwnCodec {
		set = f.fillKind // its MarshalJSON may not be used
	}
	if err := set(v, d.Go.String(), d.Go.Name()); err != nil {
		return nil, err
	}
	data, err := d.Encode(v.Interface())
	if err != nil {
		return nil, fmt.Errorf("encode a sample: %w: correct the type", err)
	}
	value, err := d.Decode(data)
	if err != nil {
		return nil, fmt.Errorf("decode the sample %s: %w: correct the type", data, err)
	}
	if lost := lostFields(v, reflect.ValueOf(value), d.Go.String(), nil); len(lost) > 0 {
		return nil, fmt.Errorf("%s: a value is lost when it is encoded as %s and decoded again: correct the type, or tag the field json:\"-\"",
			strings.Join(lost, ", "), data)
	}
	again, err := d.Encode(value)
	if err != nil {
		return nil, fmt.Errorf("encode a decoded sample: %w: correct the type", err)
	}
	if !check.SameJSON(data, again) {
		return nil, fmt.Errorf("the sample %s, decoded and encoded again, is %s: correct the type", data, again)
	}
	return data, nil
}

// filler gives zero values a value: the same on every run, and others for each field.
type filler struct {
	n    int            // numbers that were given
	open []reflect.Type // structs around the value; a type inside itself stays zero
}

var (
	timeType   = reflect.TypeFor[time.Time]()
	numberType = reflect.TypeFor[json.Number]()
)

// candidates are tried for a type that decodes itself.
var candidates = []string{
	`"1"`, `1`, `"2001-02-03T04:05:06Z"`, `"2001-02-03"`, `true`, `"a"`, `"00000000-0000-7000-8000-000000000001"`,
	`"192.0.2.1"`, `"192.0.2.0/24"`, `"1s"`, `[1]`, `["a"]`, `{}`,
}

func (f *filler) next() int { f.n++; return f.n }

// fill fills v. path is for messages, and name is the text of a string.
func (f *filler) fill(v reflect.Value, path, name string) error {
	switch {
	case v.Type() == timeType:
		if v.IsZero() {
			v.Set(reflect.ValueOf(time.Date(2001, 2, 3, 4, 5, f.next()%60, 0, time.UTC)))
		}
		return nil
	case v.Type() == numberType:
		if v.IsZero() {
			v.SetString(fmt.Sprint(f.next()))
		}
		return nil
	case !codesItself(v.Type()):
		return f.fillKind(v, path, name)
	}
	was := reflect.New(v.Type()).Elem()
	was.Set(v)
	for _, try := range []*filler{f, {open: f.open}} { // the second one gives 1, for an enumeration
		if err := try.fillKind(v, path, name); err == nil && survives(v) {
			return nil
		}
		v.Set(was)
	}
	if !v.IsZero() {
		return nil
	}
	for _, text := range candidates {
		if accepts(v, text) && survives(v) {
			return nil
		}
		v.SetZero()
	}
	return fmt.Errorf("%s: no generated value of %s can be encoded and decoded again: correct its methods", path, v.Type())
}

func (f *filler) fillKind(v reflect.Value, path, name string) error {
	switch v.Kind() {
	case reflect.Struct:
		return f.fillStruct(v, path)
	case reflect.Pointer:
		if f.isOpen(v.Type().Elem()) {
			return nil
		}
		if v.IsNil() {
			v.Set(reflect.New(v.Type().Elem()))
		}
		return f.fill(v.Elem(), path, name)
	case reflect.Slice:
		return f.fillSlice(v, path, name)
	case reflect.Array:
		for i := range v.Len() {
			if err := f.fill(v.Index(i), path, name); err != nil {
				return err
			}
		}
		return nil
	case reflect.Map:
		return f.fillMap(v, path, name)
	case reflect.Interface:
		if v.IsNil() && v.NumMethod() > 0 {
			return fmt.Errorf("%s: no value can be generated for the interface %s, and encoding/json cannot decode it: "+
				"give the struct an UnmarshalJSON", path, v.Type())
		}
		if v.IsNil() {
			v.Set(reflect.ValueOf(strings.ToLower(name)))
		}
		return nil
	}
	if !v.IsZero() {
		return nil
	}
	return f.fillScalar(v, path, name)
}

// fillScalar sets a value that has no parts.
func (f *filler) fillScalar(v reflect.Value, path, name string) error {
	switch {
	case v.Kind() == reflect.String:
		v.SetString(strings.ToLower(name))
	case v.Kind() == reflect.Bool:
		v.SetBool(true)
	case v.CanInt():
		v.SetInt(int64(f.next() % 100))
	case v.CanUint():
		v.SetUint(uint64(f.next() % 100))
	case v.CanFloat():
		v.SetFloat(float64(f.next()) + 0.5)
	default:
		return fmt.Errorf("%s: a %s cannot be stored as JSON: remove the field, or tag it json:\"-\"", path, v.Kind())
	}
	return nil
}

func (f *filler) fillStruct(v reflect.Value, path string) error {
	f.open = append(f.open, v.Type())
	defer func() { f.open = f.open[:len(f.open)-1] }()
	for i := range v.NumField() {
		field := v.Type().Field(i)
		at := path + "." + field.Name
		switch {
		case !stored(field):
			continue
		case !field.IsExported() && field.Type.Kind() == reflect.Pointer:
			return fmt.Errorf("%s: encoding/json cannot decode an embedded pointer to an unexported struct: embed the struct, or export it", at)
		case !field.IsExported() && f.isOpen(field.Type):
			continue
		case !field.IsExported(): // an embedded struct, whose exported fields are stored
			if err := f.fillStruct(v.Field(i), at); err != nil {
				return err
			}
			continue
		}
		if err := f.fill(v.Field(i), at, field.Name); err != nil {
			return err
		}
	}
	return nil
}

func (f *filler) fillSlice(v reflect.Value, path, name string) error {
	if v.Len() == 0 {
		switch {
		case v.Type().Elem().Kind() == reflect.Uint8 && !codesItself(v.Type().Elem()):
			v.SetBytes([]byte(strings.ToLower(name)))
			return nil
		case f.isOpen(v.Type().Elem()):
			return nil
		}
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
	}
	for i := range v.Len() {
		if err := f.fill(v.Index(i), path, name); err != nil {
			return err
		}
	}
	return nil
}

func (f *filler) fillMap(v reflect.Value, path, name string) error {
	elem := v.Type().Elem()
	if v.Len() == 0 {
		if f.isOpen(elem) {
			return nil
		}
		key := reflect.New(v.Type().Key()).Elem()
		if err := f.fill(key, path, "key"); err != nil {
			return err
		}
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, reflect.Zero(elem))
	}
	keys := v.MapKeys()
	slices.SortFunc(keys, func(a, b reflect.Value) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
	for _, key := range keys {
		e := reflect.New(elem).Elem()
		e.Set(v.MapIndex(key))
		if err := f.fill(e, path, name); err != nil {
			return err
		}
		v.SetMapIndex(key, e)
	}
	return nil
}

// isOpen reports whether t, or the type that it points to or lists, is a struct around the value.
func (f *filler) isOpen(t reflect.Type) bool {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice || t.Kind() == reflect.Array || t.Kind() == reflect.Map {
		if t.Name() != "" {
			break
		}
		t = t.Elem()
	}
	return slices.Contains(f.open, t)
}

// stored reports whether encoding/json stores a field, or the fields of one that is embedded.
func stored(f reflect.StructField) bool {
	if f.Tag.Get("json") == "-" {
		return false
	}
	return f.IsExported() || f.Anonymous && indirect(f.Type).Kind() == reflect.Struct
}

var codes = []reflect.Type{
	reflect.TypeFor[json.Marshaler](), reflect.TypeFor[json.Unmarshaler](),
	reflect.TypeFor[encoding.TextMarshaler](), reflect.TypeFor[encoding.TextUnmarshaler](),
}

// codesItself reports whether t, which is not an interface or a pointer, has methods for JSON.
func codesItself(t reflect.Type) bool {
	if t.Kind() == reflect.Interface || t.Kind() == reflect.Pointer {
		return false
	}
	return slices.ContainsFunc(codes, reflect.PointerTo(t).Implements)
}

// accepts decodes text into v. A method for JSON that does not expect the text may panic.
func accepts(v reflect.Value, text string) (ok bool) {
	defer func() {
		if recover() != nil {
			ok = false
		}
	}()
	return json.Unmarshal([]byte(text), v.Addr().Interface()) == nil
}

// survives reports whether v is not zero, and is the same after it is encoded and decoded.
func survives(v reflect.Value) (ok bool) {
	defer func() {
		if recover() != nil {
			ok = false
		}
	}()
	if v.IsZero() {
		return false
	}
	data, err := json.Marshal(v.Addr().Interface())
	if err != nil {
		return false
	}
	back := reflect.New(v.Type())
	if json.Unmarshal(data, back.Interface()) != nil || back.Elem().IsZero() {
		return false
	}
	again, err := json.Marshal(back.Interface())
	return err == nil && check.SameJSON(data, again)
}

// lostFields returns the paths of the Go fields that are zero in got and not in want. If want is an
// embedded struct, hidden has the JSON names that fields around it take.
func lostFields(want, got reflect.Value, path string, hidden []string) (lost []string) {
	if want.IsZero() {
		return nil
	}
	if got.IsZero() && (want.Kind() != reflect.Struct || codesItself(want.Type())) {
		return []string{path}
	}
	switch want.Kind() {
	case reflect.Pointer:
		return lostFields(want.Elem(), got.Elem(), path, hidden)
	case reflect.Struct:
		return lostOfStruct(want, got, path, hidden)
	case reflect.Slice, reflect.Array:
		if got.Len() != want.Len() {
			return []string{path}
		}
		for i := range want.Len() {
			lost = append(lost, lostFields(want.Index(i), got.Index(i), path, nil)...)
		}
	case reflect.Map:
		for _, key := range want.MapKeys() {
			e := got.MapIndex(key)
			if !e.IsValid() {
				return append(lost, path)
			}
			lost = append(lost, lostFields(want.MapIndex(key), e, path, nil)...)
		}
	}
	return lost
}

func lostOfStruct(want, got reflect.Value, path string, hidden []string) (lost []string) {
	inner := slices.Clone(hidden)
	for i := range want.NumField() {
		if f := want.Type().Field(i); stored(f) && !embedded(f) {
			inner = append(inner, jsonName(f))
		}
	}
	for i := range want.NumField() {
		f := want.Type().Field(i)
		switch at := path + "." + f.Name; {
		case !stored(f):
		case embedded(f):
			lost = append(lost, lostFields(want.Field(i), got.Field(i), at, inner)...)
		case !slices.Contains(hidden, jsonName(f)):
			lost = append(lost, lostFields(want.Field(i), got.Field(i), at, nil)...)
		}
	}
	return lost
}

// embedded reports whether the fields of f are stored as those of the struct that has it.
func embedded(f reflect.StructField) bool {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	return f.Anonymous && name == "" && indirect(f.Type).Kind() == reflect.Struct
}

func indirect(t reflect.Type) reflect.Type {
	if t.Kind() == reflect.Pointer {
		return t.Elem()
	}
	return t
}

func jsonName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	return cmp.Or(name, f.Name)
}
