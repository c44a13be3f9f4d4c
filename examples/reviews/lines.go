package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
)

const maxLine = 4 << 20 // bytes of one line: about a hundred times the longest real review

var errLongLine = fmt.Errorf("longer than %d bytes", maxLine)

// lines reads a text line by line and keeps at most one line in memory.
type lines struct {
	r   *bufio.Reader
	buf []byte // the start of a line that is larger than r's buffer
	max int
}

// newLines reads r, which is plain text or gzip. The first two bytes decide, not the file's name.
func newLines(r io.Reader) (*lines, error) {
	in := bufio.NewReaderSize(r, 64<<10)
	magic, err := in.Peek(2)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		unzipped, err := gzip.NewReader(in)
		if err != nil {
			return nil, err
		}
		in = bufio.NewReaderSize(unzipped, 64<<10)
	}
	return &lines{r: in, max: maxLine}, nil
}

// next returns the next line without its end. The line is valid until the next call. The error is
// errLongLine for a line that is too long, which is skipped and not kept in memory, and io.EOF
// after the last line.
func (l *lines) next() ([]byte, error) {
	l.buf = l.buf[:0]
	for tooLong := false; ; {
		part, err := l.r.ReadSlice('\n')
		last := err == nil || errors.Is(err, io.EOF)
		switch {
		case err != nil && !last && !errors.Is(err, bufio.ErrBufferFull):
			return nil, err
		case errors.Is(err, io.EOF) && len(part)+len(l.buf) == 0 && !tooLong:
			return nil, io.EOF
		case tooLong || len(l.buf)+len(part) > l.max+1: // 1 for the end of the line
			tooLong = true
		case last && len(l.buf) == 0:
			return bytes.TrimRight(part, "\r\n"), nil
		default:
			l.buf = append(l.buf, part...)
		}
		if last && tooLong {
			return nil, errLongLine
		}
		if last {
			return bytes.TrimRight(l.buf, "\r\n"), nil
		}
	}
}
