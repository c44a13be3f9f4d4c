package provider_test

import (
	"strings"
	"testing"

	"github.com/kinora-go/kinora/provider"
)

// BenchmarkCheckJSON measures the check of a 1 KB payload: text, as in most payloads, and numbers.
func BenchmarkCheckJSON(b *testing.B) {
	for name, line := range map[string]string{
		"text":    `{"id":"0198c1f0-0000-7000-8000-000000000001","stars":5,"text":"` + strings.Repeat("x", 180) + `"}`,
		"numbers": `{"a":1,"b":-273.15,"c":[1000000,2.5,3],"d":1e6,"e":0.000001}`,
	} {
		data := []byte("[" + strings.TrimSuffix(strings.Repeat(line+",", 1024/len(line)), ",") + "]")
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(data)))
			for b.Loop() {
				if err := provider.CheckJSON("data", data, 0); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
