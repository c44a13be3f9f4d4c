package task_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/task"
	"github.com/stretchr/testify/require"
)

// slowEnds is a store whose changes wait until open is closed.
type slowEnds struct {
	*memory.DB
	open chan struct{}
}

func (s *slowEnds) ChangeTasks(ctx context.Context, changes []provider.TaskChange) ([]provider.TaskChanged, error) {
	select {
	case <-s.open:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return s.DB.ChangeTasks(ctx, changes)
}

// While the ends of done tasks are recorded, other tasks run: at most as many, and no more handlers
// at a time.
func TestTasksRunWhileEndsAreRecorded(t *testing.T) {
	inWorld(t, func(w *world) {
		var running, most, all atomic.Int64
		kind := call("calls/some", func(context.Context, run) error {
			most.Store(max(most.Load(), running.Add(1)))
			defer running.Add(-1)
			all.Add(1)
			time.Sleep(time.Second)
			return nil
		})
		var drafts []task.Draft
		for i := range 20 {
			drafts = append(drafts, kind.New(fmt.Sprint(i), 1))
		}
		w.enqueue(drafts...)
		db := &slowEnds{w.db, make(chan struct{})}
		w.start(w.workerOf(db, task.WorkerConfig{Concurrency: 3}, kind))
		time.Sleep(20 * time.Second)
		require.EqualValues(w, 6, all.Load())
		require.EqualValues(w, 6, w.mustCount(task.Claimed))
		close(db.open)
		w.mustComplete(kind)
		require.EqualValues(w, 20, all.Load())
		require.EqualValues(w, 3, most.Load())
	})
}
