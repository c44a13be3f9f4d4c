package main

import (
	"os"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/kinora-go/kinora/cmd/kinora/commands"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// TestComposeFile: the commands of the containers exist, and the broker of each profile is a service.
// The containers themselves are not started.
func TestComposeFile(t *testing.T) {
	text, err := os.ReadFile("compose.yaml")
	require.NoError(t, err)
	for broker, port := range map[string]string{natsKind: "4222", redisKind: "6379", kafkaKind: "9092"} {
		t.Run(broker, func(t *testing.T) {
			filled := strings.NewReplacer("${BROKER:?nats, redis or kafka}", broker, "${BROKER}", broker, "${PORT:?of the broker}", port).Replace(string(text))
			require.NotContains(t, filled, "${")
			var file struct {
				Services map[string]struct {
					Command     string
					Environment map[string]string
					Profiles    []string
				}
			}
			require.NoError(t, yaml.Unmarshal([]byte(filled), &file))
			require.Equal(t, []string{broker}, file.Services[broker].Profiles)
			for name, s := range file.Services {
				args, ours := strings.CutPrefix(s.Command, "go run . ")
				if !ours {
					continue
				}
				t.Setenv("REVIEWS_DB", s.Environment["REVIEWS_DB"])
				t.Setenv("REVIEWS_BROKER_URL", s.Environment["REVIEWS_BROKER_URL"])
				var line commandLine
				parser, err := kong.New(&line, commands.Vars())
				require.NoError(t, err)
				_, err = parser.Parse(strings.Fields(args))
				require.NoError(t, err, name)
			}
			for _, name := range []string{"serve", "relay", "project"} {
				require.Contains(t, file.Services[name].Command, name)
			}
		})
	}
}
