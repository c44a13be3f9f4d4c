package redis

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	goredis "github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

type reply string

func (r reply) Error() string { return string(r) }
func (reply) RedisError()     {}

// Replies that are hard to provoke with a real server.
func TestErrorsHaveAClass(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err     error
		applied bool
		want    string
	}{
		{reply("TRYAGAIN Multiple keys request during rehashing of slot"), false, "transient TRYAGAIN"},
		{reply("MOVED 1 127.0.0.1:7000"), false, "transient MOVED"},
		{reply("WRONGPASS invalid username-password pair"), false, "transient WRONGPASS"},
		{goredis.TxFailedErr, false, "transient "},
		{reply("EXECABORT Transaction discarded because of: OOM command not allowed when used memory > 'maxmemory'."), false, "transient OOM"},
		{reply("EXECABORT Transaction discarded because of previous errors."), false, "unknown EXECABORT"},
		{reply("BUSYGROUP Consumer Group name already exists"), false, "unknown BUSYGROUP"},
		{reply("NOPERM this user has no permissions"), false, "unknown NOPERM"},
		{reply("NOSCRIPT No matching script"), false, "unknown NOSCRIPT"},
		// of a script, after other commands were applied
		{reply("OOM command not allowed"), true, "unknown OOM"},
		{goredis.ErrCrossSlot, false, "permanent CROSSSLOT"},
		{goredis.ErrClosed, false, "transient network"},
		{&net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}, false, "transient network"},
		{&net.OpError{Op: "write", Err: os.ErrDeadlineExceeded}, false, "transient network"},
		{&net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}, false, "ambiguous network"},
		{errors.New("redis: can't parse reply"), false, "unknown "},
	} {
		e := ofExec(fmt.Errorf("incr: %w", c.err), c.applied)
		require.Equal(t, c.want, e.Class.String()+" "+e.Code, "%v", c.err)
		require.ErrorIs(t, e, c.err)
	}
}

// A token that other software wrote, too long or no hexadecimal number, ends no reader.
func TestATokenOfAnotherHandIsRead(t *testing.T) {
	for _, token := range []string{"", "zz", strings.Repeat("ab", 15), strings.Repeat("ab", 17), strings.Repeat("ab", 1000)} {
		s, exists := readSegment(map[string]string{"1_position": "7", "1_token": token}, "1_")
		require.True(t, exists)
		require.EqualValues(t, 7, s.Place.Position)
	}
}
