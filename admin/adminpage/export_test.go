package adminpage

import "time"

// Patient lets live pages last for an hour, so that they outlast a test on a slow machine.
func (h *Handler) Patient() { h.times = times{liveFor: time.Hour, refusedEvery: time.Hour} }
