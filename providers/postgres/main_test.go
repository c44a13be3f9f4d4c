package postgres_test

import (
	"flag"
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if role := os.Getenv("KINORA_TEST_CHILD"); role != "" {
		os.Exit(child(role))
	}
	// Most tests wait for servers, so more of them run at a time than there are cores.
	_ = flag.Set("test.parallel", "6")
	// the shared server lives as long as the process
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("os/exec.(*Cmd).Wait"),
		goleak.IgnoreAnyFunction("github.com/kinora-go/kinora/internal/testserver.run.func1"))
}
