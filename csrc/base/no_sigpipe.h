// SPDX-License-Identifier: Apache-2.0
// Turns a write to a closed connection into an error instead of a SIGPIPE that ends the process.
#pragma once

namespace kv_offload {

// Blocks SIGPIPE on the calling thread during the object's lifetime, for libraries that write without
// MSG_NOSIGNAL.
class NoSigpipe {
 public:
  NoSigpipe();
  ~NoSigpipe();
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;

 private:
  bool was_pending_ = false, was_blocked_ = false;
};

}  // namespace kv_offload
