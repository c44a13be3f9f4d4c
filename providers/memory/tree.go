package memory

import (
	"cmp"
	"iter"
	"math/rand/v2"
)

// tree is an immutable ordered map: put and drop return a new tree, which shares unchanged nodes with the
// old one. So a snapshot and a rollback cost nothing. The nil tree is empty. It is a treap: a search tree
// by key and a heap by rank. Ranks are random, which keeps the tree shallow.
type tree[K cmp.Ordered, V any] struct {
	key         K
	value       V
	rank        uint64
	left, right *tree[K, V]
}

func (n *tree[K, V]) get(k K) (v V, ok bool) {
	for n != nil {
		switch c := cmp.Compare(k, n.key); {
		case c < 0:
			n = n.left
		case c > 0:
			n = n.right
		default:
			return n.value, true
		}
	}
	return v, false
}

func (n *tree[K, V]) has(k K) bool { _, ok := n.get(k); return ok }

func (n *tree[K, V]) put(k K, v V) *tree[K, V] {
	if n == nil {
		return &tree[K, V]{key: k, value: v, rank: rand.Uint64()}
	}
	up := *n
	switch c := cmp.Compare(k, n.key); {
	case c < 0:
		up.left = n.left.put(k, v)
		if l := up.left; l.rank > up.rank { // l is new, so it may be rotated in place
			up.left, l.right = l.right, &up
			return l
		}
	case c > 0:
		up.right = n.right.put(k, v)
		if r := up.right; r.rank > up.rank {
			up.right, r.left = r.left, &up
			return r
		}
	default:
		up.value = v
	}
	return &up
}

func (n *tree[K, V]) drop(k K) *tree[K, V] {
	if !n.has(k) {
		return n
	}
	up := *n
	switch c := cmp.Compare(k, n.key); {
	case c < 0:
		up.left = n.left.drop(k)
	case c > 0:
		up.right = n.right.drop(k)
	default:
		return merge(n.left, n.right)
	}
	return &up
}

// member returns the keys of t with k or without it.
func member[K cmp.Ordered](t *tree[K, struct{}], k K, is bool) *tree[K, struct{}] {
	if is {
		return t.put(k, struct{}{})
	}
	return t.drop(k)
}

// dropIn returns a tree of trees without key k of tree t. A tree that is then empty is dropped.
func dropIn[T, K cmp.Ordered, V any](all *tree[T, *tree[K, V]], t T, k K) *tree[T, *tree[K, V]] {
	in, _ := all.get(t)
	if in = in.drop(k); in == nil {
		return all.drop(t)
	}
	return all.put(t, in)
}

// merge joins two trees. Every key of a must be less than every key of b.
func merge[K cmp.Ordered, V any](a, b *tree[K, V]) *tree[K, V] {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	case a.rank > b.rank:
		up := *a
		up.right = merge(a.right, b)
		return &up
	default:
		up := *b
		up.left = merge(a, b.left)
		return &up
	}
}

// from yields the keys from k on, in order.
func (n *tree[K, V]) from(k K) iter.Seq2[K, V] {
	return func(yield func(K, V) bool) { n.walk(k, yield) }
}

func (n *tree[K, V]) walk(from K, yield func(K, V) bool) bool {
	if n == nil {
		return true
	}
	if n.key < from {
		return n.right.walk(from, yield)
	}
	return n.left.walk(from, yield) && yield(n.key, n.value) && n.right.walk(from, yield)
}

// last returns the greatest key, or the zero value if the tree is empty.
func (n *tree[K, V]) last() (k K) {
	for ; n != nil; n = n.right {
		k = n.key
	}
	return k
}
