package filters

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// Field is a field of a list, with its values as text. A field without a value has none.
type Field struct {
	Name, Label string
	Options     []string // the values that it can have; nil means any
	Values      []string
	Selects     bool // the field alone selects rows for an act
	Default     string
}

// Fields returns the fields of a list, which is a struct of this package.
func Fields(list any) (all []Field) {
	v := reflect.ValueOf(list)
	for i := range v.NumField() {
		tag := v.Type().Field(i).Tag
		f := Field{
			Name: tag.Get("name"), Label: tag.Get("label"), Selects: tag.Get("narrows") == "", Default: tag.Get("default"), Values: texts(v.Field(i)),
		}
		if f.Name == "" {
			f.Name = strings.ToLower(v.Type().Field(i).Name)
		}
		if enum, ok := tag.Lookup("enum"); ok {
			f.Options = strings.Split(os.Expand(enum, func(name string) string { return Vars()[name] }), ",")
		}
		all = append(all, f)
	}
	return all
}

// texts returns the values of a field. The zero value is none.
func texts(v reflect.Value) (all []string) {
	if v.Kind() == reflect.Slice {
		for i := range v.Len() {
			all = append(all, fmt.Sprint(v.Index(i)))
		}
	} else if !v.IsZero() {
		all = append(all, fmt.Sprint(v))
	}
	return all
}

// Values returns the names and values of a list, without defaults. It is the inverse of Read.
func Values(list any) (pairs [][2]string) {
	for _, f := range Fields(list) {
		if !slices.Equal(f.Values, []string{f.Default}) {
			for _, value := range f.Values {
				pairs = append(pairs, [2]string{f.Name, value})
			}
		}
	}
	return pairs
}

// Selected returns the first value that alone selects rows for an act, or "".
func Selected(list any) string {
	for _, f := range Fields(list) {
		if f.Selects && len(f.Values) > 0 {
			return f.Values[0]
		}
	}
	return ""
}

// Read returns the list with the values that are given for each name. Empty values are no values. The list is the zero
// value after an error.
func Read[L any](values func(name string) []string) (list L, err error) {
	v := reflect.ValueOf(&list).Elem()
	for i, f := range Fields(list) {
		given := slices.DeleteFunc(slices.Clone(values(f.Name)), func(s string) bool { return s == "" })
		if len(given) == 0 && f.Default != "" {
			given = []string{f.Default}
		}
		for _, text := range given {
			if err := set(v.Field(i), f, text); err != nil {
				return *new(L), fmt.Errorf("%q %w", f.Name, err)
			}
		}
	}
	return list, nil
}

// set sets a field to a value, or appends the value to it.
func set(v reflect.Value, f Field, text string) (err error) {
	if f.Options != nil && !slices.Contains(f.Options, text) {
		return fmt.Errorf("must be one of: %s", strings.Join(f.Options, ", "))
	}
	if provider.CheckStorable(f.Name, text) != nil {
		return fmt.Errorf("is longer than %d bytes, is not UTF-8, or has a NUL", provider.MaxIDBytes)
	}
	var value any = text
	one := v.Type()
	if v.Kind() == reflect.Slice {
		one = one.Elem()
	}
	switch one {
	case reflect.TypeFor[bool]():
		value, err = strconv.ParseBool(text)
	case reflect.TypeFor[int]():
		value, err = strconv.Atoi(text)
	case reflect.TypeFor[int64]():
		value, err = strconv.ParseInt(text, 10, 64)
	case reflect.TypeFor[time.Duration]():
		value, err = time.ParseDuration(text)
	}
	switch r := reflect.ValueOf(value); {
	case err != nil || (r.CanInt() && r.Int() < 0):
		return errors.New("is not a number, or not a duration")
	case v.Kind() == reflect.Slice:
		v.Set(reflect.Append(v, r))
	case v.IsZero():
		v.Set(r)
	default:
		return errors.New("is given twice")
	}
	return nil
}
