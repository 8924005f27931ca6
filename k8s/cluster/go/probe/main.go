// Does what the kubelet's gRPC probe does, for a kubelet that has none: asks a server for the health of a service.
// Usage: probe ADDRESS SERVICE TIMEOUT. Ends with status 0 if the service is SERVING.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"
)

func check(address, service string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	connection, err := grpc.DialContext(ctx, address, grpc.WithInsecure(), grpc.WithBlock())
	if err != nil {
		return fmt.Errorf("connecting to %s: %w", address, err)
	}
	defer connection.Close()
	request := &grpc_health_v1.HealthCheckRequest{Service: service}
	response, err := grpc_health_v1.NewHealthClient(connection).Check(ctx, request)
	if err != nil {
		return fmt.Errorf("the health of %q: %w", service, err)
	}
	if response.Status != grpc_health_v1.HealthCheckResponse_SERVING {
		return fmt.Errorf("%q is %s", service, response.Status)
	}
	return nil
}

func main() {
	timeout, err := time.ParseDuration(os.Args[3])
	if err == nil {
		err = check(os.Args[1], os.Args[2], timeout)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}
