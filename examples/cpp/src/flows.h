// What both ends of a flow share.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "stagemesh/v1/chunk.pb.h"

namespace stage {

namespace v1 = stagemesh::v1;

using Clock = std::chrono::steady_clock;

// For how long a producer may be away, and a consumer unreachable.
constexpr std::chrono::seconds LOST_PEER{15};

// What identifies a flow: the request, the edge and the attempt.
using FlowId = std::tuple<std::string, std::string, uint32_t>;

inline FlowId id_of(const v1::EdgeKey& key) { return {key.request_id(), key.edge(), key.attempt()}; }

// Who this replica is, for its peers.
struct Identity {
  std::string pipeline;
  std::string generation;
  std::string stage;
  std::string replica;
  // Generated at random when the process starts.
  std::string incarnation;
};

// A map that forgets its oldest entries.
template <class Key, class Value>
class RecentMap {
 public:
  explicit RecentMap(size_t capacity) : capacity_(capacity) {}

  void set(const Key& key, Value value) {
    if (values_.insert_or_assign(key, std::move(value)).second) order_.push_back(key);
    if (order_.size() <= capacity_) return;
    values_.erase(order_.front());
    order_.pop_front();
  }

  // Returns the value of a key, or null.
  const Value* find(const Key& key) const {
    const auto found = values_.find(key);
    return found == values_.end() ? nullptr : &found->second;
  }

 private:
  const size_t capacity_;
  std::map<Key, Value> values_;
  // The keys, the oldest one first.
  std::deque<Key> order_;
};

}  // namespace stage
