// A write to a connection that the other side has closed is an error, and no signal that ends the process.
#pragma once

namespace kv_offload {

// For the calling thread, while it lives, for libraries that write without MSG_NOSIGNAL.
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
