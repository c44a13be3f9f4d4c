package providertest

import (
	"context"
	"fmt"
	"reflect"
	"testing"
	"time"
)

// Inside calls the methods of a store whose first argument is a context with ctx, and otherwise zero arguments. It
// returns their errors by the name of the method. It ends the test if one does not return within limit, as one that
// waits for the open transaction to which ctx belongs.
func Inside(ctx context.Context, t testing.TB, store any, limit time.Duration) map[string]error {
	t.Helper()
	errs, v := map[string]error{}, reflect.ValueOf(store)
	for i := range v.NumMethod() {
		name, method := v.Type().Method(i).Name, v.Method(i)
		if method.Type().NumIn() == 0 || method.Type().In(0) != reflect.TypeFor[context.Context]() {
			continue
		}
		done := make(chan error, 1)
		go func() { done <- callZero(ctx, method) }()
		late := time.NewTimer(limit)
		select {
		case errs[name] = <-done:
			late.Stop()
		case <-late.C:
			t.Fatalf("%s has not returned after %s", name, limit)
		}
	}
	return errs
}

// callZero returns the error of a call, or of the iteration over its result.
func callZero(ctx context.Context, method reflect.Value) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	args := []reflect.Value{reflect.ValueOf(ctx)}
	for n := 1; n < method.Type().NumIn(); n++ {
		if n == method.Type().NumIn()-1 && method.Type().IsVariadic() {
			break
		}
		args = append(args, reflect.Zero(method.Type().In(n)))
	}
	results := method.Call(args)
	if len(results) == 0 {
		return nil
	}
	last := results[len(results)-1]
	if last.Kind() == reflect.Func && last.Type().CanSeq2() {
		for _, failed := range last.Seq2() {
			err, _ = failed.Interface().(error)
		}
		return err
	}
	err, _ = last.Interface().(error)
	return err
}
