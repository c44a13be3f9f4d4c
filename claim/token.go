package claim

import (
	"crypto/rand"
	"encoding/hex"
)

// Token identifies one claim. The zero Token means no claim.
type Token [16]byte

// String returns the token in hexadecimal, or "" for the zero Token.
func (t Token) String() string {
	if t == (Token{}) {
		return ""
	}
	return hex.EncodeToString(t[:])
}

// NewToken returns a random token. Each claim uses a new one.
func NewToken() Token {
	var t Token
	_, _ = rand.Read(t[:]) // never fails: crypto/rand.Read ends the program instead
	return t
}
