package model

import (
	"errors"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// Codes of parked messages. Others are SQLSTATEs and codes of providers.
const (
	CodeMalformed    = "malformed"    // the headers are not those of a published event, or the Decoder failed
	CodeNoDecoder    = "no_decoder"   // a Decoder has read it before, and this runner has none
	CodeUnregistered = "unregistered" // the type or its version is not registered; due once it is
	CodeUndecodable  = "undecodable"  // the data cannot be decoded as its type
	CodeNoHandler    = "no_handler"   // it was parked for a handler that this program does not have
	CodeNoEvent      = "no_event"     // the log does not have the event: it was restored from a backup, or the message is forged
	CodePanic        = "panic"
	CodeGoexit       = "goexit"  // the handler called runtime.Goexit
	CodeStuck        = "stuck"   // the handler did not return after its timeout
	CodeCrashed      = "crashed" // a process ended while it processed the message
)

// Errors of package projector, which documents them.
var (
	ErrHalted     = errors.New("the projector is halted: replay or skip the stuck message")
	ErrLogChanged = errors.New("the log has changed")
	ErrNoRebuild  = errors.New("the projector cannot be rebuilt")
	ErrGeneration = errors.New("the generation does not allow this")
)

// Reasons why a message is set aside.
var (
	ErrNoHandler = permanent(CodeNoHandler, "this program does not have the handler of the message")
	ErrNoDecoder = &provider.Error{
		Class: provider.ClassTransient, Code: CodeNoDecoder,
		Err: errors.New("the message is of other software: set RunnerConfig.Decode to the decoder of its runner"),
	}
	ErrNoEvent  = permanent(CodeNoEvent, "the log no longer has the event: it was probably restored from a backup")
	ErrNotInLog = permanent(CodeNoEvent, "the log has no event with this id: the message is forged, or its source must not be Untrusted")
)

func permanent(code, text string) *provider.Error {
	return &provider.Error{Class: provider.ClassPermanent, Code: code, Err: errors.New(text)}
}

// Undecodable returns the error of an event that this program cannot decode, nil if err is nil.
func Undecodable(err error) error {
	if err == nil {
		return nil
	}
	code := CodeUndecodable
	if errors.Is(err, eventstore.ErrUnregistered) {
		code = CodeUnregistered
	}
	return &provider.Error{Class: provider.ClassPermanent, Code: code, Err: err}
}
