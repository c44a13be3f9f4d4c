package projector

import (
	"context"
	"sync"
	"time"
)

// Attempt is one message at one handler: what is tried, counted, parked and held by itself.
type Attempt struct {
	Projector string
	Handler   string   // in full
	Was       []string // the handler's earlier names: what is parked under one of them is parked under its name
	MessageID string
	Key       string // ordering key; empty: it waits for nobody
	// Takes are the event types that the handler takes. A parked message that holds (Parked.Holds), of the same projector and
	// key, is in the way of the attempt where it is parked for the same handler, or for none, or is of a type that the handler
	// does not take. One that the handler takes and that is parked for another handler, this handler has applied itself.
	Takes []string
	// Seq is that of the parked message which is replayed, else zero: only messages with a smaller Seq settle it, or are in its way.
	Seq int64
}

// Verdict says what is to be done with an attempt.
type Verdict int

const (
	// Clear: it may run, and is named as under way.
	Clear Verdict = iota
	// Settled: its message is parked for this handler or for none, or was skipped; for a replay, with a smaller Seq. It is not to run.
	Settled
	// Held: an earlier message of its key is parked, and in its way.
	Held
	// Suspect: another runner had named it and has not said that it is done; or it was counted for a dead one (BeginAlone), and its count
	// has not begun anew since. It may have ended that runner's process, so it is to run with nothing beside it: see BeginAlone.
	Suspect
)

// Journal is what outlives a process about the attempts of runners. Every other method is a transaction of its own, committed
// when it returns. What a Journal knows about who is under way may be lost in a crash of the database, and never in one of a runner.
type Journal interface {
	// Apart keeps what may end this process apart from what else it does with the database: every attempt holds it shared, and one that
	// is suspected exclusively, of whichever runner. All views of a database that was opened once share it.
	Apart() *sync.RWMutex

	// Begin takes back runner's names of done, gives the verdict of each attempt, and names those that are clear as under way with
	// runner. What runner itself has named is no reason to suspect.
	Begin(ctx context.Context, runner string, attempts, done []Attempt) ([]Verdict, error)

	// BeginAlone is for a suspect that is about to run alone.
	//   - For each other runner that has named a and is dead, one attempt is counted, and the name taken back.
	//   - attempts is the count after that; alive is how many other runners have named a and may live.
	//   - a is named as under way with runner only where attempts+alive < limit; a negative limit is none.
	BeginAlone(ctx context.Context, runner string, a Attempt, limit int) (attempts, alive int, err error)

	// CountAttempt counts one of a, and returns the count. Where runner is not empty, its name of a is taken back with that: an attempt
	// that has ended is counted either so or, where the process ends before that, as a name of a dead runner. And there, where the
	// count would reach limit (negative: none), nothing changes, and it returns what the count would be: the name is taken back when
	// the message is parked (Work.Done), so that one whose attempts are spent never begins again (but where a process ends with the
	// only one of a budget of 1).
	CountAttempt(ctx context.Context, runner string, a Attempt, limit int) (int, error)

	// Alive says that runner lives until lease from now, on the store's clock; one that never said so is dead. A lease of zero: it
	// has ended, and nothing is under way with it.
	Alive(ctx context.Context, runner string, lease time.Duration) error

	// DueParked lists at most limit of the messages of projector that are still parked, in order of Seq, after Seq after, that may go
	// on by themselves: messages that wait (HeldClass) and are due, since what was before them was replayed or skipped; and
	// those parked with the code "unregistered" whose type is one of types. It looks at no others.
	DueParked(ctx context.Context, projector string, types []string, after int64, limit int) ([]Parked, error)

	// FailParked says that a replay of p at a failed: its Class, Code, Attempts and Version are p's from now on, and it is not
	// due; the count of a begins anew, and runner's name of it is taken back. Where p's Class is HeldClass, it says only that it is
	// not due, and that only while something is in a's way. One that is not parked any more stays as it is.
	FailParked(ctx context.Context, runner string, p Parked, a Attempt) error

	// PruneJournal forgets at most limit each of: messages of projector replayed or skipped, attempts of its handlers (those called
	// projector + "/" and more) last counted, and names by runners dead, of whatever projector, for longer than keep. It returns how
	// many it forgot. What other projectors keep, others that share the store may need for longer.
	PruneJournal(ctx context.Context, projector string, keep time.Duration, limit int) (int, error)
}
