package projector

import "github.com/ThreeDotsLabs/watermill/message"

// Source is where a runner's messages come from. Make it with Subscribe.
type Source struct {
	sub    message.Subscriber
	topics []string
}

// Subscribe reads topics from s. All projectors of the runner share each delivery, which is acked when all of
// them are done with it. The messages of one topic are handled one after another.
func Subscribe(s message.Subscriber, topics ...string) Source {
	return Source{sub: s, topics: topics}
}
