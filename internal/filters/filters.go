// Package filters lists the fields of the filters of package provider as people give them: in flags,
// in forms and in links. Each list is a struct. A field is a flag of the command, and a value of
// the page; it must also be in Filter, and in the conditions of the providers. Tests of this package and
// the suites of package providertest fail for a field that is missing in one of them.
//
// The tags are those of kong, which reads a list as flags, and two more: label makes a field an input of
// the page, and narrows:"only" means that the field alone does not select rows for an act.
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

// Parked is a provider.ParkedFilter.
type Parked struct {
	Projector  string  `narrows:"only" label:"Projector" help:"Only messages of this projector."`
	Generation int     `narrows:"only" help:"Only messages of this generation. Zero means all."`
	Handler    string  `label:"Handler (projector/handler)" help:"Only messages that failed in this handler: projector/handler."`
	Key        string  `label:"Key" help:"Only this ordering key."`
	Class      string  `label:"Class" enum:",permanent,unknown,transient,held,unable" default:"" placeholder:"CLASS" help:"Only this class: permanent, unknown, transient, held or unable."`
	Code       string  `label:"Code" help:"Only this code."`
	Seq        []int64 `placeholder:"N" help:"Only these numbers."`
	State      string  `narrows:"only" label:"State" enum:"open,waiting,stuck,replayed,skipped" default:"open" help:"Only this state: waiting (retried automatically), stuck (a person must decide), open (both), replayed or skipped."`
}

// Filter returns the filter without After and Limit.
func (p Parked) Filter() provider.ParkedFilter {
	f := provider.ParkedFilter{Projector: p.Projector, Generation: p.Generation, Handler: p.Handler, Key: p.Key, Code: p.Code, Seqs: p.Seq}
	if p.Class != "" {
		class := provider.ParseClass(p.Class)
		f.Class = &class
	}
	if p.State != "" && p.State != open {
		f.States = []provider.ParkedState{provider.ParseParkedState(p.State)}
	}
	return f
}

// IsOne reports whether p selects one message, or the messages of one key, which wait for each other.
func (p Parked) IsOne() bool { return len(p.Seq) == 1 || p.Projector != "" && p.Key != "" }

// Confirm returns what a person must type before the messages are changed.
func (p Parked) Confirm() string { return p.Projector }

// OfParked is the inverse of Parked.Filter, without After and Limit. It returns false if the list selects other messages.
func OfParked(f provider.ParkedFilter) (Parked, bool) {
	p := Parked{Projector: f.Projector, Generation: f.Generation, Handler: f.Handler, Key: f.Key, Code: f.Code, Seq: f.Seqs}
	if f.Class != nil {
		p.Class = f.Class.String()
	}
	if len(f.States) == 1 {
		p.State = f.States[0].String()
	}
	f.After, f.Limit = 0, 0
	return p, reflect.DeepEqual(p.Filter(), f)
}

// Entries is a provider.EntryFilter. Force is a flag of the command that requeues.
type Entries struct {
	Topic  string        `label:"Topic" help:"Only this topic."`
	Key    string        `label:"Key" help:"Only this ordering key."`
	Stream string        `label:"Stream" help:"Only entries of the events of this stream."`
	Seq    []int64       `placeholder:"N" help:"Only these numbers."`
	Older  time.Duration `narrows:"only" help:"Only entries that are older than this."`
	Status []string      `narrows:"only" label:"Status" enum:"open,${entry_statuses}" default:"open" help:"Only these statuses. By default those that are open."`
}

// Filter returns the filter without After, Limit and Force.
func (e Entries) Filter() provider.EntryFilter {
	return provider.EntryFilter{
		Topic: e.Topic, Key: e.Key, Stream: e.Stream, Seqs: e.Seq, Older: e.Older, Status: statuses(e.Status, provider.EntryStatuses(), provider.EntryStatus.Open),
	}
}

// IsOne reports whether e selects one entry.
func (e Entries) IsOne() bool { return len(e.Seq) == 1 }

// Confirm returns what a person must type before the entries are changed.
func (e Entries) Confirm() string { return Selected(e) }

// Tasks is a provider.TaskFilter.
type Tasks struct {
	ID        []string `placeholder:"ID" help:"Only these ids."`
	Kind      string   `label:"Kind" help:"Only this kind: domain/name."`
	Group     string   `label:"Group" help:"Only tasks of this group."`
	GroupKind string   `name:"group-kind" help:"Only tasks of groups of this kind."`
	Code      string   `label:"Code" help:"Only tasks whose last failure has this code."`
	Status    []string `narrows:"only" label:"Status" enum:"open,${task_statuses}" default:"open" help:"Only these statuses. By default those that are not over."`
}

// Filter returns the filter without After and Limit.
func (t Tasks) Filter() provider.TaskFilter {
	return provider.TaskFilter{
		IDs: t.ID, Kind: t.Kind, Group: t.Group, GroupKind: t.GroupKind, Code: t.Code,
		Status: statuses(t.Status, provider.TaskStatuses(), func(s provider.TaskStatus) bool { return !s.Final() }),
	}
}

// IsOne reports whether t selects one task.
func (t Tasks) IsOne() bool { return len(t.ID) == 1 }

// Confirm returns what a person must type before the tasks are changed.
func (t Tasks) Confirm() string { return Selected(t) }

// Acts is a provider.ActFilter.
type Acts struct {
	Verb []string `help:"Only these verbs."`
	Kind string   `label:"Kind of the target" help:"Only acts on targets of this kind."`
	Name string   `label:"Name of the target" help:"Only acts on the target of this name."`
	Open bool     `help:"Only requests that are not over."`
}

// Filter returns the filter without IDs, Before and Limit.
func (a Acts) Filter() provider.ActFilter {
	f := provider.ActFilter{Verbs: a.Verb, Kind: a.Kind, Name: a.Name}
	if a.Open {
		f.States = []provider.ActState{provider.ActRequested, provider.ActRunning}
	}
	return f
}

// Streams is a provider.StreamFilter.
type Streams struct {
	Category string `label:"Category: the part before the first “-”" help:"Only streams of this category: the part of the id before the first \"-\"."`
}

// Filter returns the filter without After and Limit.
func (s Streams) Filter() provider.StreamFilter { return provider.StreamFilter{Category: s.Category} }

// open is all states or statuses of rows that are not over. It is the default.
const open = "open"

// statuses returns the statuses with these names, which are some of all.
func statuses[S ~string](names []string, all []S, isOpen func(S) bool) (some []S) {
	for _, s := range all {
		if slices.Contains(names, string(s)) || (len(names) == 0 || slices.Contains(names, open)) && isOpen(s) {
			some = append(some, s)
		}
	}
	return some
}

// Vars are the lists of names in tags, for kong.
func Vars() map[string]string {
	return map[string]string{"entry_statuses": joined(provider.EntryStatuses()), "task_statuses": joined(provider.TaskStatuses())}
}

func joined[S ~string](all []S) string {
	names := make([]string, len(all))
	for i, s := range all {
		names[i] = string(s)
	}
	return strings.Join(names, ",")
}

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

// Read returns the list with the values of each name, without empty ones. After an error it is the zero value.
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
