// Go's gRPC, by a codec of raw bytes so that no generator is needed: `go run client.go ADDRESS`.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

type raw struct{}

func (raw) Marshal(v interface{}) ([]byte, error) { return *v.(*[]byte), nil }
func (raw) Unmarshal(data []byte, v interface{}) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}
func (raw) Name() string   { return "proto" }
func (raw) String() string { return "proto" }

// GenerateRequest: prompt is a string, field 1.
func asking(prompt string) []byte { return append([]byte{0x0a, byte(len(prompt))}, prompt...) }

func open(ctx context.Context, at *grpc.ClientConn, body []byte) (grpc.ClientStream, error) {
	about := grpc.StreamDesc{ServerStreams: true}
	stream, err := at.NewStream(ctx, &about, "/specsot.v1.Master/Generate", grpc.ForceCodec(raw{}))
	if err != nil {
		return nil, err
	}
	if err := stream.SendMsg(&body); err != nil {
		return nil, err
	}
	return stream, stream.CloseSend()
}

func events(ctx context.Context, at *grpc.ClientConn, body []byte, most int) (int, error) {
	stream, err := open(ctx, at, body)
	for n := 0; ; n++ {
		var event []byte
		if err == nil && n < most {
			err = stream.RecvMsg(&event)
		}
		if err != nil || n == most {
			return n, err
		}
	}
}

func run(address string) error {
	at, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	ctx, stop := context.WithTimeout(context.Background(), 2*time.Minute)
	defer stop()
	if n, err := events(ctx, at, asking("What is the sky?"), 1<<20); err != io.EOF || n < 3 {
		return fmt.Errorf("stream: %d events, %v", n, err)
	}
	leaving, leave := context.WithCancel(ctx)
	if n, err := events(leaving, at, asking("Count to a thousand."), 1); err != nil || n != 1 {
		return fmt.Errorf("first event: %d, %v", n, err)
	}
	leave()
	if _, err := events(ctx, at, []byte{0xff}, 1); status.Code(err) != codes.InvalidArgument {
		return fmt.Errorf("malformed: %v", err)
	}
	late, past := context.WithTimeout(ctx, time.Nanosecond)
	defer past()
	if _, err := events(late, at, asking("Hi"), 1); status.Code(err) != codes.DeadlineExceeded {
		return fmt.Errorf("deadline: %v", err)
	}
	return nil
}

func main() {
	told := map[string]string{"client": "Go gRPC", "what": "Generate, cancel, malformed, deadline", "state": "works", "why": ""}
	if err := run(os.Args[1]); err != nil {
		told["state"], told["why"] = "fails", err.Error()
	}
	line, _ := json.Marshal(told)
	fmt.Println(string(line))
}
