// SPDX-License-Identifier: Apache-2.0
// ByteLock: says whether the processes of another engine live. Each process that reads rows of a region holds
// a shared lock on one byte of the region's file, the byte with its engine's reader number. The scheduler
// that owns the region holds one on the byte kOwnerByte. The kernel drops the lock when the process ends,
// however it ends. A stopped process keeps it. The lock belongs to the open file (F_OFD_SETLK), so two
// engines in one process do not share it, and process ids play no part.
//
// Never waits. The flock of SharedFile is independent of these locks.
//
// Private to memory/.
#pragma once

#include <fcntl.h>

namespace kv_offload {

class ByteLock {
 public:
  // Tries to lock the byte, or this byte and those after it, exclusively, until the end of this object.
  ByteLock(int fd, unsigned byte, unsigned count = 1)
      : fd_(fd), byte_(byte), count_(count), is_held_(set(fd, byte, F_WRLCK, count)) {}
  ~ByteLock() {
    if (is_held_) (void)set(fd_, byte_, F_UNLCK, count_);
  }
  ByteLock(const ByteLock&) = delete;
  ByteLock& operator=(const ByteLock&) = delete;
  bool is_held() const { return is_held_; }

  // Locks the byte exclusively, or shared, until `fd` is closed. Replaces this file's own lock at once. False
  // if another process holds it (or if the file system has no such locks).
  static bool take(int fd, unsigned byte) { return set(fd, byte, F_WRLCK); }
  static bool share(int fd, unsigned byte) { return set(fd, byte, F_RDLCK); }
  // True if another open file has locked the byte. Locks nothing, so it never disturbs another process.
  static bool is_locked(int fd, unsigned byte) {
    struct flock lock = of(byte, F_WRLCK, 1);
    return ::fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
  }

 private:
  static struct flock of(unsigned byte, short type, unsigned count) {
    struct flock lock {};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = byte;
    lock.l_len = count;
    return lock;
  }
  static bool set(int fd, unsigned byte, short type, unsigned count = 1) {
    struct flock lock = of(byte, type, count);
    return ::fcntl(fd, F_OFD_SETLK, &lock) == 0;
  }

  const int fd_;
  const unsigned byte_, count_;
  const bool is_held_;
};

}  // namespace kv_offload
