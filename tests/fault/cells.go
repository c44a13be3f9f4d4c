package main

// cells are all there are, in the order in which they run.
var cells = []*cell{
	killCell,
	zombieCell,
	backendsCell,
	restartCell,
	clockCell,
	conflictsCell,
	stormCell,
	corruptCell,
	poisonCell,
	inputCell,
	diskCell,
	fuzzCell,
}
