package projector

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Source is where a runner's messages come from. Make it with Subscribe or SubscribeEach. A runner of the zero Source
// replays and rehearses what is parked, and never runs.
type Source struct {
	sub    message.Subscriber
	each   func(projector string) (message.Subscriber, error)
	topics []string
}

// Subscribe reads topics from s. All projectors of the runner share each delivery, which is acked when all of
// them are done with it: a message that one of them retries is acked late for all.
func Subscribe(s message.Subscriber, topics ...string) Source {
	return Source{sub: s, topics: topics}
}

// SubscribeEach reads topics for each projector from a subscriber of its own, as one of another consumer group is, so
// that none holds up another. The runner asks for them when it runs, and closes them when it has drained.
func SubscribeEach(s func(projector string) (message.Subscriber, error), topics ...string) Source {
	return Source{each: s, topics: topics}
}

func (s Source) isZero() bool { return s.sub == nil && s.each == nil && len(s.topics) == 0 }

func (s Source) check() error {
	if s.isZero() {
		return nil
	}
	if s.sub == nil && s.each == nil || len(s.topics) == 0 {
		return errors.New("wants a source with topics")
	}
	for i, topic := range s.topics {
		if topic == "" || slices.Contains(s.topics[:i], topic) {
			return fmt.Errorf("topic %q is empty, or given twice", topic)
		}
	}
	return nil
}

// feeds are the subscribers of a source, each with the members that it is for.
func (s Source) feeds(members []member) (feeds []feed, err error) {
	if s.each == nil {
		return []feed{{sub: s.sub, members: members}}, nil
	}
	for i := range members {
		name := members[i].name
		sub, err := s.each(name)
		if err == nil && sub == nil {
			err = errors.New("no subscriber")
		}
		if err != nil {
			return feeds, fmt.Errorf("subscriber of %s: %w", name, err)
		}
		feeds = append(feeds, feed{sub: sub, owned: true, members: members[i : i+1]})
	}
	return feeds, nil
}

// feed is a subscriber and whom it is for.
type feed struct {
	sub     message.Subscriber
	owned   bool // closed by the runner
	members []member
	topics  []string
	from    []reflect.SelectCase // of each topic
}

func (f *feed) subscribe(ctx context.Context, topics []string) error {
	for _, topic := range topics {
		messages, err := f.sub.Subscribe(ctx, topic)
		if err != nil {
			return fmt.Errorf("subscribe to %s: %w", topic, err)
		}
		f.topics = append(f.topics, topic)
		f.from = append(f.from, reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(messages)})
	}
	return nil
}

// next reads a message of whichever topic has one. It returns false where a subscription has ended, or ctx.
func (f *feed) next(ctx context.Context) (topic string, m *message.Message, ok bool) {
	end := reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(ctx.Done())}
	i, read, _ := reflect.Select(append(f.from[:len(f.from):len(f.from)], end))
	if i == len(f.topics) {
		return "", nil, false
	}
	m, _ = read.Interface().(*message.Message) // a channel that is closed gives nil
	return f.topics[i], m, m != nil
}

// closeOwned closes the subscribers that the runner has asked for.
func closeOwned(feeds []feed) error {
	var errs []error
	for _, f := range feeds {
		if f.owned {
			if err := f.sub.Close(); err != nil {
				errs = append(errs, fmt.Errorf("runner: close a subscriber: %w", err))
			}
		}
	}
	return errors.Join(errs...)
}
