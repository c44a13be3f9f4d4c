package provider

import (
	"strconv"

	"github.com/kinora-go/kinora/eventstore"
)

// CheckSnapshot checks the arguments of LoadSnapshot, and of SaveSnapshot if s has a version. Its error
// is an *eventstore.InvalidError.
func CheckSnapshot(stream string, s eventstore.Snapshot) error {
	if err := CheckStream(stream); err != nil {
		return err
	}
	if err := CheckText("snapshot schema", s.Schema, 64); err != nil {
		return err
	}
	if s.Version == 0 && s.State == nil {
		return nil
	}
	if err := CheckText("snapshot event id", s.EventID, MaxIDBytes); err != nil {
		return err
	}
	if s.Version < 1 {
		return &eventstore.InvalidError{Field: "snapshot version", Reason: "must be 1 or more"}
	}
	if len(s.State) > MaxSnapshotBytes {
		return &eventstore.InvalidError{Field: "snapshot state", Reason: "has more than " + strconv.Itoa(MaxSnapshotBytes) + " bytes"}
	}
	return nil
}
