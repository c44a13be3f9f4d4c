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

// skewEnv is by how many seconds the clock of a child is wrong, if it was built with skewNow.
const skewEnv = "KINORA_FAULT_SKEW"

// wordSkew is by how much a child finds its clock wrong, in half seconds.
const wordSkew = 33

// isSkewed tells whether p finds its clock as wrong as it should be.
func isSkewed(p *process) bool {
	off := p.status.get(wordSkew) - int64(2*p.Skew/time.Second)
	return off >= -1 && off <= 1
}

// skewNow makes time.Now itself wrong: whatever asks for the time, in whichever package, gets the wrong one. Timers and
// durations are as they are on a machine whose clock is wrong.
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

// buildSkewed builds children whose clock can be wrong, once.
func (s *suite) buildSkewed() error {
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
		return errors.New("this version of Go reads the clock in another way: see skewNow")
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
