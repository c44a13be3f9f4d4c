package projectortest_test

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
)

// fake is a test whose failures another test reads.
type fake struct {
	testing.TB
	mu   sync.Mutex
	text []string
}

func (f *fake) Helper() {}

func (f *fake) Errorf(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.text = append(f.text, fmt.Sprintf(format, args...))
}

func (f *fake) Fatalf(format string, args ...any) {
	f.Errorf(format, args...)
	runtime.Goexit()
}

// failure runs a test that should fail, and returns its text.
func failure(t *testing.T, test func(t testing.TB)) string {
	t.Helper()
	f, done := &fake{TB: t}, make(chan struct{})
	go func() {
		defer close(done)
		test(f)
	}()
	<-done
	text := strings.Join(f.text, "\n")
	if text == "" {
		t.Fatal("the kit has not failed the test")
	}
	t.Log(text)
	return text
}
