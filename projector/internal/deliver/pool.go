// Package deliver applies the deliveries of a broker, and the parked messages that are due.
package deliver

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kinora-go/kinora/projector/internal/apply"
	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/parked"
	"github.com/kinora-go/kinora/provider"
)

// Pool has the workers of a projector: messages of one lane are applied by one worker, in order.
type Pool struct {
	Host      *model.Host
	Projector *model.Projector
	Current   *atomic.Pointer[generation.Row] // the generation that deliveries are applied to
	Parked    *parked.Parked
	Missed    *follow.Missed
	workers   []*Worker
}

// Add adds a worker.
func (p *Pool) Add(by *apply.Applier) {
	p.workers = append(p.workers, &Worker{
		Applier: by, pool: p, in: make(chan *model.Message, by.Batch), due: make(chan []*model.Message, 1), seen: map[string]int{},
	})
}

// Start starts the workers. They end when ctx ends.
func (p *Pool) Start(ctx, hard context.Context, all *sync.WaitGroup) {
	for _, w := range p.workers {
		all.Go(func() { w.run(ctx, hard) })
	}
}

func (p *Pool) worker(lane provider.Lane) *Worker {
	return p.workers[(int(lane[0])<<8|int(lane[1]))%len(p.workers)]
}

// IsBusy reports whether a worker applies parked messages.
func (p *Pool) IsBusy() bool {
	return slices.ContainsFunc(p.workers, func(w *Worker) bool { return w.busy.Load() })
}

// GiveDue gives due messages to the workers that have none.
func (p *Pool) GiveDue(msgs []*model.Message) {
	due := map[*Worker][]*model.Message{}
	for _, m := range msgs {
		w := p.worker(m.Lane)
		due[w] = append(due[w], m)
	}
	for w, some := range due {
		if w.busy.CompareAndSwap(false, true) {
			w.due <- some
		}
	}
}

// Dispatch gives a delivery to the workers of its projectors. It returns false if ctx or canceled ends
// while a worker has no room for it.
func Dispatch(ctx context.Context, canceled <-chan struct{}, d *model.Received, pools []*Pool) bool {
	for _, p := range pools {
		m := p.Projector.Accept(d, nil)
		if m == nil {
			d.Done()
			continue
		}
		w := p.worker(m.Lane)
		waits := len(w.in) > 0
		select {
		case w.in <- m:
		default:
			select {
			case <-ctx.Done():
				return false
			case <-canceled:
				return false
			case w.in <- m:
			}
		}
		if waits {
			p.Projector.DecodeAhead(m)
		}
	}
	return true
}

// TakeAhead takes the events of the deliveries that it receives from the log, all that wait with one read, and dispatches
// them. end ends it. See model.Receiver.
func TakeAhead(ctx context.Context, r *model.Receiver, pools []*Pool) (in chan *model.Received, end func()) {
	ctx, cancel := context.WithCancel(ctx)
	in = make(chan *model.Received, min(cmp.Or(r.Host.Batch, model.DeliveryBatch), model.LogBatch))
	var taking sync.WaitGroup
	taking.Go(func() {
		for {
			var all []*model.Received
			select {
			case <-ctx.Done():
				return
			case d := <-in:
				all = append(all, d)
			}
			for range len(in) {
				all = append(all, <-in)
			}
			r.Take(ctx, all)
			for _, d := range all {
				if !Dispatch(ctx, nil, d, pools) {
					return
				}
			}
		}
	})
	return in, func() { cancel(); taking.Wait() }
}
