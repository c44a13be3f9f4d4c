package check_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/check"
)

func TestCanonicalJSON(t *testing.T) {
	t.Parallel()
	for data, want := range map[string]string{
		` { "bb": [1, {"z":1,"y":2}] ,"a":"\u00e9\/<\u000a\"" } `: `{"a":"é/<\n\"","bb":[1,{"y":2,"z":1}]}`,
		`{"stars":3,"Stars":5}`:                                   `{"Stars":5,"stars":3}`,
		`{"a":{"x":1},"b":0,"a":{"y":2}}`:                         `{"a":{"y":2},"b":0}`,
		`[1E+2,-1.50e1,12.5e-3,0.1e1,-0,-0.0,0e3,0.5E2]`:          `[100,-15.0,0.0125,1,0,0.0,0,50]`,
		`[1.0,12345678901234567890,0.1000]`:                       `[1.0,12345678901234567890,0.1000]`,
		`[[],{},null,true,false,""]`:                              `[[],{},null,true,false,""]`,
		"1e1 \n":                                                  `10`,
		`{"a":1`:                                                  `{"a":1`,
		`1 2`:                                                     `1 2`,
		`[1,]`:                                                    `[1,]`,
		` "\ud800"`:                                               ` "\ud800"`,
		``:                                                        ``,
		` [1e999999999999999999999]`:                              ` [1e999999999999999999999]`,
		` [1e9223372036854775807]`:                                ` [1e9223372036854775807]`,
		` [1e-9223372036854775808]`:                               ` [1e-9223372036854775808]`,
		` [1e-1100000]`:                                           ` [1e-1100000]`,
		` [` + strings.Repeat(`1e131000,`, 9) + `0]`: ` [` + strings.Repeat(`1e131000,`, 9) + `0]`,
	} {
		got := check.CanonicalJSON([]byte(data))
		require.Equal(t, want, string(got), data)
		require.Equal(t, want, string(check.CanonicalJSON(got)), "again")
	}
}

func TestSameJSON(t *testing.T) {
	t.Parallel()
	require.True(t, check.SameJSON([]byte(`{"a":1,"b":[null]}`), []byte(" {\"b\": [null],\n\"a\":1}")))
	require.False(t, check.SameJSON([]byte(`9007199254740993`), []byte(`9007199254740992`)), "numbers keep their digits")
	require.True(t, check.SameJSON([]byte(`[1.0,100,0.50,0,-0.0]`), []byte(`[1,1E+2,5e-1,-0,0e5]`)))
	require.False(t, check.SameJSON([]byte(`100`), []byte(`1`)))
	require.False(t, check.SameJSON([]byte(`[1,2]`), []byte(`[2,1]`)))
	require.False(t, check.SameJSON([]byte(`1 2`), []byte(`1`)), "two values are not one")
	require.True(t, check.SameJSON([]byte(`no json`), []byte(`no json`)))
}
