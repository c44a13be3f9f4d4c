// Package crash names the points at which the fault suite kills processes: before and after each step that somebody
// else sees. In an ordinary build they are empty and inlined. With the tag kinora_fault a process kills itself at the
// point that KINORA_CRASH_POINT names.
//
// The suite finds them in the source, and a statement with no point right before and right after it fails it.
package crash
