// Package decode has decoders (projector.Decoder) for messages of other software: plain JSON,
// Watermill's CQRS component, and CloudEvents. Set one as RunnerConfig.Decode.
//
//   - A decoder is a function, so a program changes what it returns in a function of its own: it sets
//     the ordering key (Raw.Stream), or chooses a decoder by the topic.
//   - The types of the events are in the table of the projector (eventstore.NewTypes). If the other
//     software has other names, declare them with Was.
//   - The data is decoded as JSON, or by the codec of its type (TypeDef.Codec), such as one for
//     Protobuf.
//   - Decoders do not change messages, never panic, and may be called by several goroutines at once.
package decode
