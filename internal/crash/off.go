//go:build !kinora_fault

// Package crash names the points at which the fault suite kills processes: before and after each
// step that is visible outside the process. In an ordinary build, Point is empty and inlined. With
// the build tag kinora_fault, a process kills itself at the point that KINORA_CRASH_POINT names.
//
// The suite finds the points in the source. It fails if a statement has no point right before it
// and right after it.
package crash

// Point is where a process may kill itself. In this build it does nothing.
func Point(string) {}

// Watch would call f at each point. In this build it does nothing.
func Watch(func(name string)) {}
