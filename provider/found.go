package provider

// Found is what the opening of a unit found, by the index of the message.
type Found struct {
	// Fresh says for each handler whether it is to run.
	//   - A message with Mark: its marker was not there.
	//   - A message without Mark: always, unless it is a parked one.
	//   - A parked message is fresh for no handler unless it is still waiting as it was listed (same Attempts, same
	//     Handlers), its lane is not taken by another unit, and all messages before it in its lane are earlier
	//     messages of this unit.
	Fresh [][]bool
	// Held: its lane is held, and stays held until the unit ends. Always false for parked messages.
	Held []bool
	// Suspect: another runner has named it. Only set if Unit.Careful is.
	Suspect []bool
	// Live says of parked messages whether they are still there, and first: see Fresh. Nil for deliveries.
	Live []bool
	// Begin must be called with the message's index before its handlers run, so that the provider can say in a
	// *MessageError which message a failing statement belongs to.
	Begin func(message int)
}
