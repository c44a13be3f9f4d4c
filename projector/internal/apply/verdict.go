package apply

import (
	"errors"

	"github.com/kinora-go/kinora/projector/internal/unit"
	"github.com/kinora-go/kinora/provider"
)

// failure is how a unit ended.
type failure struct {
	err  error // nil: it was committed
	size int   // number of its messages
	at   int   // the message that failed; -1: it is not known
	// aside: it was to set its only message aside
	aside bool
	over  bool // the hard context of the runner has ended
}

// verdict is what follows the end of a unit.
type verdict int

const (
	finish   verdict = iota // ack, report, go on
	again                   // the same messages after a backoff
	closing                 // the same messages, once the reader of the log has applied the last events
	halve                   // it is not known which message failed
	split                   // the messages before the one that failed, it alone, the rest
	setAside                // the message that failed
	end                     // the owner decides
)

// judge decides what follows the end of a unit.
func judge(f failure) verdict {
	class, code := provider.ClassOf(f.err), provider.CodeOf(f.err)
	switch {
	case f.err == nil:
		return finish
	case f.over, errors.Is(f.err, provider.ErrFenced), errors.Is(f.err, provider.ErrEnded):
		return end
	case code == provider.CodeClosing:
		return closing
	case class == provider.ClassTransient, class == provider.ClassAmbiguous, f.aside:
		return again
	case f.size == 1, f.at >= 0 && (errors.Is(f.err, unit.ErrStuck) || code == provider.CodePartly || isOnly(f.err)):
		return setAside
	case f.at >= 0:
		return split
	}
	return halve
}

// isOnly reports whether a message has failed, and the other messages of its unit were applied.
func isOnly(err error) bool {
	e, ok := errors.AsType[*provider.MessageError](err)
	return ok && e.Others
}
