// Package brokers opens five brokers for Kinora's relays and runners, one file for each. The files
// have the settings that matter, to be copied: docs/brokers.md explains them, and says what each
// broker keeps through failures.
package brokers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// Broker opens publishers for relays and subscribers for runners. The caller closes both.
type Broker interface {
	// Prepare creates what topics need at the broker, unless it exists. Call it when you deploy,
	// as you call Migrate for a database.
	Prepare(ctx context.Context, topics ...string) error
	// Publisher returns a publisher whose Publish returns once the broker has the messages.
	Publisher() (message.Publisher, error)
	// Subscriber returns a subscriber of a consumer group. Each projector has a group of its own.
	// The subscribers of a group share the messages, and each group gets all of them.
	Subscriber(group string) (message.Subscriber, error)
}

// Takeover is how long the messages of a runner that was killed wait until the broker gives them
// to another one, if Config.Takeover is zero.
const Takeover = 30 * time.Second

// Config says which broker to open.
type Config struct {
	// Address is redis://HOST:PORT/DB, nats://HOST:PORT,HOST:PORT,… or kafka://HOST:PORT,… or
	// postgres://….
	Address string
	// Takeover is how long the messages of a runner that was killed wait until the broker gives
	// them to another one. Zero means 30s. PostgreSQL ignores it: there they wait until the
	// connection of the runner ends, which is at once if its process ends.
	Takeover time.Duration
	Logger   *slog.Logger // nil means slog.Default()
}

// Open returns the broker at an address. It connects to nothing yet.
func Open(c Config) (Broker, error) {
	if c.Takeover == 0 {
		c.Takeover = Takeover
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	// Watermill's info records are many: they become debug records.
	levels := map[slog.Level]slog.Level{slog.LevelInfo: slog.LevelDebug}
	log := watermill.NewSlogLoggerWithLevelMapping(c.Logger, levels)
	scheme, rest, _ := strings.Cut(c.Address, "://")
	hosts := strings.Split(rest, ",")
	switch scheme {
	case "redis":
		return redisBroker{c.Address, c.Takeover, log}, nil
	case "nats":
		return natsBroker{hosts, c.Takeover, log}, nil
	case "kafka":
		return kafkaBroker{hosts, c.Takeover, log}, nil
	case "postgres":
		return sqlBroker{c.Address, log}, nil
	}
	return nil, errors.New("the address of the broker must begin with redis://, nats://, kafka:// or postgres://")
}

// wrap adds the failed call to an error.
func wrap(what string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}
