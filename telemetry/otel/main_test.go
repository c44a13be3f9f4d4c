package otel_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// A test that needs a second process starts this program again.
func TestMain(m *testing.M) {
	if file := os.Getenv(childSpans); file != "" {
		consume(os.Getenv(childDSN), file)
		return
	}
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/kinora-go/kinora/internal/testserver.run.func1"))
}
