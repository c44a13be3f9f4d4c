package model

import (
	"context"
	"strings"

	"github.com/kinora-go/kinora/provider"
)

// FindPlaces sets the positions of deliveries in the log. Events of another log have none. For an event that was
// published without a position, or before this log was restored or moved, the log is asked. Those that the log
// no longer has are to be set aside.
func (h *Host) FindPlaces(ctx context.Context, msgs []*Message) error {
	own := *h.LogID.Load()
	named := own.String()
	var unknown []*Message
	var ids []string
	for _, m := range msgs {
		switch log := m.Msg.Metadata[provider.HeaderLog]; {
		case m.Malformed != nil, m.IsForeign, m.IsUnknown:
		case log == named:
			m.Position = m.Raw.Position
		default:
			if lineage, _, of := strings.Cut(log, "/"); !of || lineage == own.Lineage {
				unknown, ids = append(unknown, m), append(ids, m.ID)
			}
		}
	}
	if len(ids) == 0 {
		return nil
	}
	ctx, cancel := h.Limited(ctx)
	defer cancel()
	places, err := h.Log.LogPlaces(ctx, ids)
	if err != nil {
		return err
	}
	for _, m := range unknown {
		place, ok := places[m.ID]
		m.Position = place.Position
		if !ok && m.Msg.Metadata[provider.HeaderLog] != "" && m.Aside == nil {
			m.Aside = &Aside{Cause: ErrNoEvent, Attempts: 1}
		}
	}
	return nil
}

// OfEarlierLog reports whether a message was published from this log before it was restored or moved.
func (h *Host) OfEarlierLog(m *Message) bool {
	own, log := *h.LogID.Load(), m.Msg.Metadata[provider.HeaderLog]
	lineage, _, named := strings.Cut(log, "/")
	return !m.IsForeign && !m.IsUnknown && named && lineage == own.Lineage && log != own.String()
}
