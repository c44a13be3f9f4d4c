// Package errclass describes errors without their texts, which may contain secrets.
package errclass

import (
	"context"
	"errors"
	"fmt"
)

// Of returns the innermost type of an error, and its database code if it has one.
func Of(err error) string {
	if errors.Is(err, context.DeadlineExceeded) {
		return "deadline exceeded"
	}
	if state, ok := errors.AsType[interface {
		error
		SQLState() string
	}](err); ok {
		return fmt.Sprintf("%T %s", state, state.SQLState())
	}
	err = Innermost(err)
	if coded, ok := err.(interface{ Code() int }); ok {
		return fmt.Sprintf("%T %d", err, coded.Code())
	}
	return fmt.Sprintf("%T", err)
}

// Innermost returns the error that the others wrap. Of joined errors it uses the last one.
func Innermost(err error) error {
	for {
		var next error
		switch e := err.(type) { //nolint:errorlint // the loop unwraps the error
		case interface{ Unwrap() error }:
			next = e.Unwrap()
		case interface{ Unwrap() []error }:
			if all := e.Unwrap(); len(all) > 0 {
				next = all[len(all)-1]
			}
		}
		if next == nil {
			return err
		}
		err = next
	}
}
