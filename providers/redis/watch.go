package redis

import (
	"context"
	"errors"
	"fmt"

	"github.com/kinora-go/kinora/provider"
	goredis "github.com/redis/go-redis/v9"
)

// watch is a connection on which keys are watched for a message.
type watch struct {
	conn *goredis.Conn // nil: it was given back
}

// end gives the connection back. watches: EXEC was not called.
func (w *watch) end(watches bool) {
	if w.conn == nil {
		return
	}
	if watches {
		w.conn.Do(context.Background(), "unwatch") // or EXEC of another user of the connection fails
	}
	_ = w.conn.Close()
	w.conn = nil
}

// Watch calls read with a client that reads keys in the middle of a handler. If another client changes
// one of the keys before the handler's commands are applied, nothing is applied, and the handler runs
// again. So a handler can compute a value from the one that it reads. tx is the handler's transaction.
//   - read sees the effects of all earlier messages, but not the commands that the handler has queued. It
//     must only read. A message that reads so runs in a unit without other messages before it.
//   - The handler must return the error of Watch.
//   - Watch requires Config.OwnMarkers. In a cluster, keys must be in the hash slot of the unit's.
func Watch(ctx context.Context, tx goredis.Pipeliner, read func(ctx context.Context, c goredis.Cmdable) error, keys ...string) error {
	t, ok := tx.(*transaction)
	if !ok || t.marked == nil {
		return permanent("no_watch", errors.New("redis: Watch requires the transaction of a handler, and Config.OwnMarkers"))
	}
	if len(keys) == 0 || len(t.starts) == 0 {
		return permanent("no_watch", errors.New("redis: Watch requires keys, and a message"))
	}
	if err := t.marked.checkKeys(keys); err != nil {
		return err
	}
	message := t.starts[len(t.starts)-1].message
	w := t.watches[message]
	if w == nil {
		if len(t.starts) > 1 { // what they have queued is not visible yet
			return &provider.Error{Class: provider.ClassUnknown, Code: "watch", Err: &provider.MessageError{
				Message: message, Err: errors.New("a message that reads with Watch runs without others before it"),
			}}
		}
		node, err := t.marked.node(ctx)
		if err != nil {
			return ofExec(err, false)
		}
		w = &watch{conn: node.Conn()}
		t.watches = map[int]*watch{message: w}
	}
	if err := w.conn.Do(ctx, append([]any{"watch"}, anys(keys)...)...).Err(); err != nil {
		return ofExec(err, false)
	}
	return read(ctx, w.conn)
}

func anys(keys []string) []any {
	all := make([]any, len(keys))
	for i, k := range keys {
		all[i] = k
	}
	return all
}

// node returns a client of the server that has the keys of the unit.
func (m *marked) node(ctx context.Context) (*goredis.Client, error) {
	switch c := m.client.(type) {
	case *goredis.Client:
		return c, nil
	case *goredis.ClusterClient:
		return c.MasterForKey(ctx, m.keys.list[0])
	}
	return nil, fmt.Errorf("redis: Watch does not support a client of type %T", m.client)
}

// unwatch gives back the connections of the unit's watches.
func (t *transaction) unwatch() {
	for _, w := range t.watches {
		w.end(true)
	}
	t.watches = nil
}

// execWatched runs the script of a message in a transaction that fails if a watched key has changed.
func (m *marked) execWatched(ctx context.Context, w *watch, args []any) (answer, error) {
	var cmd *goredis.Cmd
	_, err := w.conn.TxPipelined(ctx, func(p goredis.Pipeliner) error {
		cmd = unitScript.Eval(ctx, p, m.keys.list, args...)
		return nil
	})
	w.end(false)
	if errors.Is(err, goredis.TxFailedErr) {
		return nil, errChanged
	}
	if err != nil {
		return nil, ofExec(err, false)
	}
	list, ok := cmd.Val().([]any)
	if !ok {
		return nil, &provider.Error{Class: provider.ClassUnknown, Err: errReply}
	}
	return list, nil
}
