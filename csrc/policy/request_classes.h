// SPDX-License-Identifier: Apache-2.0
// RequestClasses: what the entries of one request have in common: whether the request reused earlier entries
// (a continued conversation), and how much new prompt it brought, in octaves. A request's record lives as
// long as entries or samples refer to it.
#pragma once

#include <algorithm>
#include <bit>

#include "base/segmented_vector.h"
#include "policy/id_table.h"
#include "policy/reuse_predictor.h"

namespace kv_offload {

class RequestClasses {
 public:
  using Record = std::uint32_t;
  static constexpr unsigned kUnknown = ReusePredictor::kRequestClasses - 1;
  // Requests in classes below this one brought only new prompt; those in this class and above reused earlier
  // entries.
  static constexpr unsigned kFirstReturning = kUnknown / 2;

  RequestClasses() { records_.push_back({.of_class = kUnknown}); }  // of request 0: unknown

  // Returns this request's record and adds a reference to it. If it throws, nothing has changed.
  Record refer(std::uint32_t request) {
    if (request == 0) return 0;
    if (request != last_request_) {
      last_record_ = by_number_.find_or_add(request, number_of(), [&] { return make(request); });
      last_request_ = request;
    }
    return add_reference(last_record_);
  }
  Record add_reference(Record record) {
    if (record != 0) ++records_[record].references;
    return record;
  }
  void release(Record record) {
    if (record == 0 || --records_[record].references > 0) return;
    by_number_.erase(records_[record].request, number_of());
    if (last_request_ == records_[record].request) last_request_ = 0;
    records_[record].next_free = first_free_;
    first_free_ = record;
  }

  bool is_of(Record record, std::uint32_t request) const {
    return request != 0 && records_[record].request == request;
  }
  // Reports that the request stored an entry. Sampled entries show whether they were here before; the others
  // are assumed to be new in the same proportion.
  void on_stored(Record record, bool sampled, bool was_stored_before) {
    Data& data = records_[record];
    ++data.stored;
    data.sampled += sampled;
    data.fresh += sampled && !was_stored_before;
    data.returning |= was_stored_before;
    rate(data);
  }
  // Reports that the request reused an entry that is not the common head of several prefixes.
  void on_return(Record record) {
    if (record == 0 || records_[record].returning) return;
    records_[record].returning = true;
    rate(records_[record]);
  }
  unsigned class_of(Record record) const { return records_[record].of_class; }
  std::size_t size() const { return by_number_.size(); }

 private:
  struct Data {
    std::uint32_t request = 0;
    std::uint32_t references = 0;
    std::uint32_t stored = 0;
    std::uint32_t sampled = 0;  // of those stored
    std::uint32_t fresh = 0;    // of those sampled
    std::uint32_t of_class = 0;
    Record next_free = 0;
    bool returning = false;  // it continues an earlier one
  };
  struct NumberOf {
    const RequestClasses& classes;
    ChunkId operator()(Record record) const { return classes.records_[record].request; }
  };
  NumberOf number_of() const { return {*this}; }
  static void rate(Data& data) {
    const std::uint64_t fresh = std::uint64_t{data.stored} * (data.fresh + 1) / (data.sampled + 1);
    const unsigned octave =
        std::min(kFirstReturning - 1, static_cast<unsigned>(std::bit_width(fresh + 1)) - 1);
    data.of_class = (data.returning ? kFirstReturning : 0) + octave;
  }
  Record make(std::uint32_t request) {
    if (first_free_ == 0) {
      records_.push_back({.request = request});
      return static_cast<Record>(records_.size() - 1);
    }
    const Record record = first_free_;
    first_free_ = records_[record].next_free;
    records_[record] = {.request = request};
    return record;
  }

  SegmentedVector<Data> records_;
  Record first_free_ = 0;  // 0: none, because record 0 is never released
  IdTable by_number_;
  std::uint32_t last_request_ = 0;
  Record last_record_ = 0;
};

}  // namespace kv_offload
