package goldentest_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"net/netip"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/stretchr/testify/require"
)

type (
	color int
	day   time.Time
	node  struct {
		Name     string
		Next     *node
		Children []node
		ByName   map[string]*node
	}
	status string // accepts few texts
	hidden struct{ value string }
	left   struct{ Name string }
	right  struct{ Name string }
	Shared struct{ Shared string }
)

func (c color) MarshalText() ([]byte, error) { return []byte([]string{"red", "blue"}[c]), nil }
func (c *color) UnmarshalText(b []byte) error {
	switch string(b) {
	case "red":
		*c = 0
	case "blue":
		*c = 1
	default:
		return fmt.Errorf("no color %s", b)
	}
	return nil
}

func (d day) MarshalJSON() ([]byte, error) {
	return []byte(time.Time(d).Format(`"2006-01-02"`)), nil
}
func (d *day) UnmarshalJSON(b []byte) error {
	at, err := time.Parse(`"2006-01-02"`, string(b))
	*d = day(at)
	return err
}

func (s *status) UnmarshalText(b []byte) error {
	if string(b) != "open" && string(b) != "closed" {
		return errors.New("must be open or closed")
	}
	*s = status(b)
	return nil
}

func (h hidden) MarshalJSON() ([]byte, error) { return json.Marshal(h.value) }
func (h *hidden) UnmarshalJSON(b []byte) error {
	return json.Unmarshal(b[1:len(b)-1], &h.value) // panics for a short value, and fails for most
}

func TestGoldenTypesFillsEveryField(t *testing.T) {
	type (
		kinds struct {
			B  bool
			I  int8
			U  uint64
			F  float32
			S  string
			R  rune
			D  time.Duration
			N  json.Number
			P  **int
			A  [2]int
			Q  int `json:",string"`
			no int
		}
		lists struct {
			Bytes []byte
			Raw   json.RawMessage
			Any   any
			Maps  map[string][]map[int]bool
			Anys  map[string]any
			List  []any
			Ptrs  []*string
		}
		own struct {
			At    time.Time
			Ptr   *time.Time
			Day   day
			ID    uuid.UUID
			Big   *big.Int
			Addr  netip.Addr
			Color color
			ByID  map[uuid.UUID]color
		}
		embedded struct {
			Shared
			*item
		}
		embeddedShared struct {
			base
			*Shared
			Excluded string `json:"-"`
			Dash     string `json:"-,"` //nolint:staticcheck // the name is "-"
			chan1    chan int
		}
		empty struct{}
	)
	_ = kinds{no: 1}
	_ = embeddedShared{chan1: nil}
	for name, c := range map[string]struct {
		def  eventstore.TypeDef
		want string
	}{
		"kinds": {eventstore.Type[kinds]("e"), `{"B":true,"I":1,"U":2,"F":3.5,"S":"s","R":4,"D":5,"N":6,"P":7,"A":[8,9],"Q":"10"}`},
		"lists": {eventstore.Type[lists]("e"), `{"Bytes":"Ynl0ZXM=","Raw":"1","Any":"any","Maps":{"key":[{"1":true}]},"Anys":{"key":"anys"},"List":["list"],"Ptrs":["ptrs"]}`},
		"types with methods": {eventstore.Type[own]("e"), `{"At":"2001-02-03T04:05:01Z","Ptr":"2001-02-03T04:05:02Z","Day":"2001-02-03",
			"ID":"03040506-0708-090a-0b0c-0d0e0f101112","Big":1,"Addr":"192.0.2.1","Color":"blue","ByID":{"14151617-1819-1a1b-1c1d-1e1f20212223":"blue"}}`},
		"embedded":      {eventstore.Type[embeddedShared]("e"), `{"by":"by","Shared":"shared","-":"dash"}`},
		"inside itself": {eventstore.Type[node]("e"), `{"Name":"name","Next":null,"Children":null,"ByName":null}`},
		"no fields":     {eventstore.Type[empty]("e"), `{}`},
		"a map":         {eventstore.Type[map[string]item]("e"), `{"key":{"sku":"sku","count":1}}`},
	} {
		t.Run(name, func(t *testing.T) {
			dir := written(t, c.def)
			require.JSONEq(t, c.want, string(samples(t, dir, "e.v1.json")[0].Data))
		})
	}
	t.Run("an embedded pointer to an unexported struct", func(t *testing.T) {
		requireOne(t, golden(t, t.TempDir(), eventstore.Type[embedded]("e")), "embedded.item", "embedded pointer to an unexported struct")
	})
}

func TestGoldenTypesReportsTypesThatItCannotFill(t *testing.T) {
	type (
		closing  struct{ Status status }
		secret   struct{ Hidden hidden }
		inter    struct{ Err error }
		channel  struct{ C chan int }
		hijacked struct { // the methods of time.Time encode the whole struct
			time.Time
			Stars int
		}
		twice struct { // encoding/json ignores both
			left
			right
		}
	)
	for name, c := range map[string]struct {
		def  eventstore.TypeDef
		want []string
	}{
		"a text of few":       {eventstore.Type[closing]("e"), []string{"closing.Status", "no generated value of goldentest_test.status", "e.v1.json by hand"}},
		"an own form":         {eventstore.Type[secret]("e"), []string{"secret.Hidden", "no generated value"}},
		"an interface":        {eventstore.Type[inter]("e"), []string{"inter.Err", "the interface error"}},
		"a channel":           {eventstore.Type[channel]("e"), []string{"channel.C", "a chan cannot be stored"}},
		"an embedded time":    {eventstore.Type[hijacked]("e"), []string{"hijacked.Stars", "is lost"}},
		"two fields, one key": {eventstore.Type[twice]("e"), []string{"twice.left.Name, goldentest_test.twice.right.Name", "is lost"}},
	} {
		t.Run(name, func(t *testing.T) { requireOne(t, golden(t, t.TempDir(), c.def), c.want...) })
	}

	t.Run("by hand", func(t *testing.T) {
		type later struct {
			Status status
			Note   string
		}
		dir := t.TempDir()
		write(t, dir, "e.v1.json", `[{"data": {"Status": "open"}}]`)
		require.Empty(t, golden(t, dir, eventstore.Type[closing]("e")))
		requireOne(t, golden(t, dir, eventstore.Type[later]("e")), `field "Note" is not stored`)
		same := func(old json.RawMessage) (json.RawMessage, error) { return old, nil }
		require.Empty(t, update(t, dir, eventstore.Type[later]("e", same).Added("Note")))
		require.JSONEq(t, `{"Status":"open","Note":"note"}`, string(samples(t, dir, "e.v2.json")[0].Data))
	})
}
