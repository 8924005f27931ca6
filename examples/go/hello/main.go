// Streams the answer to a prompt, and prints its text.
package main

import (
	"context"
	"fmt"
	"io"
	"log"

	"google.golang.org/grpc"
	pb "stagemesh/v1"
)

func main() {
	size := grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(8 << 20))
	connection, err := grpc.Dial("127.0.0.1:7780", grpc.WithInsecure(), size)
	if err != nil {
		log.Fatal(err)
	}
	client := pb.NewOrchestratorServiceClient(connection)
	prompt := &pb.Input_Text{Text: "Tell me about the sea."}
	stream, err := client.Generate(context.Background(), &pb.GenerateRequest{Input: &pb.Input{Prompt: prompt}})
	for err == nil {
		var response *pb.GenerateResponse
		response, err = stream.Recv()
		fmt.Print(response.GetOutput().GetText())
	}
	if err != io.EOF {
		log.Fatal(err)
	}
}
