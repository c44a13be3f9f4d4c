package follow

import (
	"context"
	"slices"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// Missed reports events that a broker has not delivered in time.
type Missed struct {
	Host      *model.Host
	Projector string
	Topics    []string // of the subscriptions; nil: they are not known
}

// Report reports those of applied messages that were read from the log, and why, as far as the
// outbox shows it.
func (o *Missed) Report(applied []*model.Message) {
	missed := slices.DeleteFunc(slices.Clone(applied), func(m *model.Message) bool { return !m.IsLogged() })
	if len(missed) == 0 {
		return
	}
	ctx, cancel := o.Host.Limited(context.Background())
	defer cancel()
	counts, reasons := map[string]int{}, o.reasons(ctx, missed)
	for _, reason := range reasons {
		counts[reason]++
		if o.Host.Observer.Completed != nil {
			o.Host.Observer.Completed(o.Projector, reason)
		}
	}
	for reason, n := range counts {
		o.Host.Logger.Warn("events were not delivered, and were read from the log", "projector", o.Projector,
			"events", n, "reason", reason, "first", missed[slices.Index(reasons, reason)].ID)
	}
}

// Reasons why an event was not delivered.
const (
	reasonNotPublished  = "not_published"  // its outbox entry is open: relays are slow or stopped
	reasonAbandoned     = "abandoned"      // its entry is abandoned, or behind one that is
	reasonNotSubscribed = "not_subscribed" // it was published to other topics only
	reasonNotDelivered  = "not_delivered"  // it was published, and the broker did not deliver it in time
	reasonNoEntry       = "no_entry"       // no route, or published and deleted
)

// reasons returns for each event why it was not delivered.
func (o *Missed) reasons(ctx context.Context, missed []*model.Message) []string {
	reasons := make([]string, len(missed))
	entries, _ := o.Host.Log.(interface {
		Entries(ctx context.Context, f provider.EntryFilter) ([]provider.Entry, error)
	})
	byStream := map[string][]provider.Entry{}
	for i, m := range missed {
		reasons[i] = reasonNoEntry
		list, asked := byStream[m.Raw.Stream]
		if !asked && entries != nil && len(byStream) < 100 {
			list, _ = entries.Entries(ctx, provider.EntryFilter{Stream: m.Raw.Stream, Limit: 1000})
			byStream[m.Raw.Stream] = list
		}
		for _, e := range list {
			if e.ID == m.ID {
				reasons[i] = o.reasonOf(e)
			}
		}
	}
	return reasons
}

func (o *Missed) reasonOf(e provider.Entry) string {
	switch {
	case o.Topics != nil && !slices.Contains(o.Topics, e.Topic):
		return reasonNotSubscribed
	case e.Status == outbox.Abandoned, e.Status == outbox.Held:
		return reasonAbandoned
	case e.Status.Open():
		return reasonNotPublished
	}
	return reasonNotDelivered
}
