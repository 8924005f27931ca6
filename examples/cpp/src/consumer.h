// Serves PutChunk: the streams of producers, and the flows that they carry. See docs/protocol.md, "The consumer".
#pragma once

#include <grpcpp/grpcpp.h>

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "flows.h"
#include "incoming.h"
#include "stagemesh/v1/stage.grpc.pb.h"

namespace stage {

class ProducerSession;

class Consumer {
 public:
  using Stream = grpc::ServerReaderWriter<v1::PutChunkResponse, v1::PutChunkRequest>;

  Consumer(const Identity& identity, const v1::Signature& signature, const CreditLimits& limits)
      : identity_(identity), signature_(signature), limits_(limits) {}

  // Registers a flow. Until then, its producer is rejected. Throws STEP_EXISTS if another step has the flow.
  std::shared_ptr<IncomingFlow> expect(const v1::EdgeKey& key, const std::string& producer);

  // Serves a stream of a producer until it ends. The flows of the stream survive it.
  grpc::Status serve(grpc::ServerContext* context, Stream* stream);

  // Fails flows whose producers have been away for too long, and ends streams without a Hello.
  void check(Clock::time_point now);

 private:
  struct Outcome {
    std::string producer;
    // Nothing if the flow was committed.
    std::optional<Failure> failure;
  };
  struct Handshake {
    grpc::ServerContext* context;
    Clock::time_point until;
  };

  // Reads the first message of a stream.
  bool read_hello(grpc::ServerContext* context, Stream* stream, v1::PutChunkRequest* request);
  void check_hello(const v1::Hello& hello) const;
  // Fails the flows that an earlier incarnation of a producer had opened.
  void replace_incarnation(const std::string& producer, const std::string& incarnation);
  // Handles an item. An error of a flow rejects this flow alone. Throws what ends the stream.
  void take(ProducerSession& session, v1::PutItem& item);
  void take_of_flow(ProducerSession& session, IncomingFlow& flow, v1::PutItem& item);
  // Returns the flow of an item, or null after answering an item of a flow that is over or unknown.
  std::shared_ptr<IncomingFlow> flow_of(ProducerSession& session, const v1::EdgeKey& key);
  Failure unknown_flow(const v1::EdgeKey& key) const;

  const Identity identity_;
  const v1::Signature signature_;
  const CreditLimits limits_;
  // Guards everything below, and the flows.
  std::mutex mutex_;
  std::map<FlowId, std::shared_ptr<IncomingFlow>> flows_;
  RecentMap<FlowId, Outcome> past_{4096};
  std::list<Handshake> handshakes_;
};

}  // namespace stage
