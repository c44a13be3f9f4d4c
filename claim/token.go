package claim

import (
	"crypto/rand"
	"encoding/hex"
)

// Token fences whoever claimed. The zero Token stands for no claim.
type Token [16]byte

// String is the token in hexadecimal, or "" for the zero Token.
func (t Token) String() string {
	if t == (Token{}) {
		return ""
	}
	return hex.EncodeToString(t[:])
}

// NewToken draws a token. Every claim has its own.
func NewToken() Token {
	var t Token
	_, _ = rand.Read(t[:]) // never fails: crypto/rand.Read ends the program instead
	return t
}
