package provider

// Found is the result of opening a unit, by the index of the message.
type Found struct {
	// Fresh reports for each handler of a message whether it must run.
	//   - A message with Mark: the handler had no marker of it. If the projector has a checkpoint,
	//     and the message a Position, the Position is behind the checkpoint.
	//   - A message without Mark: always true, unless the message is parked.
	//   - A parked message: false for all handlers, unless the message is live (see Live).
	Fresh [][]bool
	// Left reports whether a delivery is left to the reader of the log, because the projector is in
	// ModeCatchUp and the message has a Position behind the checkpoint. Its handlers are not fresh, and it has no
	// marker. Nil if no message is.
	Left []bool
	// Held reports whether the lane is held. It stays held until the unit ends. Always false for
	// parked messages.
	Held []bool
	// Suspect reports whether another runner has recorded the message as in flight. Set only with
	// Unit.Careful.
	Suspect []bool
	// Recorded reports whether the message is recorded as parked (MarkerUnits). Nil if none is.
	Recorded []bool
	// Partly reports whether an earlier unit has applied a part of the message, and could not undo it. It
	// must be set aside with CodePartly. Nil if none is.
	Partly []bool
	// Live reports whether a parked message can run: it is still waiting as it was listed (same
	// Attempts, same Handlers), no other unit has its lane, and all messages before it in the
	// lane are in this unit before it. Nil for deliveries.
	Live []bool
	// Begin must be called with the index of a message before its handlers run. Then the provider
	// can report the message of a failed statement in a *MessageError. -1: the statements that follow
	// belong to several messages.
	Begin func(message int)
}
