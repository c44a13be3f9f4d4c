package postgres_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if role := os.Getenv("KINORA_TEST_CHILD"); role != "" {
		os.Exit(child(role))
	}
	// the shared server lives as long as the process
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("os/exec.(*Cmd).Wait"),
		goleak.IgnoreAnyFunction("github.com/kinora-go/kinora/internal/testserver.run.func1"))
}
