package projectortest_test

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// the shared server lives as long as the process
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("os/exec.(*Cmd).Wait"),
		goleak.IgnoreAnyFunction("github.com/kinora-go/kinora/internal/testserver.run.func1"))
}
