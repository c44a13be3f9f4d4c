package main

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// readLines reads all lines. It returns "TOO LONG" for a line that is too long.
func readLines(t *testing.T, l *lines) []string {
	t.Helper()
	var all []string
	for {
		line, err := l.next()
		switch {
		case errors.Is(err, io.EOF):
			return all
		case errors.Is(err, errLongLine):
			all = append(all, "TOO LONG")
		default:
			require.NoError(t, err)
			all = append(all, string(line))
		}
	}
}

func TestLines(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 200<<10) // larger than any buffer
	for name, c := range map[string]struct {
		text string
		want []string
	}{
		"empty":                  {"", nil},
		"last line ended":        {"a\nb\n", []string{"a", "b"}},
		"last line not ended":    {"a\nb", []string{"a", "b"}},
		"empty lines":            {"\n\na\n\n", []string{"", "", "a", ""}},
		"Windows line ends":      {"a\r\nb\r\n", []string{"a", "b"}},
		"larger than the buffer": {long + "\n" + long, []string{long, long}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			plain, err := newLines(strings.NewReader(c.text))
			require.NoError(t, err)
			require.Equal(t, c.want, readLines(t, plain))
			zipped, err := newLines(bytes.NewReader(zip(t, c.text)))
			require.NoError(t, err)
			require.Equal(t, c.want, readLines(t, zipped))
		})
	}
}

// TestLongLines: a line at the limit is read, a longer one is skipped, and the other lines are
// read.
func TestLongLines(t *testing.T) {
	t.Parallel()
	for _, limit := range []int{10, 100_000} {
		fits, tooLong := strings.Repeat("x", limit), strings.Repeat("y", limit+1)
		for _, end := range []string{"", "\n"} {
			l, err := newLines(strings.NewReader("a\n" + fits + "\n" + tooLong + "\nb\n" + tooLong + tooLong + end))
			require.NoError(t, err)
			l.max = limit
			require.Equal(t, []string{"a", fits, "TOO LONG", "b", "TOO LONG"}, readLines(t, l))
			require.LessOrEqual(t, cap(l.buf), 4*(limit+64<<10), "the rest of a long line is not kept in memory")
		}
	}
}

// TestBrokenFiles: a truncated or unreadable file returns an error and not the end of the file.
func TestBrokenFiles(t *testing.T) {
	t.Parallel()
	whole := zip(t, strings.Repeat("line\n", 1000))
	l, err := newLines(bytes.NewReader(whole[:len(whole)-4]))
	require.NoError(t, err)
	for err == nil {
		_, err = l.next()
	}
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)

	_, err = newLines(bytes.NewReader([]byte{0x1f, 0x8b, 0xff}))
	require.Error(t, err)

	l, err = newLines(io.MultiReader(strings.NewReader("a\nhalf a li"), badReader{}))
	require.NoError(t, err)
	_, err = l.next()
	require.NoError(t, err)
	_, err = l.next()
	require.ErrorIs(t, err, errBadReader)
}

var errBadReader = errors.New("bad reader")

type badReader struct{}

func (badReader) Read([]byte) (int, error) { return 0, errBadReader }

func zip(t *testing.T, text string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, err := io.WriteString(w, text)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return b.Bytes()
}
