// The settings of connections. See docs/protocol.md, "Connections and messages".
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

namespace stage {

constexpr int MESSAGE_LIMIT_BYTES = 8 << 20;

inline std::shared_ptr<grpc::Channel> open_channel(const std::string& endpoint) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(MESSAGE_LIMIT_BYTES);
  arguments.SetMaxSendMessageSize(MESSAGE_LIMIT_BYTES);
  // Without pings, a client does not notice that a host is unreachable.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 2000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 2000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // The defaults wait up to two minutes before they connect again. The minimum is also the time limit of an attempt.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 3000);
  // Stagemesh's protocol repeats what was lost.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(endpoint, grpc::InsecureChannelCredentials(), arguments);
}

inline void configure_server(grpc::ServerBuilder& builder) {
  builder.SetMaxReceiveMessageSize(MESSAGE_LIMIT_BYTES);
  builder.SetMaxSendMessageSize(MESSAGE_LIMIT_BYTES);
  // Stagemesh's clients send a ping every half a second, also without calls.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 500);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // Calls of hosts that are unreachable end.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 2000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 2000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
}

}  // namespace stage
