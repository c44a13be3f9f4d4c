package main

import "context"

type pipelineFlags struct {
	Broker   string `default:"memory"`
	Pipeline bool   `default:"true" negatable:""`
}

func (f pipelineFlags) start(ctx context.Context, d database, s serviceStore) (*pipeline, error) {
	return startPipeline(ctx, s)
}
func (p *pipeline) unconsumed(context.Context) (int64, error) { return 0, nil }
