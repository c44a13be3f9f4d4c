package check_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/check"
)

func TestParseTime(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"2024-01-01T00:00:00Z":                "2024-01-01T00:00:00Z",
		"2024-01-01t00:00:00z":                "2024-01-01T00:00:00Z",
		"2024-01-01T02:30:00.000000005+02:30": "2024-01-01T00:00:00.000000005Z",
		"2016-12-31T23:59:60Z":                "2017-01-01T00:00:00Z",
		"2016-12-31t18:59:60.25-05:00":        "2017-01-01T00:00:00.25Z",
		"2024-01-01T00:00:61Z":                "",
		"2024-01-01T00:60:00Z":                "",
		"2024-01-01T00:00:00":                 "",
		"2024-01-01":                          "",
		"2024-01-01T00:00:6":                  "",
		"0000-12-31T23:59:59Z":                "",
		"9999-12-31T23:59:60Z":                "",
		"":                                    "",
	} {
		at, err := check.ParseTime(text)
		if want == "" {
			require.Error(t, err, text)
			continue
		}
		require.NoError(t, err, text)
		require.Equal(t, want, at.Format(time.RFC3339Nano), text)
	}
}
