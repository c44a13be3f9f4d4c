package projectortest

// fault is what happens to a unit of work, or to a delivery, of an event.
type fault int

const (
	noFault           fault = iota
	rolledBack              // the transaction is rolled back after the handlers, and the unit runs again
	lostReply               // the transaction commits, the reply is lost, and the unit runs again
	crashBefore             // the process ends before the handlers
	crashBeforeCommit       // the process ends after the handlers, before the commit
	crashAfterCommit        // the process ends after the commit, before the ack
	twice                   // two runners get the event at the same time
)

func (f fault) String() string {
	return [...]string{
		"", "the transaction is rolled back after the handlers, and they run again",
		"the transaction commits, the reply is lost, and the unit runs again",
		"the process ends before the handlers, and another one takes over",
		"the process ends after the handlers and before the commit, and another one takes over",
		"the process ends after the commit and before the ack, and another one takes over",
		"delivered to two runners at the same time",
	}[f]
}
