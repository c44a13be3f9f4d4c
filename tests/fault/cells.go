package main

// cells lists all cells in the order in which they run.
var cells = []*cell{
	killCell,
	zombieCell,
	backendsCell,
	restartCell,
	networkCell,
	replyCell,
	pointsCell,
	poolCell,
	slowCell,
	sigtermCell,
	clockCell,
	conflictsCell,
	stormCell,
	corruptCell,
	poisonCell,
	inputCell,
	diskCell,
	fuzzCell,
	operatorCell,
	brokerLosesCell,
	newProjectorCell,
	moveCell,
	readersCell,
	taskPointsCell,
}
