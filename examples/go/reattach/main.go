// Streams the answer to a prompt, and prints its text exactly once although connections break:
//
//	reattach 127.0.0.1:7780 "Tell me about the sea."
//
// It follows the rules in the comment of Generate in orchestrator.proto for one choice and the output "text".
package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	pb "stagemesh/v1"
)

const pause = 100 * time.Millisecond

func main() {
	connection, err := grpc.Dial(os.Args[1],
		grpc.WithInsecure(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(8<<20), grpc.MaxCallSendMsgSize(8<<20)),
		// Without pings, a client does not notice that a host is unreachable. Go sends one every 10 seconds at most.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 2 * time.Second}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: pause, Multiplier: 1.6, MaxDelay: time.Second},
			MinConnectTimeout: time.Second,
		}))
	if err != nil {
		log.Fatal(err)
	}
	request := &pb.GenerateRequest{
		RequestId: newID(),
		LingerS:   30,
		Outputs:   []string{"text"},
		Input:     &pb.Input{Prompt: &pb.Input_Text{Text: os.Args[2]}},
	}
	client := pb.NewOrchestratorServiceClient(connection)
	for {
		hasBegun, err := receive(client, request)
		if err == io.EOF {
			return
		}
		delay, again := retryDelay(err, hasBegun)
		if !again {
			log.Fatal(err)
		}
		time.Sleep(delay)
		request.EarlierCalls++
	}
}

// receive makes one call. It prints the text that arrives, and stores in the request where the next call continues.
// It returns whether an event other than queued has arrived, and io.EOF if the call has succeeded.
func receive(client pb.OrchestratorServiceClient, request *pb.GenerateRequest) (hasBegun bool, err error) {
	stream, err := client.Generate(context.Background(), request)
	if err != nil {
		return false, err
	}
	generation := request.Generation
	for {
		response, err := stream.Recv()
		if err != nil {
			return hasBegun, err
		}
		hasBegun = hasBegun || response.GetQueued() == nil
		if admitted := response.GetAdmitted(); admitted != nil {
			request.Parameters = &pb.Parameters{Seed: &admitted.Seed}
			generation = admitted.Generation
		}
		if output := response.GetOutput(); output != nil {
			fmt.Print(output.GetText())
			end := output.Position + uint64(len(output.GetText()))
			request.NextPositions = []*pb.OutputPosition{{Name: output.Name, Position: end}}
			request.Generation = generation
		}
	}
}

// retryDelay returns whether a call that has failed is repeated, and after which delay.
func retryDelay(err error, hasBegun bool) (delay time.Duration, again bool) {
	failure := status.Convert(err)
	reason, asksForRetry := "", false
	delay = pause
	for _, detail := range failure.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.Domain == "stagemesh" {
				reason = detail.Reason
			}
		case *errdetails.RetryInfo:
			delay, asksForRetry = detail.RetryDelay.AsDuration(), true
		}
	}
	isUnavailable := failure.Code() == codes.Unavailable
	switch {
	case reason == "NOT_RUNNING" && isUnavailable:
		return delay, true
	case reason != "":
		return delay, !hasBegun && (isUnavailable || asksForRetry)
	}
	switch failure.Code() {
	case codes.Unavailable, codes.Canceled, codes.Unknown, codes.Internal:
		return delay, true // the connection broke
	}
	return delay, !hasBegun && asksForRetry
}

// newID returns a random id of a request.
func newID() string {
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		log.Fatal(err)
	}
	return fmt.Sprintf("%x", id)
}
