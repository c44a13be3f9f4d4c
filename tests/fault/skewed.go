package main

import (
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// skewEnv is the number of seconds by which a child's clock is wrong, if it was built with skewNow.
const skewEnv = "KINORA_FAULT_SKEW"

// wordSkew is the clock error that a child measures, in half seconds.
const wordSkew = 33

// isSkewed reports whether p measures the clock error that was set.
func isSkewed(p *process) bool {
	off := p.status.get(wordSkew) - int64(2*p.Skew/time.Second)
	return off >= -1 && off <= 1
}

// skewNow makes time.Now itself wrong, in every package. Timers and durations behave as on a
// machine with a wrong clock.
const (
	now     = "	sec, nsec, mono := runtimeNow()\n"
	skewNow = now + "	sec += faultSkew\n"

	skewFile = `package time

import "syscall"

var faultSkew = func() int64 {
	text, _ := syscall.Getenv("` + skewEnv + `")
	n, _ := atoi(text)
	return int64(n)
}()
`
)

// buildSkewed builds the program of children with a wrong clock, once.
func (s *suite) buildSkewed() error {
	s.skewing.Lock()
	defer s.skewing.Unlock()
	if s.skewed != "" {
		return nil
	}
	root, err := exec.CommandContext(s.ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return err
	}
	source := filepath.Join(strings.TrimSpace(string(root)), "src/time")
	text, err := os.ReadFile(filepath.Join(source, "time.go"))
	if err != nil {
		return err
	}
	if strings.Count(string(text), now) != 1 {
		return errors.New("this Go version reads the clock differently: adapt skewNow")
	}
	edited := map[string]string{
		filepath.Join(source, "time.go"): strings.Replace(string(text), now, skewNow, 1),
		filepath.Join(source, "skew.go"): skewFile,
	}
	maps.Copy(edited, s.edited)
	binary := filepath.Join(s.dir, "child-skewed")
	if err := s.build(binary, edited); err != nil {
		return err
	}
	s.skewed = binary
	return nil
}
