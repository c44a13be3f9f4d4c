package filters_test

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/filters"
	"github.com/kinora-go/kinora/provider"
)

// full returns a list with a value in each field that is not the default.
func full[L any](t *testing.T) (list L) {
	v := reflect.ValueOf(&list).Elem()
	for i, f := range filters.Fields(list) {
		switch field := v.Field(i).Addr().Interface().(type) {
		case *string:
			*field = "x"
			if f.Options != nil {
				*field = f.Options[1]
			}
		case *[]string:
			*field = []string{"x", "y"}
			if f.Options != nil {
				*field = f.Options[1:3]
			}
		case *int:
			*field = 1
		case *[]int64:
			*field = []int64{7, 8}
		case *time.Duration:
			*field = 90 * time.Minute
		case *bool:
			*field = true
		default:
			t.Fatalf("%s has the type %T: read and write it in values.go, and test it here", f.Name, field)
		}
	}
	return list
}

// checkList checks that each field of a list is in its filter, that each field of the filter except for these is in the
// list, and that a list is read back from its values exactly.
func checkList[L interface{ Filter() F }, F any](t *testing.T, except ...string) {
	list := full[L](t)
	f := reflect.ValueOf(list.Filter())
	for i := range f.NumField() {
		name := f.Type().Field(i).Name
		require.Equal(t, slices.Contains(except, name), f.Field(i).IsZero(), "%s of %s is not in the list, or not in Filter", name, f.Type())
	}
	v := reflect.New(reflect.TypeFor[L]()).Elem()
	v.Set(reflect.ValueOf(list))
	for i, field := range filters.Fields(list) {
		without := reflect.New(v.Type()).Elem()
		without.Set(v)
		without.Field(i).SetZero()
		require.NotEqual(t, f.Interface(), without.Interface().(L).Filter(), "%s is not in Filter", field.Name)
	}
	values := map[string][]string{}
	for _, p := range filters.Values(list) {
		values[p[0]] = append(values[p[0]], p[1])
	}
	read, err := filters.Read[L](func(name string) []string { return values[name] })
	require.NoError(t, err)
	require.Equal(t, list, read)
}

func TestEachFieldIsInItsListAndItsFilter(t *testing.T) {
	t.Parallel()
	checkList[filters.Parked](t, "Types", "After", "Limit")        // types: for programs
	checkList[filters.Entries](t, "After", "Limit", "Force")       // --force of one command
	checkList[filters.Tasks](t, "After", "Limit")                  //
	checkList[filters.Acts](t, "IDs", "Before", "Limit")           // ids: a page of its own
	checkList[filters.Streams](t, "After", "Limit")                //
	_, exact := filters.OfParked(full[filters.Parked](t).Filter()) // each field is in OfParked
	require.True(t, exact)
}

// What a list cannot say is reported.
func TestOfParkedIsExact(t *testing.T) {
	t.Parallel()
	held := provider.ClassHeld
	for _, f := range []provider.ParkedFilter{
		{}, {Projector: "p", Key: "k", After: 3, Limit: 4}, {Class: &held, Seqs: []int64{1, 2}}, {States: []provider.ParkedState{provider.StateStuck}},
	} {
		list, exact := filters.OfParked(f)
		require.True(t, exact, "%+v", f)
		f.After, f.Limit = 0, 0
		require.Equal(t, f, list.Filter())
	}
	for _, f := range []provider.ParkedFilter{
		{Types: []string{"a"}}, {Types: []string{}}, {States: []provider.ParkedState{}},
		{States: []provider.ParkedState{provider.StateSkipped, provider.StateReplayed}},
	} {
		_, exact := filters.OfParked(f)
		require.False(t, exact, "%+v", f)
	}
}

func TestReadRefuses(t *testing.T) {
	t.Parallel()
	for name, values := range map[string][]string{
		"key": {"a", "b"}, "seq": {"x"}, "generation": {"-1"}, "class": {"nonsense"}, "state": {"waiting", "stuck"}, "code": {"a\x00"}, "handler": {"\xff"},
	} {
		list, err := filters.Read[filters.Parked](func(n string) []string {
			if n == name {
				return values
			}
			return nil
		})
		require.ErrorContains(t, err, `"`+name+`" `)
		require.Zero(t, list)
	}
}

// Without a status, and with the default, a list selects what is open.
func TestOpenIsTheDefault(t *testing.T) {
	t.Parallel()
	tasks := []provider.TaskStatus{provider.TaskPending, provider.TaskClaimed, provider.TaskFailed, provider.TaskWaiting, provider.TaskAbandoned}
	require.Equal(t, tasks, filters.Tasks{}.Filter().Status)
	require.Equal(t, tasks, filters.Tasks{Status: []string{"open"}}.Filter().Status)
	require.Len(t, filters.Entries{}.Filter().Status, 5)
	require.Empty(t, filters.Values(filters.Entries{Status: []string{"open"}}))
	require.Nil(t, filters.Parked{}.Filter().States)
	require.Nil(t, filters.Parked{State: "open"}.Filter().States)
	for _, f := range filters.Fields(filters.Tasks{}) {
		if f.Name == "status" {
			require.Len(t, f.Options, len(provider.TaskStatuses())+1)
		}
	}
	require.Empty(t, filters.Selected(filters.Parked{Projector: "p", Generation: 2, State: "stuck"}))
	require.Equal(t, "k", filters.Selected(filters.Entries{Key: "k", Seq: []int64{4}}))
}
