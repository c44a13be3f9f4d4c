package providertest

import (
	"math"
	"reflect"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// selectsNone fails the case unless each field of a filter is a condition: count returns how many rows are selected by a
// filter that has only this field, with a value that no row has. A field that is new in the filter is tested too.
// values has the values for fields whose type does not say one. Nil: the field is no condition.
func selectsNone[F any](s *stage, what string, values map[string]any, count func(F) int) {
	s.Helper()
	for field := range reflect.TypeFor[F]().Fields() {
		var f F
		v := reflect.ValueOf(&f).Elem().FieldByIndex(field.Index)
		value, given := values[field.Name]
		switch {
		case given && value == nil:
			continue
		case given:
		case field.Name == "Limit":
			continue
		case field.Type == reflect.TypeFor[time.Duration]():
			value = 1000 * time.Hour
		case field.Type.Kind() == reflect.String:
			value = "no row has this"
		case v.CanInt():
			value = int64(math.MaxInt32)
		case field.Type == reflect.TypeFor[*provider.Class]():
			value = new(provider.ClassTransient)
		case field.Type.Kind() == reflect.Slice && field.Type.Elem().Kind() == reflect.String:
			value = []string{"no row has this"}
		case field.Type.Kind() == reflect.Slice:
			value = []int64{math.MaxInt32}
		}
		if from := reflect.ValueOf(value); field.Type.Kind() == reflect.Slice {
			v.Set(reflect.MakeSlice(field.Type, from.Len(), from.Len()))
			for i := range from.Len() {
				v.Index(i).Set(from.Index(i).Convert(field.Type.Elem()))
			}
		} else {
			v.Set(from.Convert(field.Type))
		}
		same(s, what+" by a value of "+field.Name+" that no row has", count(f), 0)
	}
}
