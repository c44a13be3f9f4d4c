package check_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/check"
)

func TestSameJSON(t *testing.T) {
	t.Parallel()
	require.True(t, check.SameJSON([]byte(`{"a":1,"b":[null]}`), []byte(" {\"b\": [null],\n\"a\":1}")))
	require.False(t, check.SameJSON([]byte(`9007199254740993`), []byte(`9007199254740992`)), "numbers keep their digits")
	require.False(t, check.SameJSON([]byte(`[1,2]`), []byte(`[2,1]`)))
	require.False(t, check.SameJSON([]byte(`1 2`), []byte(`1`)), "two values are not one")
	require.True(t, check.SameJSON([]byte(`no json`), []byte(`no json`)))
}
